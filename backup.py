"""Backup and restore: a whole database as one SQLite file, from and to either engine.

It copies rows and knows no rule of the store. A file to restore may come from anywhere:
its rows pass through tables of our own, and nothing in it becomes part of a statement.
"""

import errno
import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from store import (
    APPLICATION_ID,
    COLUMNS_OF,
    COUNT_CREATED,
    COUNT_PROJECTS,
    LAYOUT,
    LONG,
    PATIENCE,
    Engine,
    SQLite,
    Unavailable,
    create,
    give_to_owner,
    locked,
)

PARTIAL = ".gardening-partial"  # a folder in which a backup is written
# The layouts that added these; all else has been there since layout 1.
ADDED = {"idempotency_key": 2, "account.created": 2, "account.projects": 3}
# What breaks a rule that the tables themselves do not hold.
FAULTS = {
    "the location of a Project is not JSON": """
        SELECT id FROM project WHERE location IS NOT NULL AND NOT json_valid(location)""",
    "an account does not count its Projects": """
        SELECT project.account FROM project
        LEFT JOIN account ON account.name = project.account
        GROUP BY project.account
        HAVING projects IS NOT count(*) OR created < max(seq)""",
}
# Of SQLite, where the file is to blame and not the database that is filled.
BAD_FILE = (sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class BadBackup(Exception):
    """The file is no whole backup of this service; nothing was restored."""


def backup(engine: Engine, path: str) -> None:
    """Write a copy of this moment to a new file. Raises OSError, Unavailable."""
    with new_file(path) as unnamed:
        try:
            if isinstance(engine, SQLite):
                with closing(engine.connect()) as source:
                    write(source, unnamed)
            else:
                with closing(scratch()) as copy:
                    fetch(engine, copy)
                    write(copy, unnamed)
        except sqlite3.Error as error:
            raise Unavailable(f"{error}: while writing {path}") from error


def restore(engine: Engine, path: str) -> None:
    """Fill an empty database with such a copy: all of it, or nothing.

    Raises BadBackup, and Unavailable, also if the database is not empty.
    """
    with engine.session(engine.BEGIN_FILL, LONG) as target:
        for table in COLUMNS_OF:
            if target.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchall():
                raise Unavailable("the database to fill is not empty")
        for sql in engine.STOP_TRIGGERS:  # they would count the Projects once more
            target.execute(sql)
        if isinstance(engine, SQLite):
            load(target, path)
        else:
            with closing(scratch()) as copy:
                load(copy, path)
                check_for_nul(copy, path)
                for table, columns in COLUMNS_OF.items():
                    engine.fill(target, table, columns, copy.execute(select(table)))
                [(last,)] = copy.execute(SQLite.LAST_TOKEN).fetchall()
                for sql in engine.SET_LAST_TOKEN:
                    engine.execute(target, sql, {"last": last})
        for sql in engine.START_TRIGGERS:
            target.execute(sql)


def scratch() -> sqlite3.Connection:
    """A database with our tables, in a temporary file that nothing can leave behind."""
    connection = sqlite3.connect("", uri=True, isolation_level=None)
    connection.executescript(SQLite.TABLES + ";".join(SQLite.STOP_TRIGGERS))
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def select(table: str) -> str:
    return f"SELECT {', '.join(COLUMNS_OF[table])} FROM {table}"


def fetch(engine: Engine, copy: sqlite3.Connection) -> None:
    """Fill the copy with what the engine holds at this moment."""
    with engine.session(engine.BEGIN_READ, LONG) as source:
        copy.execute("BEGIN")
        for table, columns in COLUMNS_OF.items():
            with closing(engine.read(source, select(table))) as rows:
                names, marks = ", ".join(columns), ", ".join("?" * len(columns))
                copy.executemany(
                    f"INSERT INTO {table} ({names}) VALUES ({marks})", rows
                )
        [(last,)] = source.execute(engine.LAST_TOKEN).fetchall()
        for sql in SQLite.SET_LAST_TOKEN:
            copy.execute(sql, {"last": last})
        for sql in SQLite.START_TRIGGERS:
            copy.execute(sql)
        copy.execute(f"PRAGMA user_version = {LAYOUT}")
        copy.execute("COMMIT")


def write(source: sqlite3.Connection, path: str) -> None:
    # Signals are handled in Python code, of which a statement that takes long has none.
    source.set_progress_handler(lambda: None, 100_000)
    source.execute("VACUUM INTO ?", [path])


def load(target: sqlite3.Connection, path: str) -> None:
    """Insert all rows of the file, once it has proved to be a whole backup."""
    try:
        target.execute(
            "PRAGMA trusted_schema = OFF"
        )  # of the file's views and defaults
        uri = f"{Path(path).absolute().as_uri()}?mode=ro"
        target.execute("ATTACH ? AS backup", [uri])
        layout = check_header(target, path)
        for table in COLUMNS_OF:
            if columns := check_table(target, table, layout, path):
                target.execute(
                    f"""INSERT INTO main.{table} ({", ".join(columns)})
                    SELECT {", ".join(columns)} FROM backup.{table}"""
                )
        for sql in (COUNT_CREATED, COUNT_PROJECTS)[layout - 1 :]:
            target.execute(sql)
        load_last_token(target, path)
        check_rows(target, path)
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without its extension
        if code == sqlite3.SQLITE_CANTOPEN:
            raise BadBackup(f"the file cannot be opened: {path}") from error
        if code in BAD_FILE:
            raise BadBackup(f"{error}: {path}") from error
        raise


def check_header(target: sqlite3.Connection, path: str) -> int:
    """The layout of the file, if that is sound and a release up to this one made it."""
    [(application,)] = target.execute("PRAGMA backup.application_id").fetchall()
    [(layout,)] = target.execute("PRAGMA backup.user_version").fetchall()
    if application != APPLICATION_ID or layout < 1:
        raise BadBackup(f"this is no backup of the service: {path}")
    if layout > LAYOUT:
        raise BadBackup(f"a newer release made this backup: {path}")
    [(found,)] = target.execute("PRAGMA backup.integrity_check(1)").fetchall()
    if found != "ok":
        raise BadBackup(f"the backup is damaged, {' '.join(found.split())}: {path}")
    return int(layout)


def check_table(
    target: sqlite3.Connection, table: str, layout: int, path: str
) -> list[str]:
    """The columns that the table has in a backup of this layout; none if it had none."""
    if ADDED.get(table, 1) > layout:
        return []
    names = [n for n in COLUMNS_OF[table] if ADDED.get(f"{table}.{n}", 1) <= layout]
    found = target.execute(  # neither views, nor virtual tables, nor computed columns
        """SELECT c.name FROM backup.sqlite_schema AS t, pragma_table_xinfo(t.name, 'backup') AS c
        WHERE t.name = ? AND t.type = 'table' AND rootpage > 0 AND hidden = 0""",
        [table],
    ).fetchall()
    if {name for (name,) in found} != set(names):
        raise BadBackup(f"{table} has other columns than {', '.join(names)}: {path}")
    return names


def load_last_token(target: sqlite3.Connection, path: str) -> None:
    sql = "SELECT seq, typeof(seq) FROM backup.sqlite_sequence WHERE name = 'token'"
    for last, kind in target.execute(sql).fetchall():
        if kind != "integer":
            raise BadBackup(f"the last ID of a token is no integer: {path}")
        for sql in SQLite.SET_LAST_TOKEN:
            target.execute(sql, {"last": last})


def check_rows(target: sqlite3.Connection, path: str) -> None:
    for fault, sql in FAULTS.items():
        for (name,) in target.execute(f"{sql} LIMIT 1").fetchall():
            raise BadBackup(f"{fault} ({name!r}): {path}")
    for table in COLUMNS_OF:
        try:
            for _ in target.execute(select(table)):
                pass
        except sqlite3.OperationalError as error:
            if hasattr(error, "sqlite_errorcode"):
                raise
            raise BadBackup(f"{table} holds text that is not UTF-8: {path}") from error


def check_for_nul(copy: sqlite3.Connection, path: str) -> None:
    """PostgreSQL cannot hold U+0000, which release 1.0 took."""
    for table, columns in COLUMNS_OF.items():
        texts = [name for name in columns if name != "digest"]
        condition = " OR ".join(f"instr({name}, char(0))" for name in texts)
        sql = f"SELECT {columns[0]} FROM {table} WHERE {condition} LIMIT 1"
        for (name,) in copy.execute(sql).fetchall():
            fault = "U+0000, which PostgreSQL cannot hold, is in the"
            raise BadBackup(f"{fault} {table} {name!r}: {path}")


@contextmanager
def new_file(path: str) -> Iterator[str]:
    """The path of an empty file, which gets the name `path` once it is written whole.

    It lies in a locked folder, so the next backup can tell and remove what a killed one
    has left. Raises OSError with `path`, and Unavailable.
    """
    parent, folder = os.path.dirname(os.path.abspath(path)), path + PARTIAL
    file = os.path.join(folder, "backup.db")
    try:
        os.stat(parent)
        with locked(parent, time.monotonic() + PATIENCE):
            for left in Path(parent).glob(f"*{PARTIAL}"):
                with suppress(OSError), claimed(left):
                    shutil.rmtree(left)
            if os.path.lexists(path) or os.path.lexists(folder):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            os.mkdir(folder, mode=0o700)
            give_to_owner(folder)
            claim = ExitStack()
            claim.enter_context(claimed(folder))
        with claim:
            try:
                create(file)
                yield file
                sync(file)
                os.rename(file, path)
                sync(parent)
            finally:
                shutil.rmtree(folder)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, path) from error


@contextmanager
def claimed(folder: str | Path) -> Iterator[None]:
    """Hold an flock on the folder. Raises BlockingIOError if another process has it."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def sync(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
