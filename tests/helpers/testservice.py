"""The test service as its users have it: a command among theirs, and what it leaves."""

import errno
import json
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from helpers.running import PROJECTS, ROOT, Client, port_of, wait_for


def connect(url, token=""):
    """A client of the service at this address."""
    return Client(port_of(url), token)


def call_test_tokens(url, method, token="", body=None):
    """Status and JSON of the response of the test service about its tokens."""
    path = f"/test/tokens/{token}" if token else "/test/tokens"
    headers = {} if body is None else {"Content-Type": "application/json"}
    with connect(url) as client:
        body = None if body is None else json.dumps(body)
        status, _, content = client.fetch(method, path, body, **headers)
    return status, json.loads(content) if content else None


def call_projects(url, token, method="GET", body=None):
    """Status and JSON of the response of the account's Projects."""
    with connect(url, token) as client:
        return client.call(method, PROJECTS, body)


def copy_service(folder):
    """The service, as a clone has it."""
    for file in [*ROOT.glob("*.py"), ROOT / "openapi.json"]:
        shutil.copy(file, folder)
    for package in ("engines", "testservice"):
        shutil.copytree(ROOT / package, folder / package)


def processes_still_running(mark):
    """The processes that have this mark in their environment, and do not end."""

    def running():
        found = []
        for folder in Path("/proc").glob("[1-9]*"):
            with suppress(FileNotFoundError, PermissionError, ProcessLookupError):
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append(folder.name)
        return found

    with suppress(AssertionError):
        wait_for(lambda: not running())
    return running()


def refuses(url):
    """Whether the port is closed, as soon as whoever still listens has ended."""

    def is_closed():
        with socket.socket() as client:
            address = ("127.0.0.1", port_of(url))
            return client.connect_ex(address) == errno.ECONNREFUSED

    return wait_for(is_closed)
