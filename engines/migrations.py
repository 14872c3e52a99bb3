"""The schema version of a database, and what leads from each version to the next.

The text of a migration that was released is frozen: it takes nothing from other modules, and no
later change of a table touches it.
"""

from collections.abc import Mapping, Sequence

APPLICATION_ID = 0x6770726A  # "gprj": marks a database as ours
SCHEMA_VERSION = 1  # of the tables in sqlite.sql and postgresql.sql
# In the place of a schema version:
EMPTY = 0  # the database has no tables
FOREIGN = -1  # it is not marked as ours

# The statements of each migration, by the version that they lead to. PostgreSQL runs them one by
# one, since Citus refuses several at once on a table that is spread over the cluster.
Migrations = Mapping[int, Sequence[str]]
SQLITE: Migrations = {}
POSTGRESQL: Migrations = {}


def incompatibility(version: int) -> str | None:
    """Why this release cannot use a database, to follow "it was"; None if it can."""
    if version == FOREIGN:
        return "made by another program, or copied by one that dropped its mark"
    if version > SCHEMA_VERSION:
        return "made by a newer release"
    return None
