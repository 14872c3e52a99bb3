"""What a request says: its query, headers and body, or why they are refused."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn
from urllib.parse import parse_qsl

from flask import request
from marshmallow import ValidationError
from werkzeug import exceptions as http
from werkzeug.datastructures import ETags

import schemas
from store import Page, Precondition

MAX_BODY = 64 * 1024  # bytes; the longest texts, all of them escaped, take 4 KB
# Werkzeug silently cuts a chunked body off here. With one byte more, read_body notices.
MAX_CONTENT_LENGTH = MAX_BODY + 1
# The most fields of an object, or parameters of a query. A response names each wrong one:
# for thousands, that would take a hundred times as long as reading a Project.
MAX_FIELDS = 100


def read_page() -> Page | None:
    """The page that the query asks for, if there is a query."""
    query = read_query()
    if not query:
        return None
    page = schemas.PAGE.load(query)
    return Page(page["page"], page["size"], page["after"])


def read_no_query() -> None:
    """Raises ValidationError if there is a query: `?dryRun=true` must not delete anything."""
    if request.query_string:
        schemas.NO_QUERY.load(read_query())


def read_query() -> dict[str, str]:
    """The parameters of the query. Raises ValidationError."""
    # request.args raises ValueError for bytes that are not UTF-8.
    text = request.query_string.decode(errors="replace")
    text = text.strip("&")  # "?&" is no query: for deploy/nginx.conf, too, it asks for all
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise ValidationError({"_schema": [f"More than {MAX_FIELDS} parameters."]}) from None
    query = dict(pairs)
    if len(query) < len(pairs):
        repeated = repeated_names(pairs)
        raise ValidationError({name: ["Given more than once."] for name in repeated})
    return query


def repeated_names(pairs: Sequence[tuple[str, object]]) -> list[str]:
    counts = Counter(name for name, _ in pairs)
    return [name for name, count in counts.items() if count > 1]


def read_key() -> str | None:
    """The Idempotency-Key (draft-ietf-httpapi-idempotency-key-header), if any."""
    key = request.headers.get("Idempotency-Key")
    # A server joins two lines of this header with a comma. That is another key than that of one
    # line, with which a repetition would create a second Project.
    if key is not None and ("," in key or not re.fullmatch("[ -~]{1,255}", key)):
        characters = "1 to 255 printable ASCII characters without a comma"
        raise http.BadRequest(f"Send one Idempotency-Key, of {characters}.")
    return key


def read_precondition() -> Precondition:
    """If-Match and If-None-Match of a request that changes something."""
    if request.if_none_match.star_tag:
        return Precondition(if_match=())  # no ETag will do
    refused = etags_in(request.if_none_match, include_weak=True)
    if "If-Match" not in request.headers or request.if_match.star_tag:
        return Precondition(None, refused)
    return Precondition(etags_in(request.if_match, include_weak=False), refused)


def etags_in(header: ETags, include_weak: bool) -> list[str]:
    # Werkzeug parses an empty ETag as None.
    return [etag for etag in header.as_set(include_weak) if etag]


def reject_constant(name: str) -> NoReturn:
    raise ValueError(name)


def read_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object with these fields, none of them given twice (I-JSON, RFC 7493 2.3)."""
    if len(pairs) > MAX_FIELDS:
        raise http.BadRequest(f"The body has an object with more than {MAX_FIELDS} fields.")
    fields = dict(pairs)
    if len(fields) < len(pairs):
        name = json.dumps(repeated_names(pairs)[0])
        raise http.BadRequest(f"The body gives the field {name} twice.")
    return fields


# Made once: json.loads would make one for each body.
DECODER = json.JSONDecoder(parse_constant=reject_constant, object_pairs_hook=read_object)


def read_fields() -> dict[str, object]:
    """The fields of a Project that the body gives."""
    return dict(schemas.PROJECT.load(read_json()))


def read_json() -> Any:
    """The body, parsed. Raises http.HTTPException if it is refused."""
    body = read_body()
    try:
        return DECODER.decode(body.decode("utf-8-sig"))  # RFC 8259 8.1 allows the mark
    except UnicodeDecodeError:
        reason = "it is not UTF-8"
    except json.JSONDecodeError as error:
        reason = f"see line {error.lineno}, column {error.colno}" if body else "it is empty"
    except (ValueError, RecursionError):
        reason = "it is nested too deeply, or holds NaN, an infinity or too long an integer"
    raise http.BadRequest(f"The body is not JSON: {reason}.")


def read_body() -> bytes:
    coding = request.headers.get("Content-Encoding", "identity")
    if coding.strip().lower() != "identity":  # RFC 9110 15.5.16
        raise http.UnsupportedMediaType("Send the body without a Content-Encoding.")
    if not request.is_json:
        detail = "Send JSON with the header Content-Type: application/json."
        raise http.UnsupportedMediaType(detail)
    try:
        body = request.get_data()
    except http.RequestEntityTooLarge:
        raise too_large() from None
    except Exception as error:  # the exceptions of servers share no base class
        raise http.BadRequest("The body ended early or is malformed.") from error
    if len(body) > MAX_BODY:
        raise too_large()
    if len(body) < (request.content_length or 0):
        raise http.BadRequest("The body ended early.")
    environ = request.environ
    # uWSGI and asgiref hand over no chunked body.
    if not body and "HTTP_TRANSFER_ENCODING" in environ and "wsgi.input_terminated" not in environ:
        detail = "Send the body with a Content-Length: this server takes no chunked one."
        raise http.LengthRequired(detail)
    return body


def too_large() -> http.RequestEntityTooLarge:
    return http.RequestEntityTooLarge(f"The body is longer than {MAX_BODY} bytes.")
