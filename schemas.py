"""The shapes of what a caller sends: the body of a Project and the query of a list."""

import re
from typing import Any, ClassVar

from marshmallow import Schema, ValidationError, fields, missing, validate

from engines.fields import READ_ONLY

# For `page` and `after`: the largest integer that every JSON reader keeps exactly (RFC 7493 2.2).
# Times MAX_SIZE it stays below 2**63, the limit of a database's OFFSET.
MAX_PAGE = 2**53 - 1
MAX_SIZE = 100  # Projects
NOT_AN_OBJECT = {"type": "The body must be a JSON object."}
# "special" is marshmallow's key for NaN and the infinities.
NOT_FINITE: dict[str, Any] = {"special": "Must be a finite number."}


class OutputOnly(fields.Raw):
    """Set by the service: taken and ignored (AIP-203); dump_only would refuse it.

    It overrides `deserialize`, so null and missing are ignored as well.
    """

    def deserialize(self, *args: Any, **kwargs: Any) -> Any:
        return missing


class Degrees(fields.Float):
    """A finite JSON number, and no string that looks like one."""

    default_error_messages = NOT_FINITE

    def _deserialize(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, str):
            raise self.make_error("invalid", input=value)
        return super()._deserialize(value, *args, **kwargs)


class Digits(fields.Integer):
    """An integer written with the digits 0-9 only: no sign, space or underscore."""

    def _deserialize(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not re.fullmatch("[0-9]+", str(value)):
            raise ValidationError("Write a whole number with the digits 0-9 only.")
        return super()._deserialize(value, *args, **kwargs)


STORABLE = validate.Regexp(
    "[^\0\ud800-\udfff]*$", error="U+0000 and lone surrogates cannot be stored."
)


def text(max_length: int) -> fields.String:
    """Text of at most this many code points, or null."""
    limit = validate.Length(max=max_length)
    return fields.String(allow_none=True, validate=[limit, STORABLE])


class PointSchema(Schema):
    """A GeoJSON Point (RFC 7946 3.1.1 and 3.1.2): the longitude, then the latitude."""

    class Meta:
        register = False  # a team's own schemas share marshmallow's registry with the service

    type = fields.String(required=True, validate=validate.Equal("Point"))
    coordinates = fields.Tuple(
        (Degrees(validate=validate.Range(-180, 180)), Degrees(validate=validate.Range(-90, 90))),
        required=True,
        error_messages={"invalid": "Not a valid array."},
    )


class ProjectSchema(Schema):
    class Meta:
        register = False
        include: ClassVar = {name: OutputOnly() for name in READ_ONLY}

    error_messages = NOT_AN_OBJECT

    # OpenStreetMap limits a name to 255 characters, PayPal a postal code to 60. A whole list is
    # built in memory, and holds up to 10,000 of each.
    name = text(255)
    postal_code = text(60)
    location = fields.Nested(PointSchema, allow_none=True)


class PageSchema(Schema):
    """The query of a list in pages; any one of the fields is enough."""

    class Meta:
        register = False

    page = Digits(validate=validate.Range(0, MAX_PAGE), load_default=0)
    size = Digits(validate=validate.Range(1, MAX_SIZE), load_default=20)
    after = Digits(validate=validate.Range(0, MAX_PAGE), load_default=None)


PROJECT = ProjectSchema()
PAGE = PageSchema()
NO_QUERY = Schema()
