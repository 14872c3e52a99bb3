"""The service under other WSGI servers than gunicorn."""

import os
import subprocess
import sys
from contextlib import contextmanager
from http.client import HTTPException
from urllib.parse import urljoin

import pytest

from helpers.openapi import HELLO
from helpers.running import (
    BIN,
    LIMIT,
    PROJECTS,
    ROOT,
    Client,
    flask_run,
    gunicorn,
    hold_port,
    port_of,
    run,
    wait_for,
)

WAITRESS = "from waitress import serve; serve(create_app(), port={})"
CHEROOT = """
from cheroot.wsgi import Server
server = Server(("127.0.0.1", {}), create_app())
server.safe_start()
"""


@contextmanager
def python_server(script, environment):
    """The port of a server that this script starts."""
    with hold_port() as holder:
        port = holder.getsockname()[1]
        command = [
            sys.executable,
            "-c",
            f"from app import create_app\n{script.format(port)}",
        ]
        with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
            try:
                wait_for(lambda: greets(port) or process.poll() is not None)
                yield port
            finally:
                process.terminate()
                process.wait(LIMIT)


def greets(port):
    """Whether it responds, without a use of the database."""
    with Client(port, "none") as client:
        try:
            return client.fetch("GET", HELLO)[0] == 200
        except (OSError, HTTPException):
            return False


@contextmanager
def port_under(server, environment):
    if server == "gunicorn":
        with gunicorn(environment) as (_, port):
            yield port
    elif server == "flask run":
        with flask_run(environment) as (url, _):
            yield port_of(url)
    else:
        script = WAITRESS if server == "waitress" else CHEROOT
        with python_server(script, environment) as port:
            yield port


@pytest.mark.parametrize("server", ["gunicorn", "flask run", "waitress", "cheroot"])
def test_contract_holds_with_a_prefix_under_any_server(environment, token, server):
    environment |= {"GARDENING_PREFIX": "/garden"}
    with port_under(server, environment) as port, Client(port, token) as client:
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
    with port_under(server, environment) as port:
        wait_for(lambda: greets(port))
        os.rename(f"{database}-new", database)
        with Client(port, token) as client:
            assert client.call("GET", "/health")[0] == 503
            assert client.call("POST", PROJECTS, {})[0] == 503
