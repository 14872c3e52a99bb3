"""The service under gunicorn and other WSGI servers."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from urllib.parse import urljoin

import pytest

from helpers.openapi import HELLO
from helpers.running import BIN, LIMIT, PROJECTS, ROOT, Client, gunicorn, run

# Each prints its port once it listens.
SCRIPTS = {
    "waitress": """
from waitress import create_server
server = create_server(create_app(), host="127.0.0.1", port=0)
print(server.effective_port, flush=True)
server.run()
""",
    "cheroot": """
from cheroot.wsgi import Server
server = Server(("127.0.0.1", 0), create_app())
server.prepare()
print(server.bind_addr[1], flush=True)
server.serve()
""",
    "werkzeug": """
from werkzeug.serving import make_server
server = make_server("127.0.0.1", 0, create_app(), threaded=True)
print(server.port, flush=True)
server.serve_forever()
""",
}


@contextmanager
def serving(server, environment):
    """The port of the service under this server."""
    if server == "gunicorn":
        with gunicorn(environment) as (_, port), Client(port, "none") as client:
            client.fetch("GET", HELLO)  # which waits until it has started
            yield port
        return
    command = [sys.executable, "-c", f"from app import create_app\n{SCRIPTS[server]}"]
    options = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **options) as process:
        limit = threading.Timer(LIMIT, process.kill)
        limit.start()
        try:
            yield int(process.stdout.readline())
        finally:
            limit.cancel()
            process.kill()


@pytest.mark.parametrize("server", ["gunicorn", *SCRIPTS])
def test_contract_holds_with_a_prefix_under_any_server(environment, token, server):
    environment |= {"GARDENING_PREFIX": "/garden"}
    with serving(server, environment) as port, Client(port, token) as client:
        projects, hello = f"/garden{PROJECTS}", f"/garden{HELLO}"
        key = {"Idempotency_Key": "k"}
        status, headers, content = client.ask("POST", projects, {"name": "é"}, **key)
        location, etag = headers["Location"], headers["ETag"]
        assert status == 201 and location.startswith(f"{projects}/")
        assert client.ask("POST", projects, {"name": "é"}, **key)[2] == content
        assert client.ask("GET", location, If_None_Match=etag)[0] == 304
        assert client.ask("PUT", location, {}, If_Match='"0"')[0] == 412
        assert client.ask("PUT", location, {"name": None}, If_Match=etag)[0] == 200
        client.call("POST", projects, {})
        page = client.ask("GET", f"{projects}?size=1")
        target = page[1]["Link"].split(">")[0].strip("<")
        assert len(client.call("GET", urljoin(projects, target))[1]["projectList"]) == 1
        assert client.call("PUT", projects, {})[0] == 405
        assert client.call("POST", projects, {"nmae": "x"})[0] == 422
        assert client.fetch("POST", projects, "{}", Content_Type="text/plain")[0] == 415
        assert client.call("PURGE", hello)[1]["requestMethod"] == "PURGE"
        assert client.call("PUT", f"{hello}/auth")[1]["isAuthenticated"]
        assert client.ask("DELETE", location)[0] == 204
        assert client.call("GET", location)[0] == 404
        assert client.call("GET", PROJECTS)[0] == 200
        client.authorization = {}
        assert client.call("GET", projects)[0] == 401


@pytest.mark.parametrize("server", ["gunicorn", "waitress"])
def test_file_that_replaces_the_database_before_the_first_use_is_not_used(
    environment, database, token, server
):
    run(BIN / "flask", "backup", f"{database}-new", environment=environment)
    with serving(server, environment) as port, Client(port, token) as client:
        os.rename(f"{database}-new", database)
        assert client.call("GET", "/health")[0] == 503
        assert client.call("POST", PROJECTS, {})[0] == 503
