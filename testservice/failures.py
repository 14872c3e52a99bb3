"""The service with planned failures, a journal, and the paths under /test/.

A plan belongs to a token: its next requests fail as the plan says. The service's own errors are
raised in the store, as in production. 429, 502 and 504 are nginx's, as openapi.json words them.
The journal of a token has the requests that came with it.
"""

import errno
import json
import secrets
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from io import BytesIO
from typing import Any, NamedTuple
from wsgiref.types import StartResponse, WSGIEnvironment

from flask import Response, abort, request
from marshmallow import Schema, ValidationError, fields, validate
from werkzeug.datastructures import EnvironHeaders

from app import PROJECTS, create_app, description
from auth import bearer_token, issue_token
from engines.errors import OutcomeUnknown, Unavailable
from engines.names import BadName, account_name
from problems import RETRY_AFTER, problem
from reading import MAX_CONTENT_LENGTH, read_json
from schemas import NOT_AN_OBJECT
from store import MAX_PROJECTS, AccountFull, Caller, Fields, Project, Store

NO_TOKEN = "There is no such token."
PLANNED = "planned for this token"
FAILURE = "gardening.failure"  # of a request, in its WSGI environment
JOURNAL_SIZE = 1000  # requests of a token, the last ones


class Failure(NamedTuple):
    """What happens to a request, in this order; by default, it is served normally."""

    seconds: int = 0  # to wait first
    is_served: bool = False  # the service does its work before the failure
    is_closed: bool = False  # the connection closes without a response
    status: int = 0  # of the proxy's response
    retry_after: int = RETRY_AFTER
    detail: str = ""
    raised: type[Exception] | None = None  # by the store
    is_revoked: bool = False  # to the store, the token is unknown
    is_full: bool = False  # to the store, the account is full


def detail_of(response: str) -> str:
    """Of the proxy's response with this name in openapi.json."""
    content = json.loads(description()[1])["components"]["responses"][response]["content"]
    return str(content["application/problem+json"]["example"]["detail"])


FAILURES = {
    "401": Failure(is_revoked=True),
    "account-full": Failure(is_full=True),
    "429": Failure(status=429, retry_after=1, detail=detail_of("TooManyRequests")),
    "500": Failure(raised=RuntimeError),
    "502": Failure(status=502, detail=detail_of("BadGateway")),
    "503": Failure(raised=Unavailable),
    "503-unknown": Failure(is_served=True, raised=OutcomeUnknown),
    "504": Failure(is_served=True, status=504, detail=detail_of("GatewayTimeout")),
    "dropped": Failure(is_closed=True),
    "lost": Failure(is_served=True, is_closed=True),
    "none": Failure(),
    "slow": Failure(seconds=3),
}
CHOICES = ", ".join(map(repr, FAILURES))  # in quotes, since the number 503 is refused
CHOICES += ", 'slow:SECONDS' (1 to 300)"
FAILURES |= {f"slow:{seconds}": Failure(seconds) for seconds in range(1, 301)}
PLANNABLE = validate.OneOf(FAILURES, error=f"{{input!r}} is not one of {CHOICES}.")


class FailingStore(Store):
    """Fails as planned where the service looks up a token, or creates a Project."""

    def find_caller(self, digest: bytes) -> Caller | None:
        failure = request.environ[FAILURE]
        if failure.raised:
            raise failure.raised(PLANNED)
        return None if failure.is_revoked else super().find_caller(digest)

    def create_project(self, account: str, fields: Fields, key: str | None = None) -> Project:
        if not request.environ[FAILURE].is_full:
            return super().create_project(account, fields, key)
        try:
            return Store(self.engine, max_projects=0).create_project(account, fields, key)
        except AccountFull:
            raise AccountFull(MAX_PROJECTS) from None


class PlanSchema(Schema):
    """The body of PUT /test/tokens/TOKEN; null is the same as absent."""

    error_messages = NOT_AN_OBJECT

    fail = fields.List(fields.Raw(validate=PLANNABLE), load_default=None)


class TokenSchema(PlanSchema):
    """The body of POST /test/tokens; null is the same as absent."""

    account = fields.String(load_default=None)
    expired = fields.Boolean(load_default=None)


class Issued(NamedTuple):
    """A token. Its list and its deque change atomically, so threads need no lock."""

    account: str
    id: int
    plan: list[str]  # what is left of it
    journal: deque[dict[str, Any]]


class FailingService:
    """The WSGI application, with its data in memory."""

    def __init__(self) -> None:
        self._issued: dict[str, Issued] = {}
        self._app = create_app({"DATABASE": ":memory:"})
        self._store = FailingStore(self._app.extensions["store"].engine)
        self._app.extensions["store"] = self._store
        self._app.post("/test/tokens")(self.create_token)
        self._app.get("/test/tokens/<token>")(self.get_token)
        self._app.put("/test/tokens/<token>")(self.update_token)
        self._app.delete("/test/tokens/<token>")(self.delete_token)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        issued = self._issued.get(bearer_token(environ.get("HTTP_AUTHORIZATION", "")))
        path = "/" + environ["PATH_INFO"].lstrip("/")  # as Werkzeug has it
        if issued is None or path.startswith("/test/"):
            return self._app({**environ, FAILURE: Failure()}, start_response)
        entry = read_request(environ)
        issued.journal.append(entry)
        failure = next_failure(issued.plan, environ["REQUEST_METHOD"], path)

        def record_status(status: str, *arguments: Any) -> Any:
            entry["status"] = int(status[:3])
            return start_response(status, *arguments)

        time.sleep(failure.seconds)
        if failure.is_served:  # now, whatever the client then gets
            Response.from_app(self._app, {**environ, FAILURE: Failure()})
        if failure.is_closed:
            raise ConnectionResetError(errno.ECONNRESET, PLANNED)  # gunicorn closes it
        if failure.status:
            headers = {"Retry-After": str(failure.retry_after)}
            response = problem(failure.status, failure.detail, headers=headers)
            return response(environ, record_status)
        return self._app({**environ, FAILURE: failure}, record_status)

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
        plan = given["fail"] or []
        self._issued[token] = Issued(account, id, plan, deque(maxlen=JOURNAL_SIZE))
        return {"token": token, "account": account, "fail": plan}

    def create_token(self) -> tuple[dict[str, Any], int]:
        is_empty = "Content-Type" not in request.headers and not request.get_data()
        return self.token_for({} if is_empty else read_json()), 201

    def get_token(self, token: str) -> dict[str, Any]:
        account, _, plan, journal = self._find(token)
        return {"account": account, "fail": plan, "requests": list(journal)}

    def update_token(self, token: str) -> tuple[str, int]:
        plan = self._find(token).plan
        plan[:] = PlanSchema().load(read_json())["fail"] or []
        return "", 204

    def delete_token(self, token: str) -> tuple[str, int]:
        self._store.revoke_token(self._find(token).id)
        self._issued.pop(token, None)
        return "", 204

    def _find(self, token: str) -> Issued:
        return self._issued.get(token) or abort(problem(404, NO_TOKEN))


def read_request(environ: WSGIEnvironment) -> dict[str, Any]:
    """The request as the journal has it, without a response yet."""
    body = environ["wsgi.input"].read(MAX_CONTENT_LENGTH)
    environ["wsgi.input"] = BytesIO(body)  # for the application
    headers = EnvironHeaders(environ)
    return {
        "method": environ["REQUEST_METHOD"],
        "path": environ["RAW_URI"],
        # Without the token, since tests print the journal.
        "headers": {k: v for k, v in headers if k != "Authorization"},
        "body": body.decode(errors="replace"),
        "status": None,
    }


def next_failure(plan: list[str], method: str, path: str) -> Failure:
    """Take it off the plan, unless it waits for the next POST of a Project."""
    name = "none"
    with suppress(IndexError):
        if plan[0] != "account-full" or (method, path) == ("POST", PROJECTS):
            name = plan.pop(0)
    if name == "503-unknown" and method in ("GET", "HEAD"):
        name = "503"  # what changes nothing has no unknown outcome
    return FAILURES[name]
