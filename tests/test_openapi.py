"""openapi.json says what the service does: no more, no less, and nothing else."""

import shutil
import subprocess

import pytest
from conformance import API, FILE, resolve, validator
from conftest import BIN, ROOT
from marshmallow import ValidationError

import schemas

POINT = {"type": "Point", "coordinates": [-122.4410896675, 37.768361565]}
VALUES = [None, True, 0, 1, -1, 1.5, "", "x", "1", [], ["x"], {}, {"x": 1}, 10**400]
COORDINATES = [
    -180,
    180,
    -90,
    90,
    -180.1,
    180.1,
    -90.1,
    90.1,
    "1",
    True,
    None,
    [1],
    1e308,
]
LOCATIONS = [
    POINT,
    POINT | {"type": "point"},
    POINT | {"type": None},
    POINT | {"bbox": []},
    POINT | {"longitude": 1},
    {"type": "Point"},
    {"coordinates": [1, 2]},
    *[POINT | {"coordinates": value} for value in [*VALUES, [1], [1, 2, 3]]],
    *[POINT | {"coordinates": [value, 0]} for value in COORDINATES],
    *[POINT | {"coordinates": [0, value]} for value in COORDINATES],
]


def loads(schema, body):
    try:
        schema.load(body)
    except ValidationError:
        return False
    return True


def test_description_is_served_to_anybody(app):
    response = app.test_client().get("/openapi.json")
    assert (response.status_code, response.data) == (200, FILE.read_bytes())
    assert response.content_type == "application/json"


def test_every_route_and_method_is_described_and_nothing_else(app):
    every = {"get", "head", "post", "put", "delete", "options", "patch", "trace"}
    routes = {
        (rule.rule.replace("<id>", "{projectId}"), method.lower())
        for rule in app.url_map.iter_rules()
        for method in rule.methods or every
    }
    described = {
        (path, method)
        for path, item in API["paths"].items()
        for method in every & set(item)
    }
    assert described == routes


def test_protected_routes_are_described_as_such():
    open_paths = {
        path
        for path, item in API["paths"].items()
        for operation in item.values()
        if isinstance(operation, dict) and operation.get("security") == []
    }
    assert API["security"] == [{"token": []}]
    assert open_paths == {"/api/v1/hello-service", "/openapi.json"}


def test_described_members_are_those_of_the_schemas():
    described = API["components"]["schemas"]
    assert set(described["ProjectInput"]["properties"]) == set(schemas.project.fields)
    assert set(described["Project"]["properties"]) == set(schemas.project.fields)
    assert described["Project"]["required"] == list(described["Project"]["properties"])
    point = set(schemas.PointSchema().fields)
    assert set(described["Point"]["properties"]) == point
    parameters = API["paths"]["/api/v1/gardening/projects"]["get"]["parameters"]
    query = {p["name"] for p in map(resolve, parameters) if p["in"] == "query"}
    assert query == set(schemas.page.fields)


@pytest.mark.parametrize("member", [*schemas.project.fields, "unknown"])
def test_description_and_schema_accept_the_same(member):
    pytest.importorskip("jsonschema")
    described = validator({"$ref": "#/components/schemas/ProjectInput"})
    values = [*VALUES, *LOCATIONS]
    accepted = [loads(schemas.project, {member: value}) for value in values]
    assert [described.is_valid({member: value}) for value in values] == accepted
    assert any(accepted) == (member != "unknown")


def test_description_and_schema_accept_the_same_documents():
    pytest.importorskip("jsonschema")
    described = validator({"$ref": "#/components/schemas/ProjectInput"})
    for value in VALUES:
        assert described.is_valid(value) == loads(schemas.project, value)


@pytest.mark.parametrize("name", schemas.page.fields)
def test_description_and_schema_accept_the_same_query(name):
    pytest.importorskip("jsonschema")
    described = validator(
        resolve({"$ref": f"#/components/parameters/{name}"})["schema"]
    )
    for value in (-1, 0, 1, 20, 1000, 1001, 2**53 - 1, 2**53):
        assert described.is_valid(value) == loads(schemas.page, {name: str(value)})


def test_examples_are_valid():
    pytest.importorskip("jsonschema")
    checked = [check_examples(item) for item in walk(API) if "schema" in item]
    assert sum(checked) > 30


def check_examples(item):
    examples = [value["value"] for value in item.get("examples", {}).values()]
    examples += [item["example"]] if "example" in item else []
    for example in examples:
        validator(item["schema"]).validate(example)
    return len(examples)


def walk(item):
    if isinstance(item, dict):
        yield item
    for child in item.values() if isinstance(item, dict) else item:
        if isinstance(child, (dict, list)):
            yield from walk(child)


def test_schemathesis_finds_nothing(gardening):
    if not (program := shutil.which("schemathesis", path=BIN)):
        pytest.skip("schemathesis is not installed")
    header = f"Authorization: {gardening.headers['Authorization']}"
    run = subprocess.run(
        [program, "run", f"{gardening.url}/openapi.json", "--checks=all", "-H", header],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert "No issues found" in run.stdout
