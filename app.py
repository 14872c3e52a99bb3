"""The Gardening Project Service: its routes, and what each of them responds.

Failures travel as exceptions to the handlers of problems.py.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from flask import Blueprint, Flask, Request, Response, request
from werkzeug.http import quote_etag
from werkzeug.routing import MapAdapter, Rule

import commands
import problems
import swagger
from auth import current_store, token_required
from engines import engine_on
from reading import (
    MAX_CONTENT_LENGTH,
    read_fields,
    read_key,
    read_no_query,
    read_page,
    read_precondition,
)
from schemas import MAX_PAGE
from store import MAX_PROJECTS, Store

TITLE = "Gardening Project Service"
PROJECTS = "/api/v1/gardening/projects"

api = Blueprint("api", __name__)


class Application(Flask):
    """Ignores offers to upgrade, and logs a bug so that no caller can forge a line."""

    def create_url_adapter(self, request: Request | None) -> MapAdapter | None:
        adapter = super().create_url_adapter(request)
        if adapter:
            # Werkzeug would look for the route of a WebSocket (RFC 9110 7.8).
            adapter.websocket = False
        return adapter

    def log_exception(self, exc_info: Any) -> None:
        traceback = commands.traceback_of(exc_info[1])
        self.logger.error("Bug in the service (%s)\n%s", problems.current_request(), traceback)


def create_app(config: Mapping[str, Any] | None = None) -> Flask:
    """Build the service; DATABASE and MAX_PROJECTS in `config` override the environment.

    It opens no file, except under `flask run`, which creates the database. Raises ValueError for a
    setting that is wrong.
    """
    app = Application(__name__, static_folder=None)
    app.config.update(
        MAX_CONTENT_LENGTH=MAX_CONTENT_LENGTH,
        PROVIDE_AUTOMATIC_OPTIONS=False,
        DATABASE=os.environ.get("GARDENING_DATABASE"),
        MAX_PROJECTS=os.environ.get("GARDENING_MAX_PROJECTS") or MAX_PROJECTS,
    )
    app.config.update(config or {})
    app.url_map.merge_slashes = False  # "a//b" is not redirected to "a/b"
    app.register_blueprint(api)
    # Without methods, a Rule takes them all.
    app.url_map.add(Rule("/api/v1/hello-service", endpoint="hello"))
    app.view_functions["hello"] = hello
    problems.add_to(app)
    swagger.add_to(app, TITLE)
    default = os.path.join(app.instance_path, "gardening.db")
    try:
        if app.config["DATABASE"] == ":memory:" and "DATABASE" not in (config or {}):
            # No command could issue a token for it.
            raise ValueError("GARDENING_DATABASE cannot be :memory:")
        engine = engine_on(str(app.config["DATABASE"] or ""), default)  # a Path will do
        max_projects = read_max_projects(app.config["MAX_PROJECTS"])
    except ValueError as error:
        raise commands.WrongSetting(str(error)) from error
    app.extensions["store"] = Store(engine, max_projects=max_projects)
    commands.add_to(app)
    return app


def read_max_projects(setting: object) -> int:
    """The setting as a number. Raises ValueError."""
    if not re.fullmatch("[1-9][0-9]{0,17}", str(setting)):
        raise ValueError(
            "GARDENING_MAX_PROJECTS must be a whole number, 1 or more, of up to 18 digits"
        )
    return int(str(setting))


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
    headers = {"Cache-Control": "no-store"}
    return Response('{"status":"ok"}', headers=headers, content_type="application/json")


@api.get("/openapi.json")
def get_description() -> Response:
    """Return the OpenAPI description of this API."""
    return respond(*description())


@cache
def description() -> tuple[str, bytes]:
    """Its ETag, and the document."""
    document = Path(__file__).with_name("openapi.json").read_bytes()
    return hashlib.sha256(document).hexdigest(), document


@api.post(PROJECTS)
@token_required
def create_project(account: str) -> Response:
    """Create a Project; `{}` will do."""
    read_no_query()
    project = current_store().create_project(account, read_fields(), read_key())
    # Relative to the address of the request (RFC 9110 10.2.2), which a proxy may have changed.
    headers = {"Location": f"projects/{project.id}", "ETag": quote_etag(project.etag)}
    return Response(project.document, 201, headers, content_type="application/json")


@api.get(PROJECTS)
@token_required
def list_projects(account: str) -> Response:
    """List the account's Projects, or one page of them."""
    page = read_page()
    projects = current_store().list_projects(account, page)
    headers = {}
    if page and projects.next_after:
        # RFC 8288, relative like Location.
        number = min(page.number + 1, MAX_PAGE)
        query = f"page={number}&size={page.size}&after={projects.next_after}"
        headers["Link"] = f'<?{query}>; rel="next"'
    return respond(projects.etag, projects.document, headers)


@api.get(f"{PROJECTS}/<id>")
@token_required
def get_project(account: str, id: str) -> Response:
    """Return one Project."""
    read_no_query()
    project = current_store().get_project(account, id)
    return respond(project.etag, project.document)


@api.put(f"{PROJECTS}/<id>")
@token_required
def update_project(account: str, id: str) -> Response:
    """Change the given fields, and only those."""
    read_no_query()
    fields = read_fields()
    condition = read_precondition()
    project = current_store().update_project(account, id, fields, condition)
    # With an ETag, a client could take what it sent for what is stored: a PUT may have one only if
    # the two are the same (RFC 9110 9.3.4), and this one merges.
    return Response(project.document, content_type="application/json")


@api.delete(f"{PROJECTS}/<id>")
@token_required
def delete_project(account: str, id: str) -> Response:
    """Delete a Project and all that belongs to it."""
    read_no_query()
    current_store().delete_project(account, id, read_precondition())
    response = Response(status=204)
    del response.headers["Content-Type"]  # there is no content
    return response


def respond(etag: str, document: bytes, headers: Mapping[str, str] = {}) -> Response:
    """Return the document with these headers, or 304 if the caller has it (RFC 9110 13.1.2)."""
    validators = {"Cache-Control": "private, no-cache", "ETag": quote_etag(etag)}
    # Parsed only if it was sent: parsing costs a twentieth of a read.
    if "If-None-Match" in request.headers and request.if_none_match.contains_weak(etag):
        return Response(status=304, headers=validators)
    return Response(document, headers={**validators, **headers}, content_type="application/json")


if __name__ == "__main__":
    # As `python -m app`: `python app.py` has no spec, and Flask would look elsewhere for
    # `instance`. Nothing imports this module again: it would be loaded twice.
    commands.main(create_app)
