"""Copy a SQLite file of the service into an empty PostgreSQL database.

    FLASK_DATABASE=postgresql://… python migrate.py instance/gardening.db

It runs in one transaction on each side: the target gets everything or stays empty.
"""

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg

from postgres import PostgreSQL, one_line
from store import APPLICATION_ID, FOREIGN, LAYOUT, Store, Unavailable

SELECTS = {  # what the file holds for each table, with the table's columns
    "account": """SELECT name, revision, (SELECT ifnull(max(seq), 0) FROM project
        WHERE account = account.name) AS created FROM account""",
    "token": "SELECT id, account, digest, created_at, expires_at FROM token",
    "project": """SELECT id, account, seq, name, created_at, updated_at, version,
        postal_code, json(location) AS location FROM project""",
    "part": "SELECT id, project, kind FROM part",
}


def migrate(file: str, url: str) -> str:
    uri = f"{Path(file).absolute().as_uri()}?mode=rw"  # rw: it creates none
    with closing(sqlite3.connect(uri, isolation_level=None, uri=True)) as source:
        layout = "SELECT * FROM pragma_application_id, pragma_user_version"
        if source.execute(layout).fetchall() != [(APPLICATION_ID, LAYOUT)]:
            raise Unavailable(f"the file was {FOREIGN}")
        with closing(Store(PostgreSQL(url))) as store:
            store.list_tokens()  # on its first use it creates the tables
        source.execute("BEGIN")
        with psycopg.connect(url, target_session_attrs="read-write") as target:
            target.execute("LOCK account, token, project, part NOWAIT")
            counts = [copy(source, target, *select) for select in SELECTS.items()]
            [(last,)] = source.execute("SELECT max(seq) FROM sqlite_sequence")
            restart = b"ALTER TABLE token ALTER id RESTART WITH %d"
            target.execute(restart % ((last or 0) + 1))
    return "Copied {} accounts, {} tokens, {} Projects and {} parts.".format(*counts)


def copy(source: Any, target: Any, table: str, select: str) -> int:
    if target.execute(f"SELECT FROM {table} LIMIT 1").rowcount:
        raise Unavailable("the target is not empty")
    rows = source.execute(select)
    columns = ", ".join(column for column, *_ in rows.description)
    cursor = target.cursor()
    with cursor.copy(f"COPY {table} ({columns}) FROM STDIN") as stream:
        for row in rows:
            # An older release took U+0000, which PostgreSQL cannot hold.
            clean = [v.replace("\0", "\ufffd") if type(v) is str else v for v in row]
            if clean != list(row):
                print(f"Project {row[0]}: U+0000 is now U+FFFD", file=sys.stderr)
            stream.write_row(clean)
    return int(cursor.rowcount)


if __name__ == "__main__":
    url = os.environ.get("FLASK_DATABASE", "")
    if len(sys.argv) != 2 or not url.startswith("postgresql://"):
        sys.exit(__doc__)
    try:
        print(migrate(sys.argv[1], url))
    except (Unavailable, sqlite3.Error, psycopg.Error) as error:
        sys.exit(f"Error: {one_line(error)}")
