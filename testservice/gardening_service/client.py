"""What runs the test service and talks to it, for tests in Python.

The service runs as a process of its own, so that its modules, settings and paths cannot clash with
those of the project under test.
"""

import json
import os
import selectors  # by its module, since eventlet replaces DefaultSelector in it
import shlex
import signal
import subprocess  # by its module, since gevent replaces Popen in it
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import quote, urlsplit

from . import COMMAND, ROOT

Plan = Sequence[str]
Request = dict[str, Any]  # method, path, headers, body, status
START_LIMIT = 60  # seconds, on a busy machine
LIMIT = 10  # seconds, for a response and for the end
ENDED = "The service has ended."


@dataclass(frozen=True)
class Service:
    """The running service. Its methods raise ValueError for what it refuses."""

    url: str  # its base, without a slash at the end

    def with_new_account(self) -> "Gardening":
        """The service with an account that nobody else has."""
        issued = self._call("POST", "/test/tokens", {})
        headers = {"Authorization": f"Bearer {issued['token']}"}
        return Gardening(self.url, issued["token"], headers, issued["account"], self)

    def issue_token(
        self, account: str | None = None, *, expired: bool = False, fail: Plan = ()
    ) -> str:
        """A token for the account, or for a new one, with a plan of failures."""
        body = {"account": account, "expired": expired, "fail": fail}
        return str(self._call("POST", "/test/tokens", body)["token"])

    def plan(self, token: str, fail: Plan) -> None:
        """Replace what is left of the token's plan."""
        self._call("PUT", path_of(token), {"fail": fail})

    def left(self, token: str) -> list[str]:
        """What is left of the token's plan."""
        return list(self._call("GET", path_of(token))["fail"])

    def requests(self, token: str) -> list[Request]:
        """The last 1,000 requests with the token, in the order of arrival."""
        return list(self._call("GET", path_of(token))["requests"])

    def revoke(self, token: str) -> None:
        """The token's next request gets 401."""
        self._call("DELETE", path_of(token))

    def _call(self, method: str, path: str, body: object = None) -> Any:
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=LIMIT)
        headers = {"Content-Type": "application/json"}
        with closing(connection):
            try:
                connection.request(method, path, json.dumps(body), headers)
            except ConnectionRefusedError as error:
                raise RuntimeError(ENDED) from error
            response = connection.getresponse()
            content = json.loads(response.read() or "null")
        if response.status >= 400:
            raise ValueError(content.get("errors", content["detail"]))
        return content


def path_of(token: str) -> str:
    return f"/test/tokens/{quote(token)}"


@dataclass(frozen=True)
class Gardening:
    """The service with an account, for one test."""

    url: str
    token: str
    headers: dict[str, str]
    account: str
    _service: Service

    def issue_token(self, *, expired: bool = False, fail: Plan = ()) -> str:
        """Another token of the account, with a plan of failures."""
        return self._service.issue_token(self.account, expired=expired, fail=fail)

    def plan(self, fail: Plan) -> None:
        """Let the next requests with `token` fail like this."""
        self._service.plan(self.token, fail)

    @property
    def requests(self) -> list[Request]:
        """The last 1,000 requests with `token`, in the order of arrival."""
        return self._service.requests(self.token)

    def left(self, token: str | None = None) -> list[str]:
        """What is left of the plan of this token, or of `self.token`."""
        return self._service.left(self.token if token is None else token)

    def revoke(self, token: str | None = None) -> None:
        """The next request with this token, or with `self.token`, gets 401."""
        self._service.revoke(self.token if token is None else token)


@contextmanager
def run_service() -> Iterator[Service]:
    """Run the service while a `with` lasts. Raises RuntimeError if it ends by itself.

    GARDENING_TEST_SERVICE may name another command that starts it, split as by a shell.
    """
    words = shlex.split(os.environ.get("GARDENING_TEST_SERVICE", ""))
    words, folder = (words, None) if words else (COMMAND, ROOT)
    pipe = subprocess.PIPE
    # In a process group of its own, since Ctrl-C is for the tests.
    with (
        subprocess.Popen(words, cwd=folder, stdin=pipe, stdout=pipe, process_group=0) as process,
        selectors.DefaultSelector() as output,
    ):
        assert process.stdout
        output.register(process.stdout, selectors.EVENT_READ)
        try:
            if not output.select(START_LIMIT):
                raise RuntimeError(f"The service did not start within {START_LIMIT} seconds.")
            if not (ready := process.stdout.readline()):
                raise RuntimeError("The service did not start.")
            yield Service(json.loads(ready)["url"])
            # Not asked before whether it has ended: one that was just killed may still seem to run.
            process.terminate()
            # The service ends with 0, and a shell around it by the signal, or with 128 plus it.
            if process.wait(LIMIT) not in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
                raise RuntimeError(ENDED)
        finally:
            process.kill()
