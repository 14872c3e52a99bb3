"""openapi.json says what the service does: no more, no less, and nothing else."""

import json
import re
from graphlib import TopologicalSorter

import pytest
from marshmallow import validate
from marshmallow.fields import Nested, Tuple

import schemas
from engines.fields import FIELDS
from helpers.openapi import API, FILE, HELLO, resolve, validator
from helpers.running import PROJECTS, ROOT
from reading import MAX_BODY
from store import MAX_PROJECTS

# What is described of hello-service, which takes any method: more would only bloat the generated
# clients.
GREETED = {"get", "put"}
SCHEMAS, PARAMETERS = API["components"]["schemas"], API["components"]["parameters"]
KEY = PARAMETERS["IdempotencyKey"]["schema"]
OPERATIONS = {
    (method, path): operation
    for path, item in API["paths"].items()
    for method, operation in item.items()
    if method != "parameters"
}


def test_description_is_served_to_anybody(app):
    client = app.test_client()
    response = client.get("/openapi.json")
    assert (response.status_code, response.data) == (200, FILE.read_bytes())
    assert response.content_type == "application/json"
    known = {"If-None-Match": response.headers["ETag"]}
    assert client.get("/openapi.json", headers=known).status_code == 304


def test_every_route_and_method_is_described_and_nothing_else(app):
    routes = {
        (rule.rule.replace("<id>", "{projectId}"), method.lower())
        for rule in app.url_map.iter_rules()
        for method in rule.methods or GREETED
        if rule.rule != "/" and not rule.rule.startswith("/docs")  # pages for people
    }
    described = {(path, method) for method, path in OPERATIONS}
    # HEAD is GET without the body (RFC 9110 9.3.2): it is no operation of its own.
    heads = {(path, "head") for path, method in described if method == "get"}
    assert described | heads - {(HELLO, "head")} == routes


def test_head_gets_what_is_described_of_get(app, client, project_url):
    client.post(PROJECTS, json={})  # on the next page
    lists = (PROJECTS, f"{PROJECTS}?size=1", f"{PROJECTS}?size=0")
    public = ("/openapi.json", "/health", HELLO)
    for path in (*lists, project_url, "/nowhere", *public):
        got, head = client.get(path), client.head(path)
        assert (head.status, head.data) == (got.status, b"")
        if path != HELLO:  # which names the method
            assert head.headers == got.headers
    assert app.test_client().head(PROJECTS).status_code == 401


def test_header_that_is_not_described_fails_the_test(app):
    app.add_url_rule("/crash", view_func=lambda: 1 / 0)

    @app.after_request
    def add_header(response):
        response.headers["Retry-After"] = "5"
        return response

    for path in ("/openapi.json", PROJECTS, "/nowhere", "/crash"):
        with pytest.raises(AssertionError):
            app.test_client().get(path)


def test_protected_routes_are_described_as_such():
    open_paths = {path for (_, path), each in OPERATIONS.items() if each.get("security") == []}
    assert API["security"] == [{"token": []}]
    assert API["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    assert open_paths == {"/api/v1/hello-service", "/health", "/openapi.json"}


def parameters_of(path, operation):
    """Those of the path as well."""
    parameters = API["paths"][path].get("parameters", []) + operation.get("parameters", [])
    return [resolve(each) for each in parameters]


@pytest.mark.parametrize("method, path", OPERATIONS)
def test_operation_describes_the_errors_that_it_may_meet(method, path):
    operation = OPERATIONS[method, path]
    is_protected = "security" not in operation
    has_body = operation.get("requestBody")
    named = {each["name"] for each in parameters_of(path, operation)}
    expected = {"429", "502", "504"}  # of the proxy
    for statuses, is_met in [
        ({"500", "503"}, is_protected or path == "/health"),  # which reads the database
        ({"401"}, is_protected),
        ({"400", "411", "413", "415", "422"}, has_body),
        ({"404"}, "{" in path),
        ({"409"}, method == "post"),
        ({"412"}, "If-Match" in named),
        ({"422"}, path.startswith(PROJECTS)),  # if only for an unknown parameter
    ]:
        expected |= statuses if is_met else set()
    assert {status for status in operation["responses"] if status >= "400"} == expected


@pytest.mark.parametrize("method, path", OPERATIONS)
def test_body_is_required_json_and_headers_are_optional(method, path):
    operation = OPERATIONS[method, path]
    if method in ("post", "put") and not path.startswith(HELLO):
        body = operation["requestBody"]
        assert (body["required"], [*body["content"]]) == (True, ["application/json"])
    for each in parameters_of(path, operation):
        assert each.get("required", False) == (each["in"] == "path")


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
    assert f"an account may hold | {MAX_PROJECTS} |" in (ROOT / "README.md").read_text()
    assert body in API["components"]["responses"]["TooLarge"]["description"]
    full = API["components"]["responses"]["FullOrSpent"]
    assert f"{MAX_PROJECTS:,} unless the operator" in full["description"]
    listed = SCHEMAS["ProjectPage"]["properties"]["size"]
    assert listed["maximum"] == schemas.MAX_SIZE


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


def test_described_fields_match_the_schemas():
    assert set(schemas.PROJECT.fields) == set(FIELDS)
    assert set(SCHEMAS["ProjectInput"]["properties"]) == set(FIELDS)
    assert list(SCHEMAS["Project"]["properties"]) == list(FIELDS)
    assert SCHEMAS["Project"]["required"] == list(FIELDS)
    point = set(schemas.PointSchema().fields)
    assert set(SCHEMAS["Point"]["properties"]) == point
    parameters = parameters_of(PROJECTS, OPERATIONS["get", PROJECTS])
    assert {p["name"] for p in parameters if p["in"] == "query"} == set(schemas.PAGE.fields)


def limits_of(field):
    """What the field of a schema refuses, in the words of JSON Schema."""
    limits = {}
    for rule in field.validators:
        match rule:
            case schemas.STORABLE:
                limits["pattern"] = r"^[^\x00]*$"
            case validate.Length():
                limits |= {"minLength": rule.min, "maxLength": rule.max}
            case validate.Range():
                limits |= {"minimum": rule.min, "maximum": rule.max}
            case validate.Equal():
                limits["enum"] = [rule.comparable]
            case _:
                pytest.fail(f"compare {rule} as well")
    return {name: limit for name, limit in limits.items() if limit is not None}


@pytest.mark.parametrize(
    "fields, described",
    [
        (schemas.PROJECT.fields, SCHEMAS["ProjectInput"]["properties"]),
        (schemas.PointSchema().fields, SCHEMAS["Point"]["properties"]),
        (schemas.PAGE.fields, {name: PARAMETERS[name]["schema"] for name in schemas.PAGE.fields}),
    ],
)
def test_described_limits_are_those_of_the_schemas(fields, described):
    for name, field in fields.items():
        # test_schemas.py tries what has parts.
        if not isinstance(field, (Nested, Tuple)):
            limits = described[name].keys() - {"type", "format", "description"}
            assert {limit: described[name][limit] for limit in limits} == limits_of(field), name


def test_longest_texts_fit_in_a_body_even_if_it_escapes_every_character(client):
    limits = {name: limits_of(field) for name, field in schemas.PROJECT.fields.items()}
    lengths = {name: limit["maxLength"] for name, limit in limits.items() if "maxLength" in limit}
    body = json.dumps({name: "😀" * length for name, length in lengths.items()})
    response = client.post(PROJECTS, data=body, content_type="application/json")
    assert response.status_code == 201
    assert len(response.json["name"]) == lengths["name"]


@pytest.mark.parametrize("key", ["k", "a b", "~" * 255, f'"{"8e03978e-" * 4}"'])
def test_printable_key_is_described_and_accepted(client, key):
    assert validator(KEY).is_valid(key)
    response = client.post(PROJECTS, json={}, headers={"Idempotency-Key": key})
    assert response.status_code == 201


@pytest.mark.parametrize("key", ["", "~" * 256, "é", "a\tb", "\x7f", "k,k", "k, k", ","])
def test_invalid_key_is_not_described_and_refused(client, key):
    assert not validator(KEY).is_valid(key)
    response = client.post(PROJECTS, json={}, headers={"Idempotency-Key": key})
    assert response.status_code == 400
    assert "1 to 255 printable ASCII characters without a comma" in response.json["detail"]
    assert client.get(PROJECTS).json == []


def test_examples_are_valid_and_every_problem_has_one():
    checked = [check_examples(item) for item in walk(API) if "schema" in item]
    assert sum(checked) > 20
    for response in API["components"]["responses"].values():
        for content in response.get("content", {}).values():
            assert check_examples(content) > 0, response


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
