"""The HTTP side of the Gardening Project Service: routes, headers and errors.

It knows no SQL, no token and no rule about a body. Failures come as exceptions and
become answers in one place, at the end.
"""

import json
import os
import sys
from urllib.parse import parse_qsl

from flask import Blueprint, Flask, Response, current_app, request, url_for
from marshmallow import ValidationError
from werkzeug import exceptions as http
from werkzeug.http import quote_etag
from werkzeug.routing import Rule

import schemas
from auth import suggest_first_token, token_commands, token_required
from store import NotFound, Stale, Store, Unavailable

MAX_BODY = 64 * 1024  # bytes; a Project needs less than a KiB
RETRY_AFTER = 5  # seconds
APP_LOAD_ERROR = 4  # exit status at which gunicorn gives up, and does not try again

api = Blueprint("api", __name__, url_prefix="/api/v1")


def create_app(config=None):
    """Build the service; `config` overrides FLASK_* variables, and these the defaults."""
    app = Flask(__name__, static_folder=None)
    # One more than is allowed, where Werkzeug cuts off chunked bodies without a word.
    app.config.update(MAX_CONTENT_LENGTH=MAX_BODY + 1, PROVIDE_AUTOMATIC_OPTIONS=False)
    app.config.from_prefixed_env()
    app.config.update(config or {})
    app.json.sort_keys = False
    app.url_map.merge_slashes = False  # "//" is an unknown path, not a redirect
    app.url_map.add(Rule("/api/v1/hello-service", endpoint="hello"))  # any method
    app.add_url_rule("/openapi.json", view_func=get_description)
    app.register_blueprint(api)
    for failure in (http.HTTPException, ValidationError, NotFound, Stale, Unavailable):
        app.register_error_handler(failure, answer)
    app.cli.add_command(token_commands)
    try:
        app.store = open_store(app)
        suggest_first_token(app.store)
    except OSError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(APP_LOAD_ERROR)
    return app


def open_store(app):
    if "DATABASE" not in app.config:
        os.makedirs(app.instance_path, exist_ok=True)
        app.config["DATABASE"] = os.path.join(app.instance_path, "gardening.db")
    return Store(str(app.config["DATABASE"]))


def get_description():
    """Give the OpenAPI description of this API."""
    with current_app.open_resource("openapi.json") as file:
        return Response(file.read(), mimetype="application/json")


@api.endpoint("hello")
def hello():
    """Greet, whatever the method."""
    greetings = "Hello from the Gardening Project Service!"
    return {"greetings": greetings, "requestMethod": request.method}


@api.put("/hello-service/auth")
@token_required
def hello_auth(account):
    """Greet whose token is valid."""
    return hello() | {"isAuthenticated": True}


@api.post("/gardening/projects")
@token_required
def create_project(account):
    """Create a Project; `{}` will do."""
    project = current_app.store.create_project(account, read_members())
    location = url_for(".get_project", id=project["id"])
    headers = {"Location": location, "ETag": quote_etag(project["etag"])}
    return Response(project["document"], 201, headers, mimetype="application/json")


@api.get("/gardening/projects")
@token_required
def list_projects(account):
    """List the account's Projects, or a page of them."""
    page, known = read_page(), list(request.if_none_match.as_set(include_weak=True))
    return revalidated(current_app.store.list_projects(account, known, **page))


@api.get("/gardening/projects/<id>")
@token_required
def get_project(account, id):
    """Give one Project."""
    return revalidated(current_app.store.get_project(account, id))


@api.put("/gardening/projects/<id>")
@token_required
def update_project(account, id):
    """Change the members given, and only those."""
    members, etags = read_members(), expected_etags()
    project = current_app.store.update_project(account, id, members, etags)
    # No ETag: what is kept is not what was sent (RFC 9110 9.3.4).
    return Response(project["document"], mimetype="application/json")


@api.delete("/gardening/projects/<id>")
@token_required
def delete_project(account, id):
    """Delete the Project with all that belongs to it."""
    current_app.store.delete_project(account, id, expected_etags())
    return "", 204


def read_page():
    """The page that the query asks for; nothing if it is empty."""
    # Not by request.args, which fails for bytes that are not UTF-8 with a ValueError.
    query = request.query_string.decode(errors="replace")
    query = dict(parse_qsl(query, keep_blank_values=True))
    return schemas.page.load(query) if query else {}


def read_members():
    """The Project in the body of the request, as far as it is given there."""
    if not request.is_json:
        detail = "Send JSON with the header Content-Type: application/json."
        raise http.UnsupportedMediaType(detail)
    try:
        body = request.get_data()
        if len(body) > MAX_BODY:
            raise http.RequestEntityTooLarge
        # int refuses NaN and Infinity, which Python takes and JSON does not have.
        body = json.loads(body.decode(), parse_constant=int)
    except http.HTTPException:
        raise
    except Exception as error:  # RecursionError, and what servers say of bad chunks
        raise http.BadRequest(f"The body is not JSON: {error}.") from error
    return schemas.project.load(body)


def expected_etags():
    """The strong ETags of If-Match (RFC 9110 13.1.1), or None if any will do."""
    if "If-Match" not in request.headers or request.if_match.star_tag:
        return None
    return list(request.if_match.as_set())


def revalidated(found):
    """The document found, or 304 if the caller has it already (RFC 9110 13.1.2)."""
    headers = {"Cache-Control": "private, no-cache", "ETag": quote_etag(found["etag"])}
    # Parsed only where it was sent, since that is a twentieth of the cost of a read.
    sent = "If-None-Match" in request.headers
    if sent and request.if_none_match.contains_weak(found["etag"]):
        return Response(status=304, headers=headers)
    return Response(found["document"], headers=headers, mimetype="application/json")


def answer(error):
    """Any failure as a problem document (RFC 9457), with the headers it brings along."""
    members = {}
    match error:
        case ValidationError():
            members = {"errors": error.normalized_messages()}
            error = http.UnprocessableEntity("Correct what is named in errors.")
        case NotFound():
            error = http.NotFound("Your account has no Project with this id.")
        case Stale():
            error = http.PreconditionFailed("The Project has changed: get it again.")
        case Unavailable():
            current_app.logger.error("Database unavailable: %s", error)
            error = http.ServiceUnavailable(retry_after=RETRY_AFTER)
    response = error.get_response()
    problem = {"type": "about:blank", "title": error.name, "status": error.code}
    problem |= {"detail": error.description} | members
    response.data = current_app.json.dumps(problem)
    response.content_type = "application/problem+json"
    return response
