"""Checks a response of the service against openapi.json."""

import json
import re
from functools import cache
from http import HTTPStatus
from pathlib import Path

from flask.testing import FlaskClient
from jsonschema_rs import Draft202012Validator

FILE = Path(__file__).parents[2] / "openapi.json"
API = json.loads(FILE.read_text())
HEADERS = {"Allow", "Link", *API["components"]["headers"]} - {"NoStore"}
SENT = {p["name"] for p in API["components"]["parameters"].values() if p["in"] == "header"}
CONTENT_HEADERS = {"Content-Length", "Content-Type"}
HELLO = "/api/v1/hello-service"
PROBLEM = API["components"]["responses"]["NotFound"]
ALLOW = {"Allow": {"required": True, "schema": {"type": "string"}}}
# The responses where no operation is described.
ELSEWHERE = {404: PROBLEM, 405: PROBLEM | {"headers": PROBLEM["headers"] | ALLOW}, 500: PROBLEM}


def title_of(status):
    """RFC 9110's phrase; those of Python differ from version to version."""
    titles = {413: "Content Too Large", 422: "Unprocessable Content"}
    return titles.get(status, HTTPStatus(status).phrase)


def resolve(item):
    """The item, or what it refers to."""
    while "$ref" in item:
        *_, kind, name = item["$ref"].split("/")
        item = API["components"][kind][name]
    return item


def validator(schema):
    """Of a schema in the file."""
    return compiled(json.dumps(schema))


@cache
def compiled(schema):
    components = {"components": API["components"]}
    return Draft202012Validator(components | json.loads(schema))


def find_operation(method, path):
    for template, item in API["paths"].items():
        if re.fullmatch(re.sub(r"{\w+}", "[^/]+", template), path):
            # HEAD gets the headers of GET, and is not described again (RFC 9110 9.3.2).
            default = item.get("get") if path == HELLO or method == "HEAD" else None
            return item.get(method.lower(), default)


def check_response(method, path, status, headers, content, names=None):
    """`names` are the headers that must be described: by default those of openapi.json.

    Servers and proxies add others.
    """
    if names is None:
        names = {name for name in HEADERS if name in headers}
    operation = find_operation(method, path)
    response = resolve(operation["responses"][str(status)]) if operation else ELSEWHERE[status]
    described = {n: resolve(h) for n, h in response.get("headers", {}).items()}
    required = {name for name, header in described.items() if header.get("required")}
    called = f"{method} {path}: {status}"
    assert required <= names <= set(described), called
    for name in filter(headers.__contains__, described):
        check_text(headers[name], described[name]["schema"], f"{called}, {name}")
    for media_type, media in response.get("content", {}).items():
        assert headers["Content-Type"] == media_type, called
        if method == "HEAD":
            continue
        body = json.loads(content)
        check_body(body, media["schema"], called)
        if "problem" in media_type:
            assert (body["status"], body["title"]) == (status, title_of(status)), called
    if method == "HEAD" or "content" not in response:
        assert not content, called
    if status in (204, 304):
        assert "Content-Type" not in headers, called


def check_text(text, schema, where):
    """A header's value; one that is to be an integer comes as its digits."""
    check_body(int(text) if schema["type"] == "integer" else text, schema, where)


def check_body(body, schema, where):
    """Fails with the field that is wrong."""
    # The validator takes no lone surrogate, which the service may have to repeat.
    text = json.dumps(body, ensure_ascii=False).encode(errors="replace")
    for error in validator(schema).iter_errors(json.loads(text)):
        field = "/".join(map(str, error.instance_path))
        raise AssertionError(f"{where}, field {field!r}: {error.message}")


def assert_problem(response, status, types=("about:blank",)):
    """The response is a problem document with nothing of its own, and is not stored."""
    found, headers, content = response
    assert (found, headers["Content-Type"]) == (status, "application/problem+json")
    assert headers.get_all("Cache-Control") == ["no-store"]
    problem = json.loads(content)
    assert problem["type"] in types
    assert (problem["status"], problem["title"]) == (status, title_of(status))
    assert set(problem) == {"type", "title", "status", "detail"}


class CheckedClient(FlaskClient):
    """Checks each response against openapi.json."""

    def open(self, *args, **options):
        # Buffered, it closes what the application returns, as a server has to (PEP 3333).
        response = super().open(*args, buffered=True, **options)
        request = response.request
        received = response.status_code, response.headers, response.data
        names = set(response.headers.keys()) - CONTENT_HEADERS
        check_response(request.method, request.path, *received, names)
        if operation := find_operation(request.method, request.path):
            described = {resolve(each)["name"] for each in operation.get("parameters", [])}
            assert SENT & set(request.headers.keys()) <= described
        return response
