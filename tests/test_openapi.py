"""openapi.json says what the service does: no more, no less, and nothing else."""

import json
import re
from graphlib import TopologicalSorter
from urllib.parse import urljoin

import pytest

import schemas
from helpers.openapi import API, FILE, HELLO, resolve, validator
from helpers.running import PROJECTS, ROOT
from reading import MAX_BODY
from store import MAX_PROJECTS

# What is described of hello-service, which takes any method: more would only bloat the generated
# clients.
GREETED = {"get", "put"}
KEY = API["components"]["parameters"]["IdempotencyKey"]["schema"]


def test_description_is_served_to_anybody(app):
    response = app.test_client().get("/openapi.json")
    assert (response.status_code, response.data) == (200, FILE.read_bytes())
    assert response.content_type == "application/json"


def test_every_route_and_method_is_described_and_nothing_else(app):
    every = {"get", "head", "post", "put", "delete", "options", "patch", "trace"}
    routes = {
        (rule.rule.replace("<id>", "{projectId}"), method.lower())
        for rule in app.url_map.iter_rules()
        for method in rule.methods or GREETED
        if rule.rule != "/" and not rule.rule.startswith("/docs")  # pages for people
    }
    described = {
        (path, method) for path, item in API["paths"].items() for method in every & set(item)
    }
    # HEAD is GET without the body (RFC 9110 9.3.2): it is no operation of its own.
    heads = {(path, "head") for path, method in described if method == "get"}
    assert described | heads - {(HELLO, "head")} == routes


def test_head_gets_what_is_described_of_get(app, client, project_url):
    public = ("/openapi.json", "/health", HELLO)
    for path in (PROJECTS, f"{PROJECTS}?size=0", project_url, "/nowhere", *public):
        got, head = client.get(path), client.head(path)
        assert (head.status, head.data) == (got.status, b"")
        if path != HELLO:  # which names the method
            assert head.headers == got.headers
    assert app.test_client().head(PROJECTS).status_code == 401


@pytest.mark.parametrize("header", ["Retry-After", "Deprecation"])
def test_header_that_is_not_described_fails_the_test(app, header):
    app.add_url_rule("/crash", view_func=lambda: 1 / 0)

    @app.after_request
    def add_header(response):
        response.headers[header] = "5"
        return response

    for path in ("/openapi.json", PROJECTS, "/nowhere", "/crash"):
        with pytest.raises(AssertionError):
            app.test_client().get(path)


def test_protected_routes_are_described_as_such():
    open_paths = {
        path
        for path, item in API["paths"].items()
        for operation in item.values()
        if isinstance(operation, dict) and operation.get("security") == []
    }
    assert API["security"] == [{"token": []}]
    assert open_paths == {"/api/v1/hello-service", "/health", "/openapi.json"}


def test_pages_state_the_limits_of_the_code():
    fields, size = schemas.PROJECT.fields, schemas.PAGE.fields["size"]
    name, postal_code = (f"{fields[name].validators[0].max:,}" for name in ("name", "postal_code"))
    body = f"{MAX_BODY // 1024} KiB"
    page = " ".join((ROOT / "docs/api.md").read_text().split())
    for stated in (
        f"`name` (at most {name} characters), `postal_code` ({postal_code})",
        f"uncompressed, at most {body},",
        f"the body is longer than {body} |",
        f"`size` is 1 to {schemas.MAX_SIZE}, default {size.load_default}",
        f"as many Projects as it may, {MAX_PROJECTS:,} unless the operator",
    ):
        assert stated in page
    assert body in API["components"]["responses"]["TooLarge"]["description"]
    full = API["components"]["responses"]["FullOrSpent"]
    assert f"{MAX_PROJECTS:,} unless the operator" in full["description"]
    listed = API["components"]["schemas"]["ProjectPage"]["properties"]["size"]
    assert listed["maximum"] == schemas.MAX_SIZE


def test_response_may_hold_text_that_a_request_may_not():
    """An older release took names of any length."""
    created = API["paths"][PROJECTS]["post"]["responses"]["201"]["content"]
    project = created["application/json"]
    longer = {"name": "x" * 1001, "postal_code": "x" * 101}
    validator(project["schema"]).validate(project["example"] | longer)


def test_examples_of_the_proxys_errors_match_nginx_conf():
    config = (ROOT / "deploy/nginx.conf").read_text()
    for name in ("TooManyRequests", "BadGateway", "GatewayTimeout"):
        content = API["components"]["responses"][name]["content"]
        example = dict(content["application/problem+json"]["example"])
        status = example["status"]
        [fields] = re.findall(rf"(?m)^    {status}  '(\".*\")';$", config)
        assert example == {"type": "about:blank", "status": status, **json.loads(f"{{{fields}}}")}


def test_no_schema_breaks_a_code_generator():
    """Shown by compiling what they make of it in Go, Java, Python and TypeScript."""
    parameters = [p["schema"] for p in API["components"]["parameters"].values()]
    seen = walk([API["components"]["schemas"], parameters], passing_over={"then"})
    for schema in seen:
        kind = schema.get("type")
        # Go makes 32 bits of a number without a format, Java of an integer.
        if kind == "number":
            assert schema["format"] == "double"
        if kind == "integer":
            assert schema.get("format") == "int64" or schema["maximum"] < 2**31
        # Java has no TRUE("true"), and a status may come from a proxy.
        assert kind == "string" or not {"const", "enum"} & set(schema)
        # Each of these becomes a type of its own, which is none in some languages.
        assert "prefixItems" not in schema
        assert not {"anyOf", "oneOf"} & set(schema.get("items", {}))


def test_no_schema_refers_to_itself():
    """openapi-python-client drops what does, with all that refers to it."""
    references = {
        name: {item.get("$ref", "").rpartition("/")[2] for item in walk(schema)}
        for name, schema in API["components"]["schemas"].items()
    }
    TopologicalSorter(references).prepare()  # which raises CycleError


def test_calls_go_to_where_the_description_came_from():
    [server] = API["servers"]
    base = "https://example.org/garden/"
    assert urljoin(f"{base}openapi.json", server["url"]) == base


def test_no_parameter_is_prefilled():
    parameters = API["components"]["parameters"].values()
    assert not [p["name"] for p in parameters if "example" in p]


def test_described_fields_match_the_schemas():
    described = API["components"]["schemas"]
    assert set(described["ProjectInput"]["properties"]) == set(schemas.PROJECT.fields)
    assert set(described["Project"]["properties"]) == set(schemas.PROJECT.fields)
    assert described["Project"]["required"] == list(described["Project"]["properties"])
    point = set(schemas.PointSchema().fields)
    assert set(described["Point"]["properties"]) == point
    parameters = API["paths"][PROJECTS]["get"]["parameters"]
    query = {p["name"] for p in map(resolve, parameters) if p["in"] == "query"}
    assert query == set(schemas.PAGE.fields)


@pytest.mark.parametrize("name", schemas.PAGE.fields)
def test_description_and_schema_accept_the_same_query(name):
    described = validator(resolve({"$ref": f"#/components/parameters/{name}"})["schema"])
    for value in (-1, 0, 1, 20, 1000, 1001, 2**53 - 1, 2**53):
        errors = schemas.PAGE.validate({name: str(value)})
        assert described.is_valid(value) == (not errors)


@pytest.mark.parametrize("key", ["k", "a b", "~" * 255, f'"{"8e03978e-" * 4}"'])
def test_printable_key_is_described_and_accepted(client, key):
    assert validator(KEY).is_valid(key)
    response = client.post(PROJECTS, json={}, headers={"Idempotency-Key": key})
    assert response.status_code == 201


@pytest.mark.parametrize("key", ["", "~" * 256, "é", "a\tb", "\x7f"])
def test_invalid_key_is_not_described_and_refused(client, key):
    assert not validator(KEY).is_valid(key)
    response = client.post(PROJECTS, json={}, headers={"Idempotency-Key": key})
    assert response.status_code == 400
    assert "1 to 255 printable ASCII characters" in response.json["detail"]
    assert client.get(PROJECTS).json == []


def test_examples_are_valid():
    checked = [check_examples(item) for item in walk(API) if "schema" in item]
    assert sum(checked) > 20


def check_examples(item):
    examples = [value["value"] for value in item.get("examples", {}).values()]
    examples += [item["example"]] if "example" in item else []
    for example in examples:
        validator(item["schema"]).validate(example)
    return len(examples)


def walk(item, passing_over=()):
    """Each object in it, but none below these fields."""
    if isinstance(item, dict):
        yield item
        item = [item[name] for name in item if name not in passing_over]
    for child in item:
        if isinstance(child, (dict, list)):
            yield from walk(child, passing_over)
