"""Clients that others generate from openapi.json: without a warning, and they work.

It knows no rule of the service: it shows that a program reads what the service returns as values of
the types that the generator made.
"""

import os
import re
import shutil
from contextlib import closing
from importlib import import_module

import pytest

from helpers.running import BIN, LIMIT, POINT, ROOT, environment_of, gunicorn, run, token_on

# What the generator says of every document of OpenAPI 3.1 that holds a schema.
OF_ANY_DOCUMENT = ("OpenAPI 3.1 support is still in beta", "schema name: null")
TYPESCRIPT = ROOT / "tests/release/typescript"
TSC_OPTIONS = "--target es2022 --module nodenext --lib es2022,dom --skipLibCheck"


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    database = str(tmp_path_factory.mktemp("clients") / "gardening.db")
    run(BIN / "flask", "init-db", environment=environment_of(database))
    return database


@pytest.fixture(scope="module")
def url(database):
    """The service, whose description names its own address."""
    with gunicorn(environment_of(database)) as (_, port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def generated(tmp_path, monkeypatch):
    """The folder of a client, from which Python imports."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


class PythonClient:
    """Calls openapi-generator's client: its errors are exceptions, its unions boxes."""

    def __init__(self, url, token):
        package = import_module("openapi_client")
        self.models, self.error = package.models, package.ApiException
        settings = package.Configuration(host=url, access_token=token)
        self.client = package.ApiClient(settings)
        self.projects = package.ProjectsApi(self.client)

    def perform(self, operation, *arguments, **options):
        method = getattr(self.projects, operation)
        try:
            response = method(*arguments, **options, _request_timeout=float(LIMIT))
        except self.error as error:
            return error.data
        return getattr(response, "actual_instance", response)

    def send(self, operation, *arguments, fields, **options):
        fields = self.models.ProjectInput.from_dict(fields)
        return self.perform(operation, *arguments, fields, **options)

    def close(self):
        self.client.rest_client.pool_manager.clear()


def use(client):
    """Do with a client what most programs do with the service."""
    Project, Problem = client.models.Project, client.models.Problem
    InvalidProblem = client.models.InvalidProblem
    fields = {"name": "Park", "postal_code": "94117", "location": POINT}
    bare = client.send("create_project", fields={})
    park = client.send("create_project", fields=fields, idempotency_key="k")
    assert isinstance(bare, Project)
    assert isinstance(park, Project)
    assert (bare.location, bare.version) == (None, 1)
    assert isinstance(park.location, client.models.Point)
    assert park.location.coordinates == POINT["coordinates"]

    assert client.perform("get_project", park.id) == park
    assert client.perform("list_projects") == [bare, park]
    page = client.perform("list_projects", page=1, size=1)
    assert isinstance(page, client.models.ProjectPage)
    assert (page.project_list, page.page, page.size, page.total) == ([park], 1, 1, 2)

    for project in (bare, park):
        fetched = client.perform("get_project", project.id).to_dict()
        edited = fetched | {"name": "Garden"}
        changed = client.send("update_project", project.id, fields=edited)
        renewed = {"version": 2, "updated_at": changed.updated_at}
        assert changed.to_dict() == edited | renewed

    def describe(problem, model):
        assert isinstance(problem, model)
        return problem.status, problem.type

    south = {"location": POINT | {"coordinates": [0, 91]}}
    invalid = client.send("create_project", fields=south)
    assert describe(invalid, InvalidProblem) == (422, "about:blank")
    [(element, [message])] = invalid.errors["location"]["coordinates"].items()
    assert (element, type(message)) == ("1", str)
    reused = client.send("create_project", fields={}, idempotency_key="k")
    assert describe(reused, InvalidProblem) == (422, "urn:gardening:key-reused")
    stale = client.perform("delete_project", park.id, if_match='"1-1"')
    assert describe(stale, Problem) == (412, "about:blank")
    assert client.perform("delete_project", park.id) is None
    spent = client.send("create_project", fields=fields, idempotency_key="k")
    assert describe(spent, Problem) == (409, "urn:gardening:key-spent")


def test_python_client_of_openapi_generator_works(url, database, generated):
    command = [BIN / "openapi-generator-cli", "generate", "-g", "python"]
    # Half of the time goes into optimizing what runs once.
    environment = os.environ | {"JAVA_OPTS": "-XX:TieredStopAtLevel=1"}
    options = ["-i", f"{url}/openapi.json", "-o", generated]
    printed = run(*command, *options, environment=environment)
    warnings = re.findall("(?m)^.* (?:WARN|ERROR) .*$", printed.stdout + printed.stderr)
    others = [line for line in warnings if not any(map(line.count, OF_ANY_DOCUMENT))]
    assert others == []
    token = token_on(database, "openapi-generator")
    with closing(PythonClient(url, token)) as client:
        use(client)


def test_client_of_openapi_fetch_compiles_strictly_and_works(url, database, tmp_path):
    folder = shutil.copytree(TYPESCRIPT, tmp_path / "client")
    quietly = ["--no-audit", "--no-fund", "--prefer-offline"]
    run("npm", "ci", *quietly, folder=folder, limit=10 * LIMIT)
    programs, description = folder / "node_modules/.bin", f"{url}/openapi.json"
    generate = [programs / "openapi-typescript", description, "--output=schema.ts"]
    printed = run(*generate, folder=folder)
    assert "warn" not in (printed.stdout + printed.stderr).lower()
    tsc = [programs / "tsc", "--strict", *TSC_OPTIONS.split()]
    run(*tsc, "scenario.ts", folder=folder)
    run("node", "scenario.js", url, token_on(database, "openapi-fetch"), folder=folder)
