"""Turns every error into a problem document (RFC 9457), and logs each outage."""

import json
from collections.abc import Iterable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

from flask import Flask, Response, current_app, request
from marshmallow import ValidationError
from werkzeug.exceptions import HTTPException

from engines.errors import OutcomeUnknown, Unavailable
from logged import logged_request
from store import AccountFull, KeyReused, KeySpent, NotFound, Stale

RETRY_AFTER = 5  # seconds; deploy/nginx.conf says the same
RETRY = {"Retry-After": str(RETRY_AFTER)}
# The phrases of RFC 9110, for Pythons that still have older ones.
TITLES = {413: "Content Too Large", 422: "Unprocessable Content"}
DETAILS = {  # in place of Werkzeug's
    404: "There is no such path.",
    405: "This path does not take this method; see the header Allow.",
    500: "This is a bug in the service; see its log.",
}


class ErrorResponse(NamedTuple):
    """The response to an error of the store."""

    status: int
    detail: str  # {} is the argument of the error
    # A `type` only if a program must tell it from others of its status. Every 422 has `errors`.
    extensions: Mapping[str, object] = {}
    headers: Mapping[str, str] = {}


STORE_ERRORS = {
    NotFound: ErrorResponse(
        404,
        "Your account has no Project with this id.",
        {"type": "urn:gardening:no-such-project"},  # a wrong address must not look like a deletion
    ),
    Stale: ErrorResponse(
        412,
        "The ETag of the Project does not satisfy If-Match (strong ones only) or If-None-Match.",
    ),
    KeyReused: ErrorResponse(
        422,
        "This Idempotency-Key was used with other fields.",
        {"type": "urn:gardening:key-reused", "errors": {}},
    ),
    KeySpent: ErrorResponse(
        409,
        "The Project that was created with this key has been deleted.",
        {"type": "urn:gardening:key-spent"},
    ),
    AccountFull: ErrorResponse(
        409,
        "The account holds as many Projects as it may, {:,}: delete some first.",
        {"type": "urn:gardening:account-full"},
    ),
    Unavailable: ErrorResponse(
        503,
        "The database is unavailable; nothing was changed. Try again later.",
        headers=RETRY,
    ),
    OutcomeUnknown: ErrorResponse(
        503,
        "The change may have been made, or not: read before you repeat it.",
        {"type": "urn:gardening:outcome-unknown"},
        RETRY,
    ),
}


def add_to(app: Flask) -> None:
    app.register_error_handler(HTTPException, on_http_error)
    app.register_error_handler(ValidationError, on_invalid)
    for kind, response in STORE_ERRORS.items():
        app.register_error_handler(kind, partial(on_store_error, response))


def on_http_error(error: HTTPException) -> Response:
    status = error.code or 500
    detail = DETAILS.get(status, error.description)
    return problem(status, detail, headers=error.get_headers())


def on_invalid(error: ValidationError) -> Response:
    detail = "Some fields or parameters are invalid; see `errors`."
    return problem(422, detail, {"errors": error.messages})


def on_store_error(response: ErrorResponse, error: Exception) -> Response:
    if isinstance(error, Unavailable):
        is_unknown = isinstance(error, OutcomeUnknown)
        what = "Outcome unknown" if is_unknown else "Database unavailable"
        current_app.logger.error("%s: %s (%s)", what, error, current_request())
    detail = response.detail.format(*error.args)
    return problem(response.status, detail, response.extensions, response.headers)


def current_request() -> str:
    """Its method, path and request id, as the access log shows them."""
    return "{method} {path}, request id {request_id}".format(**logged_request(request.environ))


def problem(
    status: int,
    detail: str | None,
    extensions: Mapping[str, object] = {},
    headers: Mapping[str, str] | Iterable[tuple[str, str]] = {},
) -> Response:
    """A problem document with these extension members, which no cache keeps."""
    title = TITLES.get(status, HTTPStatus(status).phrase)
    document: dict[str, Any] = {"type": "about:blank", "title": title, "status": status}
    body = json.dumps(document | {"detail": detail} | dict(extensions))
    ours = {"Content-Type": "application/problem+json", "Cache-Control": "no-store"}
    return Response(body, f"{status} {title}", dict(headers) | ours)
