"""Pytest fixtures for other teams: the real service, running, with an account per test.

They start the command of testservice.py as a process of its own, so that no module,
setting or path of a test's project meets one of the service's.
"""

import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from typing import IO, NoReturn

import pytest

# -E: a PYTHONPATH of the tests is not for the command.
COMMAND = [sys.executable, "-E", str(Path(__file__).with_name("testservice.py"))]


@dataclass(frozen=True)
class Service:
    """A running service; `url` is its base, without a slash at the end."""

    url: str
    _requests: IO[str]
    _responses: IO[str]
    _log: IO[str]
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def issue_token(
        self,
        account: str | None = None,
        *,
        expired: bool = False,
        fail: Sequence[str] = (),
    ) -> str:
        """A token for the account, or for a new one; its first requests fail so.

        Raises ValueError for a bad name, or a failure that is not among the known ones.
        """
        request = {"account": account or "", "expired": expired, "fail": fail}
        with self._turn:
            with suppress(BrokenPipeError):
                print(json.dumps(request), file=self._requests, flush=True)
            response = self._responses.readline()
        if not response:
            explain("The service has ended", self._log)
        given = json.loads(response)
        if "error" in given:
            raise ValueError(given["error"])
        return str(given["token"])


@dataclass(frozen=True)
class Caller:
    """What a test needs to call the service for an account that no other test has."""

    url: str
    token: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


def explain(failure: str, log: IO[str]) -> NoReturn:
    log.seek(0)
    pytest.fail(f"{failure}: {log.read()}", pytrace=False)


@pytest.fixture(scope="session")
def gardening_service() -> Iterator[Service]:
    """The service: `url` and `issue_token(account=None, expired=False, fail=[])`."""
    with (
        tempfile.TemporaryFile("a+") as log,
        Popen(  # in a process group of its own, since Ctrl-C is for the tests
            COMMAND, stdin=PIPE, stdout=PIPE, stderr=log, text=True, process_group=0
        ) as command,
    ):
        assert command.stdin and command.stdout
        ready = command.stdout.readline()
        if not ready:
            explain("The service did not start", log)
        yield Service(json.loads(ready)["url"], command.stdin, command.stdout, log)
        ended = command.poll() is not None
        command.communicate()  # closes its input, which ends it
        if ended or command.returncode:
            explain("The service has ended", log)


@pytest.fixture
def gardening(gardening_service: Service) -> Caller:
    """The service for one test: `url`, `token` and `headers` of an account of its own."""
    return Caller(gardening_service.url, gardening_service.issue_token())
