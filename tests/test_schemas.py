"""The shapes of what a caller may send: those of schemas.py, and openapi.json's."""

import json
from contextlib import suppress

import pytest
from marshmallow import Schema, ValidationError, fields

import schemas
from helpers.openapi import validator
from helpers.running import POINT

DESCRIBED = validator({"$ref": "#/components/schemas/ProjectInput"})


def at(*coordinates):
    return {"location": {"type": "Point", "coordinates": list(coordinates)}}


def load(body):
    """What is taken of it; the description takes it, too."""
    assert DESCRIBED.is_valid(body)
    return schemas.PROJECT.load(body)


def errors(body):
    """Why it is refused; the description refuses it, too."""
    with suppress(UnicodeEncodeError):  # a surrogate, of which it has no notion
        assert not DESCRIBED.is_valid(body)
    return errors_of(schemas.PROJECT, body)


def errors_of(schema, body):
    with pytest.raises(ValidationError) as caught:
        schema.load(body)
    return caught.value.normalized_messages()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": "Park"},
        {"name": ""},
        {"name": " Park\t", "postal_code": "\n94117 "},
        {"name": None, "postal_code": None, "location": None},
        {"name": "😀" * 255, "postal_code": "9\x01 \u2028\n" * 12},
    ],
)
def test_valid_project_comes_through_unchanged(body):
    assert load(body) == body


@pytest.mark.parametrize(
    "coordinates", [(-180, -90), (180, 90), (0, 0), (-0.0, 1e-300), (179.9999999, 1)]
)
def test_point_keeps_its_numbers(coordinates):
    loaded = load(at(*coordinates))
    assert json.loads(json.dumps(loaded)) == at(*coordinates)


@pytest.mark.parametrize("value", [None, {"a": 1}])
def test_output_only_fields_are_ignored(value):
    names = ("id", "created_at", "updated_at", "version")
    assert load(dict.fromkeys(names, value)) == {}


@pytest.mark.parametrize("body", [None, "x", []])
def test_body_that_is_no_object_is_refused(body):
    assert errors(body) == {"_schema": ["The body must be a JSON object."]}


def test_length_of_text_is_limited_in_characters():
    texts = {"name": "😀" * 255, "postal_code": "é" * 60}
    assert load(texts) == texts
    for name, text in texts.items():
        [message] = errors({name: text + "x"})[name]
        assert message == f"Longer than maximum length {len(text)}."


@pytest.mark.parametrize("value", [1, True, ["x"], "a\n\0", "\ud800", "a\udfff"])
def test_text_is_a_unicode_string(value):
    texts = {"name": value, "postal_code": value}
    assert set(errors(texts)) == set(texts)


NO_POINTS = [1, "Point", [], [-122.4, 37.7], {}, {"type": "Point"}]
NO_POINTS += [{"coordinates": [1, 2]}, POINT | {"bbox": []}, POINT | {"longitude": 1}]
NO_POINTS += [POINT | {"type": name} for name in ("point", "Polygon", None)]
NO_PAIRS = [None, "12", {"0": 1, "1": 2}, [], [1], [1, 2, 3]]
NOT_ON_EARTH = [[37.77, -122.4], [180.1, 0], [-180.1, 0], [0, 90.1], [0, -90.1]]
NOT_NUMBERS = ["1", True, None, [1], float("nan"), float("inf"), 10**400]
COORDINATES = [*NO_PAIRS, *NOT_ON_EARTH, *([number, 2] for number in NOT_NUMBERS)]


@pytest.mark.parametrize(
    "location", [*NO_POINTS, *(POINT | {"coordinates": each} for each in COORDINATES)]
)
def test_location_is_a_point_on_earth(location):
    assert list(errors({"location": location})) == ["location"]


def test_unknown_field_is_refused():
    assert list(errors({"nmae": "Park"})) == ["nmae"]


def test_every_wrong_field_is_named_at_its_place():
    body = {"name": 1, "nmae": "x"} | at("1", 91)
    found = errors(body)
    assert set(found) == {"name", "nmae", "location"}
    assert set(found["location"]["coordinates"]) == {0, 1}


def test_page_and_size_have_defaults():
    defaults = {"page": 0, "size": 20, "after": None}
    for name in defaults:
        assert schemas.PAGE.load({name: "1"}) == defaults | {name: 1}


NO_NUMBERS = ["", "-1", "1.5", "1_0", " 1", "1\n", "١", "9" * 5000]


@pytest.mark.parametrize("value", [*NO_NUMBERS, str(2**53)])
def test_page_and_after_are_numbers_from_0(value):
    query = {"page": value, "after": value}
    assert set(errors_of(schemas.PAGE, query)) == set(query)


def test_negative_number_is_refused_for_its_sign():
    message = "Write a whole number with the digits 0-9 only."
    assert errors_of(schemas.PAGE, {"page": "-1"}) == {"page": [message]}


@pytest.mark.parametrize("value", [*NO_NUMBERS, "0", "101"])
def test_size_is_a_number_from_1_to_100(value):
    assert list(errors_of(schemas.PAGE, {"size": value})) == ["size"]


@pytest.mark.parametrize(
    ("coordinates", "message"),
    [("12", ["Not a valid array."]), ([float("inf"), 0], {0: ["Must be a finite number."]})],
)
def test_refusal_of_coordinates_is_in_the_callers_terms(coordinates, message):
    """Without a word of Python, such as tuple."""
    location = POINT | {"coordinates": coordinates}
    found = errors({"location": location})
    assert found == {"location": {"coordinates": message}}


def test_schema_of_another_program_in_the_process_may_have_the_name_of_one_of_ours():
    ours = {name for name, kind in vars(schemas).items() if isinstance(kind, type(Schema))}
    for name in ours - {"Schema"}:
        theirs = type(name, (Schema,), {})
        assert isinstance(fields.Nested(name).schema, theirs)
