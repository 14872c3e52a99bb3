"""The page /docs/ without a browser; tests/deployment/test_browser.py shows it in one."""

from pathlib import Path

import click
import flask_swagger_ui
import pytest
from flask.cli import run_command

from commands import welcome
from helpers.openapi import assert_problem
from helpers.running import PROJECTS, Client, flask_run, gunicorn, hold_port, port_of


@pytest.fixture
def without_docs(environment, tmp_path):
    """The environment of a Python that cannot import flask-swagger-ui."""
    (tmp_path / "flask_swagger_ui.py").write_text("raise ImportError")
    return environment | {"PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize("python", ["environment", "without_docs"])
def test_flask_run_names_the_page_that_there_is(python, request):
    environment = request.getfixturevalue(python)
    with hold_port() as holder:
        port = holder.getsockname()[1]
        with flask_run(environment, f"--port={port}") as (_, printed):
            has_page = python == "environment"
            assert (f"    http://127.0.0.1:{port}/docs/\n" in printed) == has_page
    with flask_run(environment) as (_, printed):  # the port is not known yet
        assert "/docs/" not in "".join(printed)


ADDRESSES = [
    ("::1", None, ["http://[::1]:5000/docs/"]),
    ("example.org", ("cert.pem", "key.pem"), ["https://example.org:5000/docs/"]),
    ("unix:///run/gardening", None, []),
]


@pytest.mark.parametrize("host, cert, addresses", ADDRESSES)
def test_flask_run_names_the_page_by_its_host_and_scheme(app, capsys, host, cert, addresses):
    with click.Context(run_command):
        welcome(app, host=host, port=5000, cert=cert)
    printed = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in printed if "/docs/" in line] == addresses


def test_service_without_the_package_has_no_page(without_docs, token):
    with flask_run(without_docs) as (address, _), Client(port_of(address), token) as client:
        for path in ("/", "/docs", "/docs/"):
            assert_problem(client.fetch("GET", path), 404)
        assert client.call("POST", PROJECTS, {})[0] == 201


def test_every_file_of_the_page_is_served_with_its_policy(environment):
    folder = Path(flask_swagger_ui.__file__).parent / "dist"
    files = [f"files/{file.name}" for file in folder.iterdir()]
    with gunicorn(environment) as (_, port), Client(port, "none") as client:
        for path in ("/", "/docs"):  # relative, as a prefix needs it
            assert client.fetch("GET", path)[1]["Location"] == "docs/"
        for name in ["", "start.js", *files]:
            status, headers, content = client.fetch("GET", f"/docs/{name}")
            assert (status, bool(content)) == (200, True), name
            assert headers["Content-Security-Policy"] == (
                "default-src 'self'; style-src 'self' 'unsafe-inline'; "
                "img-src 'self' data:; object-src 'none'; base-uri 'none'; "
                "frame-ancestors 'none'"
            )
