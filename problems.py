"""Every error as a problem document (RFC 9457); those of the store are in one table."""

import json
from functools import partial
from typing import NamedTuple

from flask import Flask, Response, current_app
from marshmallow import ValidationError
from werkzeug import exceptions as http

from engines.base import OutcomeUnknown, Unavailable
from store import KeyReused, KeySpent, NotFound, Stale

RETRY_AFTER = 5  # seconds
TITLES = {413: "Content Too Large", 422: "Unprocessable Content"}  # RFC 9110's phrases
DETAILS = {  # in place of Werkzeug's
    404: "There is no such path.",
    405: "This path does not take this method; see the header Allow.",
    500: "This is a bug in the service; see its log.",
}


class Answer(NamedTuple):
    """What a caller is told of an error of the store."""

    status: int
    detail: str
    type: str = "about:blank"  # a URN only where programs must tell two errors apart


STORE_ERRORS = {
    NotFound: Answer(404, "Your account has no Project with this id."),
    Stale: Answer(
        412,
        "The ETag of the Project does not satisfy If-Match (strong ones only) or If-None-Match.",
    ),
    KeyReused: Answer(
        422,
        "This Idempotency-Key was used with other members.",
        "urn:gardening:key-reused",
    ),
    KeySpent: Answer(
        409,
        "The Project of this Idempotency-Key has been deleted.",
        "urn:gardening:key-spent",
    ),
    Unavailable: Answer(
        503, "The database is unavailable; nothing was changed. Try again later."
    ),
    OutcomeUnknown: Answer(
        503,
        "The change may have been made, or not: read before you repeat it.",
        "urn:gardening:outcome-unknown",
    ),
}


def add_to(app: Flask) -> None:
    app.register_error_handler(http.HTTPException, problem)
    app.register_error_handler(ValidationError, on_invalid)
    for kind, answer in STORE_ERRORS.items():
        app.register_error_handler(kind, partial(on_store_error, answer))


def problem(error: http.HTTPException, **members: object) -> Response:
    """A problem document, with the headers that the error brings along."""
    code, detail = error.code or 500, error.description
    if detail == type(error).description:  # Werkzeug's
        detail = DETAILS.get(code, detail)
    title = TITLES.get(code, error.name)
    document = {"type": "about:blank", "title": title, "status": code, "detail": detail}
    body = json.dumps(document | members)
    response = Response(body, f"{code} {title}", error.get_headers())
    response.content_type = "application/problem+json"
    response.cache_control.no_store = True
    return response


def on_invalid(error: ValidationError) -> Response:
    detail = "Correct the members or parameters that `errors` names."
    return problem(http.UnprocessableEntity(detail), errors=error.messages)


def on_store_error(answer: Answer, error: Exception) -> Response:
    members: dict[str, object] = {"type": answer.type}
    if answer.status == 422:
        members["errors"] = {}  # every 422 has it, though here no one member is wrong
    response = problem(http.default_exceptions[answer.status](answer.detail), **members)
    if answer.status == 503:
        current_app.logger.error("Database unavailable: %s", error)
        response.retry_after = RETRY_AFTER
    return response
