"""The shapes of what a caller sends: the body of a Project and the query of a list.

It knows no request and no database. What it lets through is used as it is.
"""

from functools import partial

from marshmallow import Schema, fields, missing, validate

MAX_PAGE = 2**53 - 1  # the largest integer that every JSON reader keeps (RFC 7493 2.2)
MAX_SIZE = 1000  # Projects


class OutputOnly(fields.Field):
    """A member that the service sets: accepted with any value, and ignored (AIP-203)."""

    def deserialize(self, *args, **kwargs):
        return missing


class Number(fields.Float):
    """A finite JSON number, and no string that looks like one."""

    def _deserialize(self, value, *args, **kwargs):
        if isinstance(value, str):
            raise self.make_error("invalid", input=value)
        return super()._deserialize(value, *args, **kwargs)


unicode = validate.Regexp(
    "[^\ud800-\udfff]*$", error="A lone surrogate cannot be encoded as UTF-8."
)
Text = partial(fields.String, allow_none=True, validate=unicode)


def degrees(limit):
    return Number(validate=validate.Range(-limit, limit))


class PointSchema(Schema):
    """A GeoJSON Point (RFC 7946 3.1.1 and 3.1.2): the longitude, then the latitude."""

    type = fields.String(required=True, validate=validate.Equal("Point"))
    coordinates = fields.Tuple((degrees(180), degrees(90)), required=True)


class ProjectSchema(Schema):
    id = OutputOnly()
    name = Text()
    created_at = OutputOnly()
    updated_at = OutputOnly()
    version = OutputOnly()
    postal_code = Text()
    location = fields.Nested(PointSchema, allow_none=True)


class PageSchema(Schema):
    """The query of a list in pages; one of the two members is enough."""

    page = fields.Integer(validate=validate.Range(0, MAX_PAGE), load_default=0)
    size = fields.Integer(validate=validate.Range(1, MAX_SIZE), load_default=20)


project = ProjectSchema()
page = PageSchema()
