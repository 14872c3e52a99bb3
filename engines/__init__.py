"""The databases that can keep the Projects: one SQLite file, or PostgreSQL."""

import re

from engines.engine import Engine
from engines.sqlite import SQLite


def engine_on(database: str, default: str) -> Engine:
    """The engine on the database that a setting names, or on the file at `default`.

    Raises ValueError for a setting that names none, or if its driver is missing.
    """
    if database != database.strip():
        raise ValueError("GARDENING_DATABASE must not start or end with whitespace")
    if not database:
        return SQLite(default)
    if database.startswith("postgresql://"):
        try:
            from engines.postgres import PostgreSQL
        except ImportError as error:
            needed = "install psycopg[binary], or this package with the extra postgres"
            raise ValueError(f"for PostgreSQL, {needed}") from error
        return PostgreSQL(database)
    if database.startswith("~"):  # only a shell knows whose folder this is
        raise ValueError("GARDENING_DATABASE must not start with ~: write the whole path")
    # As a path, this would put a password into the name of a file, and into the log.
    if re.search("://|password=|^postgres.*[:@]", database):
        forms = "a path, such as ./gardening.db, or a URL that starts with postgresql://"
        raise ValueError(f"GARDENING_DATABASE must be {forms}")
    return SQLite(database)
