"""The service under another WSGI server than gunicorn."""

import os
import subprocess
import sys
import threading
from urllib.parse import urljoin

import pytest

from helpers.openapi import HELLO
from helpers.running import BIN, LIMIT, PROJECTS, ROOT, Client, run

# It prints its port once it listens.
SCRIPT = """
from wsgiref.validate import validator  # PEP 3333
from waitress import create_server
from app import create_app
server = create_server(validator(create_app()), host="127.0.0.1", port=0)
print(server.effective_port, flush=True)
server.run()
"""


@pytest.fixture
def client(environment, token):
    """A client of the service under waitress."""
    options = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], **options) as process:
        limit = threading.Timer(LIMIT, process.kill)
        limit.start()
        try:
            with Client(int(process.stdout.readline()), token) as client:
                yield client
        finally:
            limit.cancel()
            process.kill()


def test_contract_holds(client):
    key = {"Idempotency_Key": "k"}
    status, headers, content = client.ask("POST", PROJECTS, {"name": "é"}, **key)
    location, etag = urljoin(PROJECTS, headers["Location"]), headers["ETag"]
    assert status == 201 and location.startswith(f"{PROJECTS}/")
    assert client.ask("POST", PROJECTS, {"name": "é"}, **key)[2] == content
    assert client.ask("GET", location, If_None_Match=etag)[0] == 304
    assert client.ask("PUT", location, {}, If_Match='"0"')[0] == 412
    assert client.ask("PUT", location, {"name": None}, If_Match=etag)[0] == 200
    client.call("POST", PROJECTS, {})
    page = client.ask("GET", f"{PROJECTS}?size=1")
    target = page[1]["Link"].split(">")[0].strip("<")
    assert len(client.call("GET", urljoin(PROJECTS, target))[1]["projectList"]) == 1
    assert client.call("PUT", PROJECTS, {})[0] == 405
    assert client.call("POST", PROJECTS, {"nmae": "x"})[0] == 422
    assert client.fetch("POST", PROJECTS, "{}", Content_Type="text/plain")[0] == 415
    assert client.call("PURGE", HELLO)[1]["requestMethod"] == "PURGE"
    assert client.call("PUT", f"{HELLO}/auth")[1]["isAuthenticated"]
    assert client.ask("DELETE", location)[0] == 204
    assert client.call("GET", location)[0] == 404
    client.authorization = {}
    assert client.call("GET", PROJECTS)[0] == 401


def test_file_that_replaces_the_database_before_the_first_use_is_not_used(
    environment, database, client
):
    run(BIN / "flask", "backup", f"{database}-new", environment=environment)
    os.rename(f"{database}-new", database)
    assert client.call("GET", "/health")[0] == 503
    assert client.call("POST", PROJECTS, {})[0] == 503
