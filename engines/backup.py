"""Backup and restore: a whole database as one SQLite file, from and to either engine."""

import itertools
import os
import secrets
import shutil
import sqlite3
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

from engines.connection import Connection
from engines.database_file import DatabaseFile
from engines.engine import Engine
from engines.errors import OutcomeUnknown, Unavailable
from engines.fields import FIELDS
from engines.migrations import EMPTY, incompatibility
from engines.names import is_account_name, is_note
from engines.new_files import create_folder_of, new_file
from engines.replacement import page_size, replace
from engines.sqlite import SQLite, raise_if_full, version_of

# The columns of each table, but for what is counted. A restore fills the tables in this order:
# `part` refers to `project`; and if a Project came before its account, SQLite's trigger would
# create the account, which then could not be inserted.
COLUMNS = {
    "token": ("id", "account", "digest", "created_at", "expires_at", "note"),
    "account": ("name", "last_seq"),
    "project": (*FIELDS, "account", "seq", "key", "fingerprint"),
    "spent_key": ("account", "key", "seq"),
    "part": ("id", "project", "kind", "account"),
}
# Counts the Projects of each account, for which PostgreSQL has no triggers, and adds the accounts
# that a backup lacks. `last_seq` is never lowered: it is higher than any seq if the last Projects
# were deleted.
REBUILD_ACCOUNTS = """
    INSERT INTO account (name, last_seq, project_count)
    SELECT name, max(last_seq), sum(project_count)
    FROM (SELECT name, last_seq, 0 AS project_count FROM account
        UNION ALL SELECT account, max(seq), count(*) FROM project GROUP BY account) AS found
    WHERE true  -- or SQLite would take ON for a part of a join
    GROUP BY name
    ON CONFLICT (name) DO UPDATE
        SET last_seq = excluded.last_seq, project_count = excluded.project_count"""
# The numbers of accounts, Projects and tokens, as `Store.list_accounts` has them.
COUNTS = (
    "SELECT count(*) FROM (SELECT name FROM account UNION SELECT account FROM token) AS names",
    "SELECT coalesce(sum(project_count), 0) FROM account",
    "SELECT count(*) FROM token",
)
# The names and notes in a backup: see engines/names.py.
NAMES = """SELECT name COLLATE BINARY FROM account
    UNION SELECT account FROM token UNION SELECT account FROM project"""
NOTES = "SELECT note FROM token WHERE note IS NOT NULL"
# Gets the rows of a table, their number and its name. Returns the rows, and may show how many of
# them have been copied.
Progress = Callable[[Generator[Any], int, str], Generator[Any]]
Numbers = Sequence[int]  # of accounts, Projects and tokens


class Restored(NamedTuple):
    numbers: Numbers
    is_new: bool  # the database was missing, or on PostgreSQL had no tables
    kept: str | None = None  # the file with what was there


class BadBackup(Exception):
    """The file cannot be restored, and no row was changed."""


def without_progress(rows: Generator[Any], _count: int, _table: str) -> Generator[Any]:
    return rows


def backup(engine: Engine, path: str, progress: Progress = without_progress) -> None:
    """Write the database to a new SQLite file. Raises Unavailable."""
    path = os.path.abspath(path)
    try:
        with new_file(path) as unnamed:
            if isinstance(engine, SQLite):
                engine.save(unnamed)
            else:
                write_database(engine, progress, unnamed)
    except OSError as error:
        raise Unavailable(f"{error.strerror}: {path}") from error
    except Unavailable as error:
        raise Unavailable(f"the copy to {path} failed: {error}") from error


def restore(
    engine: Engine,
    file: str,
    progress: Progress = without_progress,
    committing: Callable[[], None] = lambda: None,
    name: str = "standard input",
) -> Restored:
    """Put a backup of this release, or of an older one, in the place of the database.

    All of its rows, or none. A missing SQLite file is created; one that is there gets new contents,
    and may be in use. A database on PostgreSQL must be empty. "-" is the standard input, which
    errors call by the name. Calls `committing` just before the change. Raises BadBackup,
    Unavailable, OutcomeUnknown.
    """
    if file != "-":
        name = file = os.path.abspath(file)
    try:
        with (
            scratch(engine.file.folder) as folder,
            checked_copy(file, folder, engine) as source,
        ):
            if not isinstance(engine, SQLite) or not isinstance(engine.file, DatabaseFile):
                # PostgreSQL, or in memory.
                is_new = engine.open_database(creates=True)
                return Restored(copy_rows(source, engine, progress, committing), is_new)
            if engine.file.is_missing():
                create_folder_of(engine.name)
                # Named when it is whole, since the service would start on an empty database.
                with new_file(engine.name) as unnamed:
                    numbers = write_database(source, progress, unnamed)
                    committing()
                return Restored(numbers, is_new=True)
            kept = f"{engine.file.folder}/{datetime.now(UTC):before-%Y-%m-%dT%H%M%S.%fZ.db}"
            with new_database(source, progress, folder, page_size(engine)) as (new, numbers):
                replace(engine, new, kept, committing)
            return Restored(numbers, is_new=False, kept=kept)
    except OSError as error:
        raise Unavailable(f"{error.strerror}: {error.filename or engine.name}") from error
    except UnicodeDecodeError as error:  # an error of SQLite whose message is not UTF-8
        raise BadBackup(f"the backup is damaged: {name}") from error
    except (BadBackup, sqlite3.Error, engine.ERROR) as error:  # or the tables refuse a row
        raise BadBackup(f"{error}: {name}") from error


@contextmanager
def checked_copy(file: str, folder: str, engine: Engine) -> Iterator[Engine]:
    """A copy of the backup in this folder, brought up to date.

    Raises OSError, BadBackup, Unavailable, sqlite3.Error.
    """
    if engine.file.is_at(0 if file == "-" else file):
        raise BadBackup("it is the database itself")
    copy = f"{folder}/copy"
    try:
        if file == "-":
            with open(0, "rb", closefd=False) as stdin, open(copy, "xb") as spooled:
                shutil.copyfileobj(stdin, spooled)
        else:
            copy_file(file, copy)
        strip(copy)
    except sqlite3.OperationalError as error:
        raise_if_full(error, copy)
        raise
    with closing(SQLite(copy)) as source:  # its first use migrates it
        require_valid_names(source)
        yield source


def write_database(source: Engine, progress: Progress, path: str) -> Numbers:
    """Copy a database to this empty file."""
    with (
        scratch(os.path.dirname(path)) as folder,
        new_database(source, progress, folder) as (new, numbers),
    ):
        new.save(path)
    return numbers


@contextmanager
def new_database(
    source: Engine, progress: Progress, folder: str, page_size: int = 4096
) -> Iterator[tuple[SQLite, Numbers]]:
    """A copy of the database in this folder, and its numbers. The engine leaves a -lock there."""
    with closing(SQLite(f"{folder}/new", page_size)) as new:
        new.open_database(creates=True)
        try:
            numbers = copy_rows(source, new, progress)
        except OutcomeUnknown as error:  # of the new database, which nobody will see
            raise Unavailable(str(error)) from error
        yield new, numbers


@contextmanager
def scratch(folder: str | None) -> Iterator[str]:
    """A temporary folder for a copy: in this folder, which has room for the data, or in TMPDIR.

    In TMPDIR if another user owns this folder: that user could replace root's temporary folder by a
    link.
    """
    is_own = folder and os.path.isdir(folder) and os.stat(folder).st_uid == os.geteuid()
    parent = folder if folder and is_own else gettempdir()
    # Named first, so that a signal that arrives as it is created leaves nothing.
    path = os.path.join(parent, f"gardening-{secrets.token_hex(8)}.partial")
    try:
        os.mkdir(path, 0o700)
        yield path
    finally:
        # A folder that is left over must not fail a restore that has committed.
        shutil.rmtree(path, ignore_errors=True)


def copy_file(path: str, to: str) -> None:
    """Copy a database that nobody may change meanwhile, without reading its schema."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # SQLite would wait for the writer of a pipe
        raise BadBackup("not a regular file")
    if not os.access(path, os.R_OK):
        raise BadBackup("this user cannot read it")
    path = os.path.realpath(path)  # which has the -wal beside it
    # SQLite would follow it (docs/design.md, What an attacker is kept from), and no backup has one.
    if os.path.lexists(f"{path}-journal"):
        raise BadBackup("there is a -journal beside it: move that away")
    with (
        closing(sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True)) as file,
        closing(sqlite3.connect(to)) as copy,
    ):
        file.execute("BEGIN")
        require_compatible(file)  # which locks it, with a timeout; backup() has none
        file.backup(copy, pages=1000, progress=lambda *_: None)  # lets signals in


def require_compatible(backup: sqlite3.Connection) -> None:
    """Raises BadBackup if this release cannot restore it."""
    version = version_of(backup)
    if version == EMPTY:
        raise BadBackup("the file is empty")
    if reason := incompatibility(version):
        raise BadBackup(f"the backup was {reason}")


def strip(path: str) -> None:
    """Check the copy of a backup, and leave only our tables: SQLite would compute the rest."""
    with closing(sqlite3.connect(path, isolation_level=None)) as copy:
        require_compatible(copy)
        # SQLite computes even as it reads a schema. Ours stays far below these limits.
        copy.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000)  # bytes of a statement or a value
        copy.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, 100)
        steps = itertools.count()
        copy.set_progress_handler(lambda: next(steps) > 10_000, 1)
        if copy.execute("PRAGMA index_list(sqlite_schema)").fetchall():  # the deletion would use it
            raise BadBackup("the backup has an index of its schema")
        copy.execute("PRAGMA writable_schema = ON")
        names = [*COLUMNS, "sqlite_sequence"]
        # SQLite ignores the `type` of a row, and believes its `sql`; it checks the names.
        copy.execute(
            f"""DELETE FROM sqlite_schema WHERE sql NOT LIKE 'CREATE TABLE %'
                OR lower(tbl_name) NOT IN ({", ".join("?" * len(names))})""",
            names,
        )
    with closing(sqlite3.connect(path)) as copy:
        copy.set_progress_handler(lambda: None, 1000)  # lets signals in
        copy.execute("PRAGMA ignore_check_constraints = ON")  # or integrity_check runs them
        for table in COLUMNS:
            for _, name, _, _, default, _, hidden in copy.execute(f"PRAGMA table_xinfo({table})"):
                # SQLite puts the default into each row that lacks the column.
                if hidden or len(default or "") > 20:
                    raise BadBackup(f"SQLite would compute the column {table}.{name}")
            [(found,), *_] = copy.execute(f"PRAGMA integrity_check({table})")
            if found != "ok":
                raise BadBackup(f"the backup is damaged, {found}")


def require_valid_names(source: Engine) -> None:
    """Raises BadBackup for the name of an account, or a note, that `token create` cannot give."""
    with source.snapshot() as reader:
        for select, is_valid in ((NAMES, is_account_name), (NOTES, is_note)):
            for (value,) in reader.stream(select):
                text = str(value)  # the tables will refuse any other type
                if not is_valid(text):
                    raise BadBackup(f"`token create` would refuse or change {text[:300]!r}")


def copy_rows(
    source: Engine,
    target: Engine,
    progress: Progress,
    committing: Callable[[], None] = lambda: None,
) -> Numbers:
    """Copy the rows of every table, in one transaction on each side.

    The Projects of each account are counted anew. Raises Unavailable unless the target is empty.
    """
    # If both are SQLite, an error of the source names the target. That is rare, since `strip`
    # has checked the source.
    with source.snapshot() as reader, target.writer(in_transaction=True) as writer:
        writer.extend_timeouts()
        require_empty(writer)  # before the lock, which would hold up the writers of a live database
        writer.lock_out_writers()
        require_empty(writer)  # another restore may have been first
        for table in COLUMNS:
            copy_table(reader, writer, table, progress)
        writer.advance_token_sequence()
        writer.fetch(REBUILD_ACCOUNTS, {})
        numbers = [int(writer.fetch(count, {})[0][0]) for count in COUNTS]
        committing()
    return numbers


def require_empty(connection: Connection) -> None:
    """Raises Unavailable if there is a row in any table."""
    for table in COLUMNS:
        if connection.fetch(f"SELECT 1 FROM {table} LIMIT 1", {}):
            raise Unavailable("the database is not empty; see docs/postgresql.md")


def copy_table(reader: Connection, writer: Connection, table: str, progress: Progress) -> None:
    """Copy the rows of a table."""
    columns = COLUMNS[table]
    [(count,)] = reader.fetch(f"SELECT count(*) FROM {table}", {})
    rows = reader.stream(f"SELECT {', '.join(columns)} FROM {table}")
    # Ends the query before its connection closes, even if a row is refused.
    with closing(rows), closing(progress(rows, count, table)) as passed_on:
        writer.insert(table, columns, passed_on)
