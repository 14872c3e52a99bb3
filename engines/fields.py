"""The fields of a Project: their order, their types, and who sets them.

The SQL of documents and of changes is made from this table. CONTRIBUTING.md says how to add one.
"""

from typing import NamedTuple

TEXT, INTEGER, JSON = "text", "integer", "JSON"  # the database keeps JSON as its text
CALLER, SERVICE = "caller", "service"


class Field(NamedTuple):
    type: str
    set_by: str


# In the order of a Project's document.
FIELDS = {
    "id": Field(TEXT, SERVICE),
    "name": Field(TEXT, CALLER),
    "created_at": Field(INTEGER, SERVICE),
    "updated_at": Field(INTEGER, SERVICE),
    "version": Field(INTEGER, SERVICE),
    "postal_code": Field(TEXT, CALLER),
    "location": Field(JSON, CALLER),
}
SETTABLE = {name: field.type for name, field in FIELDS.items() if field.set_by == CALLER}
READ_ONLY = [name for name, field in FIELDS.items() if field.set_by == SERVICE]
