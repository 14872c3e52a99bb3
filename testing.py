"""Pytest fixtures for other teams: the real service, running, with an account per test.

They start the command of testservice.py as a process of its own, so that no module,
setting or path of a test's project meets one of the service's.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

# -E: a PYTHONPATH of the tests is not for the command.
COMMAND = [sys.executable, "-E", str(Path(__file__).with_name("testservice.py"))]


@dataclass(frozen=True)
class Service:
    """A running service; `url` is its base, without a slash at the end."""

    url: str
    _requests: IO[str]
    _answers: IO[str]
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def issue_token(self, account: str | None = None, *, expired: bool = False) -> str:
        """A token for the account, or for a new one. Raises ValueError for a bad name."""
        with self._turn:
            request = {"account": account or "", "expired": expired}
            print(json.dumps(request), file=self._requests, flush=True)
            answer = json.loads(self._answers.readline())
        if "error" in answer:
            raise ValueError(answer["error"])
        return str(answer["token"])


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
    """The service, for the session: `url` and `issue_token(account=None, expired=False)`."""
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests
        ) as command,
    ):
        assert command.stdin and command.stdout
        ready = command.stdout.readline()
        if not ready:
            log.seek(0)
            pytest.fail(f"The service did not start: {log.read()}", pytrace=False)
        yield Service(json.loads(ready)["url"], command.stdin, command.stdout)


@pytest.fixture
def gardening(gardening_service: Service) -> Caller:
    """The service for one test: `url`, `token` and `headers` of an account of its own."""
    return Caller(gardening_service.url, gardening_service.issue_token())
