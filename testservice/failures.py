"""The service with planned failures, and the paths under /test/ that issue tokens.

A plan belongs to a token: its first requests fail as the plan says. The service's own
errors are raised in the store, as in production. 429, 502 and 504 are nginx's, as
deploy/nginx.conf words them.
"""

import errno
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple
from wsgiref.types import StartResponse, WSGIEnvironment

from flask import Response, abort, request
from marshmallow import Schema, ValidationError, fields, validate

from app import create_app
from auth import BadName, account_name, bearer_token, issue_token
from engines.base import OutcomeUnknown, Unavailable
from problems import RETRY_AFTER, problem
from reading import read_json
from schemas import NOT_AN_OBJECT
from store import Caller, Store

NO_TOKEN = "There is no such token."
PLANNED = "planned for this token"
FAILURE = "gardening.failure"  # of a request, in its WSGI environment


class Failure(NamedTuple):
    """What happens to a request, in this order; by default, it is served normally."""

    seconds: int = 0  # to wait first
    is_served: bool = False  # the service does its work before the failure
    is_closed: bool = False  # the connection closes without a response
    status: int = 0  # of the proxy's response
    retry_after: int = RETRY_AFTER
    detail: str = ""
    is_revoked: bool = False  # to the store, the token is unknown
    raised: type[Exception] | None = None  # by the store


LOST = "The service sent no response{}: read before you repeat a write."
FAILURES = {
    "401": Failure(is_revoked=True),
    "429": Failure(status=429, retry_after=1, detail="Send fewer requests per second."),
    "500": Failure(raised=RuntimeError),
    "502": Failure(status=502, detail=LOST.format("")),
    "503": Failure(raised=Unavailable),
    "503-unknown": Failure(is_served=True, raised=OutcomeUnknown),
    "504": Failure(is_served=True, status=504, detail=LOST.format(" in time")),
    "dropped": Failure(is_closed=True),
    "lost": Failure(is_served=True, is_closed=True),
    "none": Failure(),
    "slow": Failure(seconds=3),
}
CHOICES = ", ".join(map(repr, FAILURES))  # with their quotes: 503 is not "503"
CHOICES += ", 'slow:SECONDS' (1 to 300)"
FAILURES |= {f"slow:{seconds}": Failure(seconds) for seconds in range(1, 301)}
PLANNABLE = validate.OneOf(FAILURES, error=f"{{input!r}} is not one of {CHOICES}.")


class FailingStore(Store):
    """Fails as planned where the service looks up a token."""

    def find_caller(self, digest: bytes) -> Caller | None:
        failure = request.environ[FAILURE]
        if failure.raised:
            raise failure.raised(PLANNED)
        return None if failure.is_revoked else super().find_caller(digest)


class TokenSchema(Schema):
    """The body of POST /test/tokens; null is the same as absent."""

    error_messages = NOT_AN_OBJECT

    account = fields.String(load_default=None)
    expired = fields.Boolean(load_default=None)
    fail = fields.List(fields.Raw(validate=PLANNABLE), load_default=None)


class Issued(NamedTuple):
    account: str
    id: int
    plan: list[str]  # what is left of it


class FailingService:
    """The WSGI application, with its data in memory."""

    def __init__(self) -> None:
        self._issued: dict[str, Issued] = {}
        self._app = create_app({"DATABASE": ":memory:"})
        self._store = FailingStore(self._app.extensions["store"].engine)
        self._app.extensions["store"] = self._store
        self._app.post("/test/tokens")(self.create_token)
        self._app.get("/test/tokens/<token>")(self.get_token)
        self._app.delete("/test/tokens/<token>")(self.delete_token)

    def __call__(
        self, environ: WSGIEnvironment, start_response: StartResponse
    ) -> Iterable[bytes]:
        failure = self._next_failure(environ)
        time.sleep(failure.seconds)
        if failure.is_served:
            Response.from_app(self._app, {**environ, FAILURE: Failure()})
        if failure.is_closed:
            raise ConnectionResetError(errno.ECONNRESET, PLANNED)  # gunicorn closes it
        if failure.status:
            headers = {"Retry-After": str(failure.retry_after)}
            answer = problem(failure.status, failure.detail, headers=headers)
            return answer(environ, start_response)
        return self._app({**environ, FAILURE: failure}, start_response)

    def _next_failure(self, environ: WSGIEnvironment) -> Failure:
        """Take it off the plan of the token that the request carries."""
        issued = self._issued.get(bearer_token(environ.get("HTTP_AUTHORIZATION", "")))
        name = "none"
        if issued and not environ["PATH_INFO"].startswith("/test/"):
            with suppress(IndexError):
                name = issued.plan.pop(0)
        if name == "503-unknown" and environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            name = "503"  # what changes nothing has no unknown outcome
        return FAILURES[name]

    def token_for(self, body: Any) -> dict[str, Any]:
        """What POST /test/tokens returns for this body. Raises ValidationError."""
        given = TokenSchema().load(body)
        account = given["account"]
        account = secrets.token_hex(8) if account is None else account
        try:
            account = account_name(account)
        except BadName as error:
            raise ValidationError({"account": [str(error)]}) from error
        token, id = issue_token(self._store, account, 0 if given["expired"] else None)
        self._issued[token] = Issued(account, id, given["fail"] or [])
        return {"token": token, **self.get_token(token)}

    def create_token(self) -> tuple[dict[str, Any], int]:
        is_empty = "Content-Type" not in request.headers and not request.get_data()
        return self.token_for({} if is_empty else read_json()), 201

    def get_token(self, token: str) -> dict[str, Any]:
        issued = self._issued.get(token) or abort(problem(404, NO_TOKEN))
        return {"account": issued.account, "fail": issued.plan}

    def delete_token(self, token: str) -> tuple[str, int]:
        issued = self._issued.pop(token, None) or abort(problem(404, NO_TOKEN))
        self._store.revoke_token(issued.id)
        return "", 204
