"""Backup and restore: a whole database as one SQLite file, from and to either engine.

It copies rows and knows no rule of the store. A file to restore may come from anywhere:
its rows pass through tables of our own, and nothing in it becomes part of a statement.
"""

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from engines import tables
from engines.base import LONG, Engine, Unavailable
from engines.files import new_file
from engines.sqlite import OUTAGE, SQLite

if TYPE_CHECKING:  # psycopg may not be installed
    from engines.postgres import PostgreSQL

# The layouts that added these; all else has been there since layout 1.
ADDED = {"idempotency_key": 2, "account.created": 2, "account.projects": 3}
END = 253_402_300_799_999  # of the year 9999, in epoch milliseconds
# Of what is counted: low enough to go on counting below 2**53, from where on JSON readers
# lose exactness.
MAX = 2**52
LONGEST = (
    1300  # bytes of a text: an index of PostgreSQL takes 2,704, and one has two texts
)
CONTROL = "'*[\x01-\x1f\x7f-\x9f]*'"
# What breaks a rule that the tables themselves do not enforce.
FAULTS = {
    "the location of a Project is no GeoJSON Point": """
        SELECT id FROM project
        WHERE location IS NOT NULL AND CASE WHEN json_valid(location) THEN
            json_extract(location, '$.type') IS 'Point'
            AND (SELECT count(*) FROM json_each(location)) IS 2
            AND json_array_length(location, '$.coordinates') IS 2
            AND json_type(location, '$.coordinates[0]') IN ('integer', 'real')
            AND json_type(location, '$.coordinates[1]') IN ('integer', 'real')
            END IS NOT 1""",
    "the revision of an account is not made of letters and digits": """
        SELECT name FROM account WHERE revision = '' OR revision GLOB '*[^0-9A-Za-z]*'
            OR length(revision) <> length(CAST(revision AS BLOB))""",
    "a name, a key or an ID is too long, or holds a control character": f"""
        WITH text (text) AS (SELECT name FROM account UNION SELECT account FROM token
            UNION SELECT account FROM project UNION SELECT id FROM project
            UNION SELECT id FROM part UNION SELECT kind FROM part
            UNION SELECT account FROM idempotency_key
            UNION SELECT key FROM idempotency_key
            UNION SELECT project FROM idempotency_key)
        SELECT text FROM text
        WHERE length(CAST(text AS BLOB)) > {LONGEST}
            OR text GLOB {CONTROL} OR instr(text, char(0))""",
    "a number is too small or too large": f"""
        SELECT name FROM account WHERE created NOT BETWEEN 0 AND {MAX}
        UNION SELECT id FROM project
        WHERE seq NOT BETWEEN 1 AND {MAX} OR version NOT BETWEEN 1 AND {MAX}
        UNION SELECT id FROM token WHERE id < 1
        UNION SELECT name FROM sqlite_sequence WHERE seq NOT BETWEEN 0 AND {MAX}""",
    "an account has the wrong count of its Projects": """
        SELECT known.name
        FROM (SELECT name FROM account UNION SELECT account FROM project) AS known
        LEFT JOIN account ON account.name = known.name
        LEFT JOIN project ON project.account = known.name
        GROUP BY known.name
        HAVING projects IS NOT count(seq) OR created < max(seq)""",
    "a token has an ID above the last one": """
        SELECT id FROM token
        WHERE id > (SELECT seq FROM sqlite_sequence WHERE name = 'token')""",
    "a time is not between the years 1970 and 9999": f"""
        SELECT id FROM token
        WHERE created_at NOT BETWEEN 0 AND {END} OR expires_at NOT BETWEEN 0 AND {END}
        UNION SELECT id FROM project
        WHERE created_at NOT BETWEEN 0 AND {END} OR updated_at NOT BETWEEN 0 AND {END}""",
}
# SQLite's errors that are the file's fault, and not that of the database to fill.
BAD_FILE = (sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class BadBackup(Exception):
    """The file is not a complete backup of this service; nothing was restored."""


def backup(engine: Engine, path: str) -> None:
    """Write a copy of this moment to a new file. Raises OSError, Unavailable."""
    with new_file(path) as unnamed:
        try:
            if isinstance(engine, SQLite):
                with closing(engine.connect()) as source:
                    vacuum_into(unnamed, source)
            else:
                with closing(scratch()) as copy:
                    fetch(cast("PostgreSQL", engine), copy)
                    vacuum_into(unnamed, copy)
        except sqlite3.Error as error:
            check_outage(error, f"while copying to {path}")
            raise


def restore(engine: Engine, path: str) -> None:
    """Fill an empty database with such a copy: all of it, or nothing.

    Raises BadBackup, and Unavailable, also if the database is not empty.
    """
    with engine.begin(engine.BEGIN_FILL, LONG) as target:
        for table in tables.COLUMNS:
            if target.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchall():
                raise Unavailable("the database to fill is not empty")
        for sql in engine.STOP_TRIGGERS:  # they would count the Projects once more
            target.execute(sql)
        try:
            if isinstance(engine, SQLite):
                load(target, path)
            else:
                with closing(scratch()) as copy:
                    load(copy, path)
                    check_for_nul(copy)
                    send(copy, cast("PostgreSQL", engine), target)
        except BadBackup as error:
            raise BadBackup(f"{' '.join(str(error).split())}: {path}") from error
        except sqlite3.Error as error:
            check_outage(error, f"while copying from {path}")
            raise
        for sql in engine.START_TRIGGERS:
            target.execute(sql)
    engine.close()  # a connection that has the file attached is not for others


def check_outage(error: sqlite3.Error, when: str) -> None:
    """Raises Unavailable, unless the error is a defect."""
    name = getattr(error, "sqlite_errorname", "")
    if OUTAGE.match(name) or name == "SQLITE_INTERRUPT":  # by a signal
        raise Unavailable(f"{error}: {when}") from error


def scratch() -> sqlite3.Connection:
    """A database with our tables, in a temporary file that nothing can leave behind."""
    connection = sqlite3.connect("", uri=True, isolation_level=None)
    connection.executescript(SQLite.TABLES + ";".join(SQLite.STOP_TRIGGERS))
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def select_all(table: str) -> str:
    return f"SELECT {', '.join(tables.COLUMNS[table])} FROM {table}"


def send(copy: sqlite3.Connection, engine: "PostgreSQL", target: Any) -> None:
    """Fill the tables of the target with what the copy holds."""
    for table, columns in tables.COLUMNS.items():
        engine.fill(target, table, columns, copy.execute(select_all(table)))
    [(last,)] = copy.execute(SQLite.LAST_TOKEN).fetchall()
    for sql in engine.SET_LAST_TOKEN:
        engine.execute(target, sql, {"last": last})


def fetch(engine: "PostgreSQL", copy: sqlite3.Connection) -> None:
    """Fill the copy with what the engine holds at this moment."""
    with engine.begin(engine.BEGIN_COPY, LONG, writes=False) as source:
        copy.execute("BEGIN")
        for table, columns in tables.COLUMNS.items():
            names, marks = ", ".join(columns), ", ".join("?" * len(columns))
            insert = f"INSERT INTO {table} ({names}) VALUES ({marks})"
            with closing(engine.select(source, select_all(table))) as rows:
                copy.executemany(insert, rows)
        [(last,)] = source.execute(engine.LAST_TOKEN).fetchall()
        for sql in SQLite.SET_LAST_TOKEN:
            copy.execute(sql, {"last": last})
        for sql in SQLite.START_TRIGGERS:
            copy.execute(sql)
        copy.execute(f"PRAGMA user_version = {tables.LAYOUT}")
        copy.execute("COMMIT")


def vacuum_into(path: str, source: sqlite3.Connection) -> None:
    # Python handles signals only between its own instructions. Without a handler in
    # Python, SIGTERM would wait for the whole copy.
    source.set_progress_handler(lambda: None, 100_000)
    source.execute("VACUUM INTO ?", [uri(path)])


def uri(path: str) -> str:
    """The URI of a file, also for a connection to a database in memory."""
    return f"{Path(path).absolute().as_uri()}?vfs=unix"


def load(target: sqlite3.Connection, path: str) -> None:
    """Insert all rows of the file, once it has proved to be a complete backup."""
    try:
        layout = attach(target, path)
        for table in tables.COLUMNS:
            if columns := check_table(target, table, layout):
                target.execute(
                    f"""INSERT INTO main.{table} ({", ".join(columns)})
                    SELECT {", ".join(columns)} FROM backup.{table}"""
                )
        # Layout 1 counted neither, and layout 2 only the Projects ever created.
        for sql in (tables.COUNT_CREATED, tables.COUNT_PROJECTS)[layout - 1 :]:
            target.execute(sql)
        load_last_token(target)
        check_rows(target)
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without its extension
        if code in BAD_FILE:
            raise BadBackup(str(error)) from error
        raise


def attach(target: sqlite3.Connection, path: str) -> int:
    """Attach the file, if it is sound and a release up to this one made it.

    Returns its layout.
    """
    if not os.path.isfile(path):  # SQLite would wait for the writer of a pipe
        raise BadBackup("the file cannot be opened")
    # No function with an effect runs in a view, an index or a default of the file.
    target.execute("PRAGMA trusted_schema = OFF")
    try:
        target.execute("ATTACH ? AS backup", [f"{uri(path)}&mode=ro"])
        [(application,)] = target.execute("PRAGMA backup.application_id").fetchall()
        [(layout,)] = target.execute("PRAGMA backup.user_version").fetchall()
        if application != tables.APPLICATION_ID or layout < 1:
            raise BadBackup("this is no backup of the service")
        if layout > tables.LAYOUT:
            raise BadBackup("a newer release made this backup")
        [(found,)] = target.execute("PRAGMA backup.integrity_check(1)").fetchall()
    except sqlite3.Error as error:
        reason = str(error)
        if "unable to open" in reason:  # where SQLite's text quotes the URI
            reason = "the file cannot be opened"
        raise BadBackup(reason) from error
    if found != "ok":
        raise BadBackup(f"the backup is damaged, {found}")
    return int(layout)


def columns_in(target: sqlite3.Connection, table: str) -> set[str]:
    """Those of a table of the backup: no view or virtual table, no computed column."""
    rows = target.execute(
        """SELECT c.name FROM backup.sqlite_schema AS t, pragma_table_xinfo(t.name, 'backup') AS c
        WHERE t.name = ? AND t.type = 'table' AND rootpage > 0 AND hidden = 0""",
        [table],
    )
    return {name for (name,) in rows}


def check_table(target: sqlite3.Connection, table: str, layout: int) -> list[str]:
    """The columns that the table has in a backup of this layout; none if it had none."""
    if ADDED.get(table, 1) > layout:
        return []
    names = [n for n in tables.COLUMNS[table] if ADDED.get(f"{table}.{n}", 1) <= layout]
    if columns_in(target, table) != set(names):
        raise BadBackup(f"{table} has other columns than {', '.join(names)}")
    return names


def load_last_token(target: sqlite3.Connection) -> None:
    if columns_in(target, "sqlite_sequence") != {"name", "seq"}:
        raise BadBackup("the last ID of a token is missing")
    query = "SELECT seq, typeof(seq) FROM backup.sqlite_sequence WHERE name = 'token'"
    for last, kind in target.execute(query).fetchall():
        if kind != "integer":
            raise BadBackup("the last ID of a token is no integer")
        for sql in SQLite.SET_LAST_TOKEN:
            target.execute(sql, {"last": last})


def check_rows(target: sqlite3.Connection) -> None:
    for table in tables.COLUMNS:
        try:
            for _ in target.execute(select_all(table)):
                pass
        except sqlite3.OperationalError as error:
            # Python's own error, for text that is not UTF-8, has no code of SQLite.
            if hasattr(error, "sqlite_errorcode"):
                raise
            raise BadBackup(f"{table} holds text that is not UTF-8") from error
    for fault, sql in FAULTS.items():
        if row := target.execute(f"{sql} LIMIT 1").fetchone():
            raise BadBackup(f"{fault} ({row[0]!r})")


def check_for_nul(copy: sqlite3.Connection) -> None:
    """PostgreSQL cannot hold U+0000, which release 1.0 took."""
    condition = " OR ".join(f"instr({name}, char(0))" for name in tables.SETTABLE)
    sql = f"SELECT id FROM project WHERE {condition} LIMIT 1"
    if row := copy.execute(sql).fetchone():
        fault = "U+0000, which PostgreSQL cannot hold, is in the Project"
        raise BadBackup(f"{fault} {row[0]!r}")
