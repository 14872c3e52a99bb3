"""Pytest fixtures for other teams: the real service, with an account per test.

The service runs as a process of its own, so that its modules, settings and paths cannot
clash with those of the project under test.
"""
# Tested in tests/test_embedding.py.

import json
import os
import secrets
import shlex
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from subprocess import PIPE, Popen
from threading import Timer
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from . import COMMAND, ROOT

Plan = Sequence[str]
LIMIT = 10  # seconds, for the start, for a response and for the end


@dataclass(frozen=True)
class Service:
    url: str  # its base, without a slash at the end
    _process: Popen[bytes]

    def issue_token(
        self, account: str | None = None, *, expired: bool = False, fail: Plan = ()
    ) -> str:
        """A token for the account, or for a new one, with a plan of failures.

        Raises ValueError for a bad name or an unknown failure.
        """
        if isinstance(fail, str):
            raise ValueError(f"fail takes a list: fail=[{fail!r}]")  # noqa: TRY004
        body = {"account": account, "expired": expired, "fail": [*fail]}
        return str(self._call("POST", "/test/tokens", body)["token"])

    def left(self, token: str) -> list[str]:
        """What is left of the token's plan. Raises ValueError for an unknown token."""
        return list(self._call("GET", f"/test/tokens/{quote(token)}")["fail"])

    def revoke(self, token: str) -> None:
        """Its next request gets 401. Raises ValueError for an unknown token."""
        self._call("DELETE", f"/test/tokens/{quote(token)}")

    def _call(self, method: str, path: str, body: object = None) -> Any:
        self._require_running()
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=LIMIT)
        headers = {"Content-Type": "application/json"}
        try:
            with closing(connection):
                connection.request(method, path, json.dumps(body), headers)
                response = connection.getresponse()
                answer = json.loads(response.read() or "null")
        except (OSError, HTTPException) as error:
            pytest.fail(f"The service does not respond: {error!r}", pytrace=False)
        if response.status >= 400:
            raise ValueError(answer.get("errors", answer["detail"]))
        return answer

    def _require_running(self) -> None:
        if self._process.poll() is not None:
            pytest.fail("The service has ended.", pytrace=False)


@dataclass(frozen=True)
class Caller:
    """The service for a test, with an account that no other test has."""

    url: str
    token: str
    headers: dict[str, str]
    account: str
    _service: Service

    def issue_token(self, *, expired: bool = False, fail: Plan = ()) -> str:
        """Another token of the account. Raises ValueError for an unknown failure."""
        return self._service.issue_token(self.account, expired=expired, fail=fail)

    def left(self, token: str) -> list[str]:
        """What is left of the token's plan. Raises ValueError for an unknown token."""
        return self._service.left(token)

    def revoke(self, token: str) -> None:
        """Its next request gets 401. Raises ValueError for an unknown token."""
        self._service.revoke(token)


@pytest.fixture(scope="session")
def gardening_service() -> Iterator[Service]:
    """The service: `url`, `issue_token`, `left` and `revoke`.

    GARDENING_TEST_SERVICE may name another command that starts it, split as by a shell.
    """
    words = shlex.split(os.environ.get("GARDENING_TEST_SERVICE", ""))
    words, folder = (words, None) if words else (COMMAND, ROOT)
    # In a process group of its own, since Ctrl-C is for the tests. It writes to their
    # standard error, which pytest shows with the test that failed.
    with Popen(words, cwd=folder, stdin=PIPE, stdout=PIPE, process_group=0) as command:
        assert command.stdout
        limit = Timer(LIMIT, command.kill)  # so that readline returns
        limit.start()
        try:
            ready = command.stdout.readline()
            limit.cancel()
            if not ready:
                pytest.fail("The service did not start.", pytrace=False)
            service = Service(json.loads(ready)["url"], command)
            yield service
            service._require_running()
            command.terminate()
            command.wait(LIMIT)
        finally:
            limit.cancel()
            command.kill()


@pytest.fixture
def gardening(gardening_service: Service) -> Caller:
    """The service for one test: `url`, `token`, `headers`, `account` and its methods."""
    account = secrets.token_hex(8)
    token = gardening_service.issue_token(account)
    headers = {"Authorization": f"Bearer {token}"}
    return Caller(gardening_service.url, token, headers, account, gardening_service)
