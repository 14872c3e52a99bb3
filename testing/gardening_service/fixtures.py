"""Pytest fixtures for other teams: the real service, with an account per test.

It runs as a process of its own, so that no module, setting or path of a test's project
meets one of the service's.
"""

import json
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from subprocess import PIPE, Popen
from typing import IO, Any, NoReturn
from urllib.parse import quote, urlsplit

import pytest

from . import COMMAND, ROOT

Plan = Sequence[str]
LIMIT = 10  # seconds, for a response and for the end


@dataclass(frozen=True)
class Service:
    url: str  # its base, without a slash at the end
    _log: IO[str]

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
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=LIMIT)
        headers = {"Content-Type": "application/json"}
        try:
            with closing(connection):
                connection.request(method, path, json.dumps(body), headers)
                response = connection.getresponse()
                answer = json.loads(response.read() or "null")
        except (OSError, HTTPException) as error:
            explain(f"The service has ended ({error!r})", self._log)
        if response.status >= 400:
            raise ValueError(answer.get("errors", answer["detail"]))
        return answer


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


def explain(failure: str, log: IO[str]) -> NoReturn:
    log.seek(0)
    pytest.fail(f"{failure}: {log.read()}", pytrace=False)


@pytest.fixture(scope="session")
def gardening_service() -> Iterator[Service]:
    """The service: `url`, `issue_token`, `left` and `revoke`."""
    with (
        tempfile.TemporaryFile("a+") as log,
        Popen(  # in a process group of its own, since Ctrl-C is for the tests
            COMMAND, cwd=ROOT, stdin=PIPE, stdout=PIPE, stderr=log, process_group=0
        ) as command,
    ):
        assert command.stdout
        ready = command.stdout.readline()
        if not ready:
            explain("The service did not start", log)
        try:
            yield Service(json.loads(ready)["url"], log)
            if command.poll() is not None:
                explain("The service has ended", log)
            command.terminate()
            command.wait(LIMIT)
        finally:
            command.kill()


@pytest.fixture
def gardening(gardening_service: Service) -> Caller:
    """The service for one test: `url`, `token`, `headers`, `account`, `issue_token`."""
    account = secrets.token_hex(8)
    token = gardening_service.issue_token(account)
    headers = {"Authorization": f"Bearer {token}"}
    return Caller(gardening_service.url, token, headers, account, gardening_service)
