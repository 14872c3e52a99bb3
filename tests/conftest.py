import http.client
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from conformance import check_response
from flask import request

from app import create_app
from auth import digest
from store import Store

pytest_plugins = ["testing"]

PROJECTS = "/api/v1/gardening/projects"
ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "gardening.db")


@pytest.fixture
def store(path):
    return Store(path)


@pytest.fixture
def app(path):
    """The service, with each of its answers checked against openapi.json."""
    app = create_app({"DATABASE": path})

    @app.after_request
    def check(answer):
        check_response(
            request.method,
            request.path,
            answer.status_code,
            answer.headers,
            answer.data,
        )
        return answer

    return app


@pytest.fixture
def sign_in(app):
    """A test client with a token of the account."""

    def sign_in(account):
        token = f"gardening_of_{account}"
        app.store.add_token(account, digest(token))
        client = app.test_client()
        client.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {token}"
        return client

    return sign_in


@pytest.fixture
def client(sign_in):
    return sign_in("ann")


@pytest.fixture
def project(client):
    return client.post(PROJECTS, json={"name": "Park"}).json


@pytest.fixture
def url(project):
    return f"{PROJECTS}/{project['id']}"


@pytest.fixture
def environment(path):
    return os.environ | {"FLASK_DATABASE": path}


@pytest.fixture
def token(environment):
    command = [BIN / "flask", "token", "create", "ann"]
    return subprocess.check_output(
        command, cwd=ROOT, env=environment, text=True
    ).strip()


@contextmanager
def gunicorn(environment, *options):
    """gunicorn with its own settings, and these: its process and its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # As gunicorn does for a socket of its own.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = listener.getsockname()[1]
        command = [BIN / "gunicorn", "--bind", f"fd://{listener.fileno()}"]
        process = subprocess.Popen(
            [*command, "--workers=2", "--log-level=warning", *options],
            cwd=ROOT,
            env=environment,
            pass_fds=[listener.fileno()],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield process, port
    finally:
        process.terminate()
        process.wait()


class Client(http.client.HTTPConnection):
    """A connection that is kept alive, with a token."""

    def __init__(self, port, token):
        super().__init__("127.0.0.1", port)
        self.authorization = {"Authorization": f"Bearer {token}"}

    def call(self, method, path, body=None):
        """Status and JSON of the answer."""
        status, _, content = self.ask(method, path, body)
        return status, json.loads(content) if content else None

    def ask(self, method, path, body=None):
        """Status, headers and content of the answer."""
        headers = self.authorization | {"Content-Type": "application/json"}
        self.request(method, path, None if body is None else json.dumps(body), headers)
        response = self.getresponse()
        content = response.read()
        route = path.removeprefix("/garden").split("?")[0]
        check_response(method, route, response.status, response.headers, content)
        return response.status, response.headers, content

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def at_once(work, count=8):
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
