"""Pytest fixtures for other teams: the real service, running, with an account per test.

It starts gunicorn in a process of its own, from the folder that this file is in, so
that no module, setting or path of a test's project meets one of the service's.
"""

import hashlib
import http.client
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

# Runs the command until it ends or the tests do, even by kill -9, and then clears up:
# the last to close the listener, so that a closed port means that nothing is left.
KEEPER = """
import os, shutil, signal, subprocess, sys, threading
folder, *command = sys.argv[1:]
server = subprocess.Popen(command, close_fds=False, start_new_session=True)
def end_with_the_tests():
    sys.stdin.read()
    os.killpg(server.pid, signal.SIGKILL)
threading.Thread(target=end_with_the_tests, daemon=True).start()
server.wait()
shutil.rmtree(folder)
"""
# In a file, where gunicorn passes over what its version does not know yet.
SETTINGS = """
bind = "fd://{}"
pythonpath = {!r}
worker_class = "gthread"
threads = 8
loglevel = "warning"
control_socket_disable = True
"""


@dataclass(frozen=True)
class Service:
    """A running service; `url` is its base, without a slash at the end."""

    url: str
    store: Any

    def issue_token(self, account: str | None = None) -> str:
        """A token for the account, or for a new one."""
        token = secrets.token_urlsafe()
        digest = hashlib.sha256(token.encode()).digest()
        self.store.add_token(account or secrets.token_hex(), digest)
        return token


@dataclass(frozen=True)
class Caller:
    """What a test needs to call the service for an account that no other test has."""

    url: str
    token: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


@pytest.fixture(scope="session")
def gardening_service() -> Iterator[Service]:
    """The service, for the session: `url` and `issue_token(account=None)`."""
    memory = "/dev/shm"  # where no write waits for a disk, unless TMPDIR is wanted
    at_hand = "TMPDIR" not in os.environ and os.access(memory, os.W_OK)
    folder = tempfile.mkdtemp(prefix="gardening-", dir=memory if at_hand else None)
    database = os.path.join(folder, "gardening.db")
    here = Path(__file__).parent
    ours = ("FLASK_", "GUNICORN_", "PYTHON", "WEB_CONCURRENCY")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    gunicorn = [sys.executable, "-m", "gunicorn", "app:create_app()"]
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        tempfile.TemporaryFile() as log,
    ):
        # What gunicorn sets on sockets of its own; else kept-alive calls take 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        settings = SETTINGS.format(listener.fileno(), str(here))
        Path(folder, "gunicorn.conf.py").write_text(settings)
        host, port = listener.getsockname()
        keeper = subprocess.Popen(
            [sys.executable, "-c", KEEPER, folder, *gunicorn],
            cwd=folder,
            env=environment | {"FLASK_DATABASE": database},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C is for the tests
        )
        with keeper, keeper.stdin:
            # From here on a service that ends refuses, and is not waited for.
            listener.close()
            try:
                connection = http.client.HTTPConnection(host, port)
                connection.request("GET", "/api/v1/hello-service")
                connection.getresponse()
            except (OSError, http.client.HTTPException):
                keeper.wait()
                log.seek(0)
                pytest.fail(f"The service did not start: {log.read().decode()}", False)
            finally:
                connection.close()
            # Under this name in the package, and as `store` in the service's own tests.
            store = import_module(f"{__package__}.store".lstrip("."))
            yield Service(f"http://{host}:{port}", store.Store(database))


@pytest.fixture
def gardening(gardening_service: Service) -> Caller:
    """The service for one test: `url`, `token` and `headers` of an account of its own."""
    return Caller(gardening_service.url, gardening_service.issue_token())
