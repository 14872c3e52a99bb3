"""The engine on one SQLite file, or in memory.

It holds what differs from PostgreSQL. That includes how a change of a Project raises its version,
tests the precondition and, by triggers, updates the account. Threads and processes may share a
file, and a write that has returned is on the disk.
"""

import os
import re
import secrets
import sqlite3
import threading
import time
import weakref
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from engines import base, migrations
from engines.base import EMPTY, Engine, OutcomeUnknown, Parameters, Rows, Unavailable
from engines.fields import FIELDS, JSON, SETTABLE
from engines.files import DatabaseFile

WRITE_LOCK_TIMEOUT = 2.5  # seconds that a writer waits for others of the service
FOREIGN_LOCK_TIMEOUT = 1.0  # seconds that anybody waits for another program's lock
OUTAGE = re.compile(  # what an operator can mend, or a retry can get past
    "SQLITE_(BUSY|LOCKED|READONLY|IOERR|CORRUPT|FULL|CANTOPEN|PROTOCOL|NOTADB)"
)


def document_sql() -> str:
    """The SQL of a Project's JSON document."""
    parts = []
    for name, field in FIELDS.items():
        value = f"json({name})" if field.type == JSON else name
        parts.append(f"'{name}', {value}")
    return f"json_object({', '.join(parts)})"


DOCUMENT = document_sql()
ETAG = "(version || '-' || updated_at)"
ID_ETAG_DOCUMENT = f"id, {ETAG}, CAST({DOCUMENT} AS BLOB)"
PROJECT_IF_ALLOWED = f"""id = :id AND account = :account
    AND (:if_match IS NULL OR {ETAG} IN (SELECT value FROM json_each(:if_match)))
    AND (:if_none_match IS NULL
        OR {ETAG} NOT IN (SELECT value FROM json_each(:if_none_match)))"""


class SQLite(Engine):
    """One file, or a private database in memory."""

    SCHEMA = "sqlite.sql"
    MIGRATIONS = migrations.SQLITE
    GET = (
        f"SELECT {ID_ETAG_DOCUMENT} FROM project WHERE id = :id AND account = :account"
    )
    DELETE = f"DELETE FROM project WHERE {PROJECT_IF_ALLOWED} RETURNING id"
    # json_group_array keeps the order of the rows of its subquery.
    LIST = f"""SELECT (SELECT list_revision FROM account WHERE name = :account),
            (SELECT project_count FROM account WHERE name = :account),
            nullif(max(seq), (SELECT max(seq) FROM project WHERE account = :account))
                AS next_after,
            CAST(json_group_array({DOCUMENT}) AS BLOB)
        FROM (SELECT * FROM project WHERE account = :account AND seq > :after
            ORDER BY seq LIMIT :size OFFSET :offset)"""
    ERROR = sqlite3.Error

    def __init__(self, path: str, is_default: bool = False) -> None:
        """On the file at `path`; `:memory:` is a private database, which has its tables.

        The folder of the default database is created along with it.
        """
        super().__init__()
        self.is_default = is_default
        self._thread_lock = threading.Lock()  # for the writers of this process
        self._process: int | None = None  # the one that opened the file
        self._is_up_to_date = False
        if path == ":memory:":
            self._file, self.name = None, "the database in memory"
            self._uri = f"file:/{secrets.token_hex(8)}?vfs=memdb"
            # The database lasts as long as one connection to it.
            kept = sqlite3.connect(self._uri, uri=True, check_same_thread=False)
            weakref.finalize(self, kept.close)
            self.create_database()
        else:
            self._file = DatabaseFile(path, is_default)
            self.folder = os.path.dirname(self._file.target)
            self.name = self._file.path
            # rw: SQLite must not put an empty file in the place of a lost one.
            self._uri = f"{Path(self._file.path).as_uri()}?mode=rw"

    def connect(self, creates: bool = False) -> "SQLiteConnection":
        """A new connection. Raises Unavailable, also if a parent process has opened the file.

        A forked child inherits SQLite's record of the locks that are held, but not the locks.
        """
        if self._file:
            self._process = self._process or os.getpid()
            if self._process != os.getpid():
                raise Unavailable(f"opened before this process forked: {self.name}")
            if creates:
                self._file.create()
            # Before SQLite reads it: it would apply the -wal of the old file to a new one.
            self._file.check_identity()
        connection = sqlite3.connect(
            self._uri,
            uri=True,
            timeout=FOREIGN_LOCK_TIMEOUT,
            isolation_level=None,  # each statement is a transaction
            check_same_thread=False,  # any thread takes a connection that is idle
            factory=SQLiteConnection,
        )
        connection.file = self._file
        try:
            connection.execute("PRAGMA foreign_keys = ON")  # off by default
            connection.execute("PRAGMA synchronous = FULL")  # NORMAL may lose commits
            if not self._is_up_to_date:
                self._bring_up_to_date(connection, creates)
                self._is_up_to_date = True
        except BaseException:
            connection.close()
            raise
        return connection

    def _bring_up_to_date(self, connection: "SQLiteConnection", creates: bool) -> None:
        """Create the tables, or migrate them. Leave alone what is not ours."""
        if not self._scripts(connection, creates) and is_wal(connection):
            return  # up to date: checked without a lock
        with self.write_lock():
            connection.execute("PRAGMA journal_mode = WAL")
            # Asked again, since another process may have been first.
            scripts = self._scripts(connection, creates)
            marks = (
                f"PRAGMA application_id = {migrations.APPLICATION_ID}",
                f"PRAGMA user_version = {migrations.SCHEMA_VERSION}",
            )
            script = ("BEGIN IMMEDIATE", *scripts, *marks, "COMMIT")
            connection.executescript(";".join(script))

    def _scripts(self, connection: "SQLiteConnection", creates: bool) -> list[str]:
        [(application, version, objects)] = connection.fetch(
            """SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)
            FROM pragma_application_id, pragma_user_version""",
            {},
        )
        found = migrations.marked_version(application, version) if objects else EMPTY
        try:
            return self.scripts_for(found, creates)
        except Unavailable as error:
            raise Unavailable(f"{error}: {self.name}") from None

    @contextmanager
    def write_lock(self) -> Iterator[None]:
        """Two locks: one for the threads of this process, then one for all processes.

        SQLite's own lock would starve writers: the longer one has waited, the less often it
        asks again. Raises TimeoutError.
        """
        deadline = time.monotonic() + WRITE_LOCK_TIMEOUT
        if self._file:
            self._file.check_identity()
        if not self._thread_lock.acquire(timeout=WRITE_LOCK_TIMEOUT):
            raise TimeoutError("other writers take too long")
        try:
            with self._file.lock(deadline) if self._file else nullcontext():
                yield
        finally:
            self._thread_lock.release()
        if self._file:  # the file may have been removed while we wrote
            self._file.check_identity(OutcomeUnknown)

    def save(self, path: str) -> None:
        """Copy the database to this empty file."""
        # As a read, since it waits for no writer.
        self.read("VACUUM INTO :path", {"path": path})

    def check(self) -> None:
        super().check()
        if self._file:
            self._file.check_identity()

    def is_timeout(self, error: BaseException) -> bool:
        name = getattr(error, "sqlite_errorname", "")
        return name.startswith("SQLITE_BUSY") or isinstance(error, TimeoutError)

    def outage(
        self, error: BaseException, may_have_committed: bool
    ) -> Unavailable | None:
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            return Unavailable(f"{reason}: {self.name}")
        name = getattr(error, "sqlite_errorname", "")
        if not OUTAGE.match(name):
            return None
        # After a crash, SQLite may still find a commit that could not be synced.
        is_unknown = may_have_committed and name.startswith("SQLITE_IOERR")
        return (OutcomeUnknown if is_unknown else Unavailable)(f"{error}: {self.name}")


class SQLiteConnection(sqlite3.Connection, base.Connection):
    file: DatabaseFile | None  # None: in memory
    may_have_committed = True

    def fetch(self, sql: str, parameters: Parameters) -> Rows:
        # A statement that returns rows commits only when all of them are fetched.
        return self.execute(sql, parameters).fetchall()

    def create(self, values: Parameters) -> Rows:
        return self.fetch(
            f"""INSERT INTO project
                (id, account, seq, created_at, updated_at, {", ".join(SETTABLE)})
            SELECT :id, :account,
                coalesce((SELECT last_seq FROM account WHERE name = :account), 0) + 1,
                :now, :now, :{", :".join(SETTABLE)}
            WHERE coalesce((SELECT project_count FROM account WHERE name = :account), 0)
                < :max_projects
            RETURNING {ID_ETAG_DOCUMENT}""",
            values,
        )

    def update(self, columns: Iterable[str], values: Parameters) -> Rows:
        changes = "".join(map("{0} = :{0}, ".format, columns))
        return self.fetch(
            f"""UPDATE project
            SET {changes} version = version + 1, updated_at = max(updated_at, :now)
            WHERE {PROJECT_IF_ALLOWED} RETURNING {ID_ETAG_DOCUMENT}""",
            values,
        )

    def begin(self, _seconds: int) -> None:
        self.may_have_committed = False
        self.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self.may_have_committed = True
        super().commit()

    def close(self) -> None:
        """Close the connection, and leave no -wal behind if the name leads to another file by now.

        SQLite would apply that -wal to the new file. So its contents go into the old one first.
        """
        try:
            if self.file:
                self.file.check_identity()
        except Unavailable:
            with suppress(sqlite3.Error):
                self.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        super().close()

    def begin_snapshot(self) -> None:
        self.execute("BEGIN")

    def stream(self, sql: str) -> Generator[Any]:
        yield from self.execute(sql)

    def insert(self, table: str, columns: Iterable[str], rows: Iterable[Any]) -> None:
        names = list(columns)
        values = f"({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
        self.executemany(f"INSERT INTO {table} {values}", rows)


def is_wal(connection: SQLiteConnection) -> bool:
    """False for a new file and for a backup."""
    [(mode,)] = connection.fetch("PRAGMA journal_mode", {})
    return bool(mode == "wal")
