import json

import pytest
from marshmallow import ValidationError

import schemas

POINT = {"type": "Point", "coordinates": [-122.4410896675, 37.768361565]}


def at(*coordinates):
    return {"location": {"type": "Point", "coordinates": list(coordinates)}}


def errors(schema, body):
    with pytest.raises(ValidationError) as caught:
        schema.load(body)
    return caught.value.normalized_messages()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": "Park"},
        {"name": ""},
        {"name": None, "postal_code": None, "location": None},
        {"name": "x" * 60_000, "postal_code": "9\0 \u2028😀"},
    ],
)
def test_project_members_come_through_unchanged(body):
    assert schemas.project.load(body) == body


@pytest.mark.parametrize(
    "coordinates", [(-180, -90), (180, 90), (0, 0), (-0.0, 1e-300), (179.9999999, 1)]
)
def test_point_keeps_its_numbers(coordinates):
    loaded = schemas.project.load(at(*coordinates))
    assert json.loads(json.dumps(loaded)) == at(*coordinates)


@pytest.mark.parametrize("value", [None, 1, "x", [], {"a": 1}])
def test_output_only_members_are_ignored_whatever_they_hold(value):
    names = ("id", "created_at", "updated_at", "version")
    assert schemas.project.load(dict.fromkeys(names, value)) == {}


@pytest.mark.parametrize("body", [None, 1, "x", [], [{}], True, 1.5])
def test_body_that_is_no_object_is_refused(body):
    assert errors(schemas.project, body) == {"_schema": ["Invalid input type."]}


@pytest.mark.parametrize("value", [1, 1.5, True, [], {}, ["x"], "\ud800", "a\udfffb\n"])
@pytest.mark.parametrize("member", ["name", "postal_code"])
def test_text_is_a_unicode_string(member, value):
    assert list(errors(schemas.project, {member: value})) == [member]


@pytest.mark.parametrize(
    "location",
    [
        1,
        "Point",
        [],
        [-122.4, 37.7],
        {},
        {"type": "Point"},
        {"coordinates": [1, 2]},
        POINT | {"type": "point"},
        POINT | {"type": "Polygon"},
        POINT | {"type": None},
        POINT | {"bbox": []},
        POINT | {"longitude": 1},
        POINT | {"coordinates": None},
        POINT | {"coordinates": "12"},
        POINT | {"coordinates": {"0": 1, "1": 2}},
        POINT | {"coordinates": []},
        POINT | {"coordinates": [1]},
        POINT | {"coordinates": [1, 2, 3]},
        POINT | {"coordinates": [37.77, -122.4]},
        POINT | {"coordinates": [180.1, 0]},
        POINT | {"coordinates": [0, -90.1]},
        POINT | {"coordinates": ["1", 2]},
        POINT | {"coordinates": [True, 2]},
        POINT | {"coordinates": [None, 2]},
        POINT | {"coordinates": [[1], 2]},
        POINT | {"coordinates": [float("nan"), 2]},
        POINT | {"coordinates": [float("inf"), 2]},
        POINT | {"coordinates": [10**400, 2]},
    ],
)
def test_location_is_a_point_on_earth(location):
    assert list(errors(schemas.project, {"location": location})) == ["location"]


def test_every_wrong_member_is_named_where_it_stands():
    body = {"name": 1, "nmae": "x"} | at("1", 91)
    found = errors(schemas.project, body)
    assert set(found) == {"name", "nmae", "location"}
    assert set(found["location"]["coordinates"]) == {0, 1}


@pytest.mark.parametrize(
    "query, page, size",
    [
        ({"page": "0"}, 0, 20),
        ({"size": "1"}, 0, 1),
        ({"page": "7", "size": "1000"}, 7, 1000),
        ({"page": str(2**53 - 1)}, 2**53 - 1, 20),
    ],
)
def test_page_and_size_have_defaults(query, page, size):
    assert schemas.page.load(query) == {"page": page, "size": size}


@pytest.mark.parametrize("value", ["-1", "x", "", "1.5", str(2**53), "9" * 5000, "1e3"])
def test_page_is_a_number_from_0(value):
    assert list(errors(schemas.page, {"page": value})) == ["page"]


@pytest.mark.parametrize("value", ["-1", "0", "1001", "x", "", "0x10"])
def test_size_is_a_number_from_1_to_1000(value):
    assert list(errors(schemas.page, {"size": value})) == ["size"]


def test_unknown_query_parameter_is_refused():
    assert list(errors(schemas.page, {"pgae": "1"})) == ["pgae"]
