"""The Gardening Project Service: its routes, and what each of them responds.

It contains no SQL, no token logic and no validation. Failures travel as exceptions to the
handlers of problems.py.
"""

import os
from collections.abc import Mapping
from typing import Any

from flask import Blueprint, Flask, Response, current_app, request, url_for
from werkzeug.http import quote_etag
from werkzeug.routing import Rule

import commands
import problems
import swagger
from auth import current_store, token_required
from engines.base import Unavailable
from engines.sqlite import SQLite
from reading import (
    MAX_CONTENT_LENGTH,
    read_key,
    read_known_etags,
    read_members,
    read_page,
    read_preconditions,
)
from schemas import MAX_PAGE
from store import Store

TITLE = "Gardening Project Service"

api = Blueprint("api", __name__)


def create_app(config: Mapping[str, Any] | None = None) -> Flask:
    """Build the service; `config` overrides FLASK_* variables, which override the defaults.

    Raises engines.base.Unavailable for a bad setting or an unusable file (`flask` says so
    in one line); a server is contacted at the first use.
    """
    app = Flask(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_CONTENT_LENGTH
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app.config.from_prefixed_env()
    # It parses values as JSON, and would turn a file called 2026.10 into a number.
    app.config["DATABASE"] = os.environ.get("FLASK_DATABASE")
    app.config.update(config or {})
    app.url_map.merge_slashes = False  # "a//b" is not redirected to "a/b"
    app.register_blueprint(api)
    # Without methods, a Rule takes them all.
    app.url_map.add(Rule("/api/v1/hello-service", endpoint="hello"))
    problems.add_to(app)
    swagger.add_to(app, TITLE)
    commands.add_to(app)
    with commands.one_line_errors():
        app.extensions["store"] = open_store(app)
    commands.welcome(app)
    return app


def open_store(app: Flask) -> Store:
    """The store on the database that the setting names, or in the instance folder."""
    database = str(app.config["DATABASE"] or "")
    if not database:
        try:
            os.makedirs(app.instance_path, exist_ok=True)
        except OSError as error:
            raise Unavailable(f"{error.strerror}: {error.filename}") from error
        database = os.path.join(app.instance_path, "gardening.db")
    scheme, separator, _ = database.partition("://")
    if not separator:
        checked = app.config.get("DATABASE_FILE")  # by gunicorn.conf.py
        return Store(SQLite(database, checked and tuple(checked)))
    if scheme != "postgresql":
        raise Unavailable(
            "FLASK_DATABASE must be the path of a file or start with postgresql://, "
            f"not {scheme}://"
        )
    try:
        from engines.postgres import PostgreSQL
    except ImportError as error:
        needed = "install psycopg[binary], or this package with the extra postgres"
        raise Unavailable(f"for PostgreSQL, {needed}") from error
    return Store(PostgreSQL(database))


@api.endpoint("hello")
def hello() -> dict[str, Any]:
    """Greet, whatever the method."""
    return {"greetings": f"Hello from the {TITLE}!", "requestMethod": request.method}


@api.put("/api/v1/hello-service/auth")
@token_required
def hello_auth(account: str) -> dict[str, Any]:
    """Greet the holder of a valid token."""
    return hello() | {"isAuthenticated": True}


@api.get("/health")
def get_health() -> Response:
    """Say whether the database can be read now."""
    current_store().check()
    response = Response('{"status":"ok"}', content_type="application/json")
    response.cache_control.no_store = True
    return response


@api.get("/openapi.json")
def get_description() -> Response:
    """Return the OpenAPI description of this API."""
    with current_app.open_resource("openapi.json") as file:
        return Response(file.read(), content_type="application/json")


@api.post("/api/v1/gardening/projects")
@token_required
def create_project(account: str) -> Response:
    """Create a Project; `{}` will do."""
    project = current_store().create_project(account, read_members(), read_key())
    location = url_for(".get_project", id=project.id)
    headers = {"Location": location, "ETag": quote_etag(project.etag)}
    return Response(project.document, 201, headers, content_type="application/json")


@api.get("/api/v1/gardening/projects")
@token_required
def list_projects(account: str) -> Response:
    """List the account's Projects, or one page of them."""
    page = read_page()
    projects = current_store().list_projects(account, read_known_etags(), page)
    response = respond_or_304(projects.etag, projects.document)
    if page is not None and projects.next_after is not None:  # RFC 8288
        number = min(page.number + 1, MAX_PAGE)
        query = f"page={number}&size={page.size}&after={projects.next_after}"
        response.headers["Link"] = f'<{url_for(".list_projects")}?{query}>; rel="next"'
    return response


@api.get("/api/v1/gardening/projects/<id>")
@token_required
def get_project(account: str, id: str) -> Response:
    """Return one Project."""
    project = current_store().get_project(account, id)
    return respond_or_304(project.etag, project.document)


@api.put("/api/v1/gardening/projects/<id>")
@token_required
def update_project(account: str, id: str) -> Response:
    """Change the given members, and only those."""
    members = read_members()
    project = current_store().update_project(
        account, id, members, *read_preconditions()
    )
    # With an ETag, a client could take what it sent for what is stored: a PUT may have
    # one only if the two are the same (RFC 9110 9.3.4), and this one merges.
    return Response(project.document, content_type="application/json")


@api.delete("/api/v1/gardening/projects/<id>")
@token_required
def delete_project(account: str, id: str) -> Response:
    """Delete a Project and all that belongs to it."""
    current_store().delete_project(account, id, *read_preconditions())
    response = Response(status=204)
    del response.headers["Content-Type"]  # there is no content
    return response


def respond_or_304(etag: str, document: bytes | None) -> Response:
    """The document, or 304 if the caller has it already (RFC 9110 13.1.2).

    The store has compared the ETag of a list: its document is None if the caller has it.
    What is left are the ETag of a Project, and `*`.
    """
    headers = {"Cache-Control": "private, no-cache", "ETag": quote_etag(etag)}
    # Parsed only if it was sent: parsing costs a twentieth of a read.
    sent = "If-None-Match" in request.headers
    if document is None or (sent and request.if_none_match.contains_weak(etag)):
        return Response(status=304, headers=headers)
    return Response(document, headers=headers, content_type="application/json")
