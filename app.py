"""The HTTP side of the Gardening Project Service: routes, headers and errors.

It contains no SQL, no token logic and no validation rules. Failures travel as exceptions
to the handlers at the end.
"""

import base64
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import parse_qsl

from flask import Blueprint, Flask, Response, current_app, redirect, request, url_for
from marshmallow import ValidationError
from werkzeug import exceptions as http
from werkzeug.datastructures import ETags
from werkzeug.http import quote_etag
from werkzeug.routing import Rule

import commands
import schemas
import store
from auth import token_required

TITLE = "Gardening Project Service"
MAX_BODY = 64 * 1024  # bytes; a Project needs less than a KiB
RETRY_AFTER = 5  # seconds

api = Blueprint("api", __name__)


def create_app(config: Mapping[str, Any] | None = None) -> Flask:
    """Build the service; `config` overrides FLASK_* variables, which override the defaults.

    Raises store.Unavailable for an unusable database.
    """
    app = Flask(__name__, static_folder=None)
    # Werkzeug silently truncates a chunked body here; the extra byte lets us notice.
    app.config.update(MAX_CONTENT_LENGTH=MAX_BODY + 1, PROVIDE_AUTOMATIC_OPTIONS=False)
    app.config.from_prefixed_env()
    app.config["DATABASE"] = os.environ.get("FLASK_DATABASE")  # 2026.10 is no number
    app.config.update(config or {})
    app.url_map.merge_slashes = False  # "a//b" is not redirected to "a/b"
    app.url_map.add(Rule("/api/v1/hello-service", endpoint="hello"))  # any method
    app.view_functions["hello"] = hello
    app.register_blueprint(api)
    add_page(app)
    commands.add_to(app)
    with commands.one_line_errors():
        app.extensions["store"] = opened = open_store(app)
        commands.welcome(app, opened)
    return app


def open_store(app: Flask) -> store.Store:
    if not app.config["DATABASE"]:
        app.config["DATABASE"] = os.path.join(app.instance_path, "gardening.db")
        try:
            os.makedirs(app.instance_path, exist_ok=True)
        except OSError as error:
            raise store.Unavailable(f"{error.strerror}: {error.filename}") from error
    database = str(app.config["DATABASE"])
    if "://" not in database:
        return store.Store(store.SQLite(database))
    scheme = database.partition("://")[0]
    if scheme not in ("postgresql", "postgres"):
        known = "a path of a file, or a URL that starts with postgresql://"
        raise store.Unavailable(f"FLASK_DATABASE is {known}, not with {scheme}://")
    try:
        from postgres import PostgreSQL
    except ImportError as error:
        needed = "install psycopg[binary], or this package with the extra postgres"
        raise store.Unavailable(f"for PostgreSQL, {needed}") from error
    return store.Store(PostgreSQL(database))


def current_store() -> store.Store:
    opened: store.Store = current_app.extensions["store"]
    return opened


def add_page(app: Flask) -> None:
    """Add the page that describes the API, if the package for it is installed."""
    try:
        from flask_swagger_ui import get_swaggerui_blueprint
    except ImportError:
        return
    # No badge, which would call another host; no box for other descriptions.
    look = {"validatorUrl": None, "layout": "BaseLayout", "app_name": TITLE}
    page = get_swaggerui_blueprint(".", "../openapi.json", look)
    page.before_request(forget_dates)
    page.after_request(protect_page)
    app.register_blueprint(page, url_prefix="/docs")
    app.add_url_rule("/", "index", lambda: redirect("docs/"))
    app.add_url_rule("/docs", "index")


def forget_dates() -> None:
    """Leave caching to ETags: Werkzeug raises OverflowError for dates far ahead."""
    request.environ.pop("HTTP_IF_MODIFIED_SINCE", None)
    if request.environ.pop("HTTP_IF_RANGE", None):
        request.environ.pop("HTTP_RANGE", None)  # send it all (RFC 9110 13.1.5)


def protect_page(response: Response) -> Response:
    """Let the page run its own scripts alone, and nobody frame it (CSP level 3)."""
    policy = (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
    )
    policy += "; object-src 'none'; base-uri 'none'; frame-ancestors 'none'"
    if response.mimetype == "text/html" and response.status_code == 200:
        for script in re.findall(b"<script>(.*?)</script>", response.data, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
            policy += f"; script-src 'self' 'sha256-{digest}'"
        response.headers["Content-Security-Policy"] = policy
    return response


@api.get("/health")
def get_health() -> Response:
    """Say whether the database can be read now."""
    current_store().check()
    response = Response('{"status":"ok"}', mimetype="application/json")
    response.cache_control.no_store = True
    return response


@api.get("/openapi.json")
def get_description() -> Response:
    """Return the OpenAPI description of this API."""
    with current_app.open_resource("openapi.json") as file:
        return Response(file.read(), mimetype="application/json")


def hello() -> dict[str, Any]:
    """Greet, whatever the method."""
    return {"greetings": f"Hello from the {TITLE}!", "requestMethod": request.method}


@api.put("/api/v1/hello-service/auth")
@token_required
def hello_auth(account: str) -> dict[str, Any]:
    """Greet the holder of a valid token."""
    return hello() | {"isAuthenticated": True}


@api.post("/api/v1/gardening/projects")
@token_required
def create_project(account: str) -> Response:
    """Create a Project; `{}` will do."""
    project = current_store().create_project(account, read_members(), read_key())
    location = url_for(".get_project", id=project.id)
    headers = {"Location": location, "ETag": quote_etag(project.etag)}
    return Response(project.document, 201, headers, mimetype="application/json")


@api.get("/api/v1/gardening/projects")
@token_required
def list_projects(account: str) -> Response:
    """List the account's Projects, or one page of them."""
    page, known = read_page(), etags(request.if_none_match, include_weak=True)
    projects = current_store().list_projects(account, known, page)
    response = revalidated(projects.etag, projects.document)
    if page and projects.next is not None:  # RFC 8288
        number = min(page.page + 1, schemas.MAX_PAGE)
        query = f"page={number}&size={page.size}&after={projects.next}"
        response.headers["Link"] = f'<{url_for(".list_projects")}?{query}>; rel="next"'
    return response


@api.get("/api/v1/gardening/projects/<id>")
@token_required
def get_project(account: str, id: str) -> Response:
    """Return one Project."""
    project = current_store().get_project(account, id)
    return revalidated(project.etag, project.document)


@api.put("/api/v1/gardening/projects/<id>")
@token_required
def update_project(account: str, id: str) -> Response:
    """Change the given members, and only those."""
    members = read_members()
    project = current_store().update_project(account, id, members, *preconditions())
    # No ETag: what is stored is not what was sent (RFC 9110 9.3.4).
    return Response(project.document, mimetype="application/json")


@api.delete("/api/v1/gardening/projects/<id>")
@token_required
def delete_project(account: str, id: str) -> Response:
    """Delete a Project and all that belongs to it."""
    current_store().delete_project(account, id, *preconditions())
    response = Response(status=204)
    del response.headers["Content-Type"]  # there is no content
    return response


def read_page() -> store.Page | None:
    """The page that the query asks for, if there is a query."""
    # request.args raises ValueError for bytes that are not UTF-8.
    query = request.query_string.decode(errors="replace")
    given = parse_qsl(query, keep_blank_values=True)
    counts = Counter(name for name, _ in given)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValidationError({name: ["Given more than once."] for name in twice})
    return store.Page(**schemas.PAGE.load(dict(given))) if given else None


def read_key() -> str | None:
    """The Idempotency-Key (draft-ietf-httpapi-idempotency-key-header), if any."""
    key = request.headers.get("Idempotency-Key")
    if key is not None and not re.fullmatch("[ -~]{1,255}", key):
        raise http.BadRequest(
            "An Idempotency-Key is 1 to 255 printable ASCII characters."
        )
    return key


def read_members() -> dict[str, object]:
    """The members of a Project that the body gives."""
    body = read_body()
    try:
        members = json.loads(
            body.decode(),
            parse_constant=reject_constant,
            object_pairs_hook=reject_duplicates,
        )
    except UnicodeDecodeError as error:
        reason = f"byte {error.start + 1} is not UTF-8"
    except json.JSONDecodeError as error:
        reason = f"see line {error.lineno}, column {error.colno}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError:
        reason = "it holds NaN, Infinity or an integer of thousands of digits"
    else:
        return dict(schemas.PROJECT.load(members))
    raise http.BadRequest(f"The body is not JSON: {reason}.")


def reject_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def reject_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """I-JSON (RFC 7493 2.3): to take the last one would lose the first in silence."""
    members = dict(pairs)
    if len(members) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise http.BadRequest(f"The body gives the member {json.dumps(twice)} twice.")
    return members


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
    return body


def too_large() -> http.RequestEntityTooLarge:
    return http.RequestEntityTooLarge(f"The body is longer than {MAX_BODY} bytes.")


def preconditions() -> tuple[store.Etags | None, store.Etags]:
    """What a change expects and refuses: If-Match, If-None-Match (RFC 9110 13.1)."""
    expected = None
    if "If-Match" in request.headers and not request.if_match.star_tag:
        expected = etags(request.if_match)
    if request.if_none_match.star_tag:
        expected = []  # "*" refuses any ETag, so that none is as expected
    return expected, etags(request.if_none_match, include_weak=True)


def etags(field: ETags, include_weak: bool = False) -> list[str]:
    # Werkzeug parses an empty ETag as None.
    return [etag for etag in field.as_set(include_weak) if etag]


def revalidated(etag: str, document: bytes | None) -> Response:
    """The document, or 304 if the caller has it already (RFC 9110 13.1.2)."""
    headers = {"Cache-Control": "private, no-cache", "ETag": quote_etag(etag)}
    # Parsed only if it was sent: parsing costs a twentieth of a read.
    sent = "If-None-Match" in request.headers
    if sent and request.if_none_match.contains_weak(etag):
        return Response(status=304, headers=headers)
    return Response(document, headers=headers, mimetype="application/json")


TITLES = {413: "Content Too Large", 422: "Unprocessable Content"}  # RFC 9110's phrases
DETAILS = {  # in place of Werkzeug's
    404: "There is no such path.",
    405: "This path does not take this method; see the header Allow.",
    500: "This is a bug in the service; see its log.",
}


@api.app_errorhandler(http.HTTPException)
def problem(error: http.HTTPException, **members: object) -> Response:
    """A problem document (RFC 9457), with the headers that the error brings along."""
    code, detail = error.code or 500, error.description
    if detail == type(error).description:
        detail = DETAILS.get(code, detail)
    document = {"type": "about:blank", "title": TITLES.get(code, error.name)}
    body = json.dumps({**document, "status": code, "detail": detail, **members})
    status = f"{code} {document['title']}"
    response = Response(body, status, error.get_headers())
    response.content_type = "application/problem+json"
    response.cache_control.no_store = True
    return response


@api.app_errorhandler(ValidationError)
def on_invalid(error: ValidationError) -> Response:
    detail = "Correct the members or parameters that `errors` names."
    return problem(http.UnprocessableEntity(detail), errors=error.messages)


STALE = "The ETag of the Project does not satisfy If-Match (strong ones only) or If-None-Match."
UNAVAILABLE = "The database is unavailable; nothing was changed. Try again later."
UNKNOWN = "The change may have been made, or not: read before you repeat it."
# What the store raises, as a caller is told.
STORE_ERRORS: dict[type[Exception], tuple[int, str]] = {
    store.NotFound: (404, "Your account has no Project with this id."),
    store.Stale: (412, STALE),
    store.KeyReused: (422, "This Idempotency-Key was used with other members."),
    store.KeySpent: (409, "The Project of this Idempotency-Key has been deleted."),
    store.Unavailable: (503, UNAVAILABLE),
    store.OutcomeUnknown: (503, UNKNOWN),
}
MORE: dict[type[Exception], dict[str, object]] = {  # for a program, of their documents
    store.KeyReused: {"type": "urn:gardening:key-reused", "errors": {}},
    store.KeySpent: {"type": "urn:gardening:key-spent"},
    store.OutcomeUnknown: {"type": "urn:gardening:outcome-unknown"},
}


def on_store_error(error: Exception) -> Response:
    kind = type(error)
    status, detail = STORE_ERRORS[kind]
    response = problem(http.default_exceptions[status](detail), **MORE.get(kind, {}))
    if status == 503:
        current_app.logger.error("Database unavailable: %s", error)
        response.retry_after = RETRY_AFTER
    return response


for kind in STORE_ERRORS:
    api.app_errorhandler(kind)(on_store_error)
