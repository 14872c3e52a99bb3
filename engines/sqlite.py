"""The engine on one SQLite file, or in memory.

It knows no rule of the store. Threads and processes may share a file, and a write that
has returned is on the disk.
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

from engines import tables
from engines.base import Engine, OutcomeUnknown, Parameters, Rows, Unavailable
from engines.files import DatabaseFile

WRITE_LOCK_TIMEOUT = 2.5  # seconds that a writer waits for the others
LOCK_TIMEOUT = 1.0  # seconds that anybody waits for another program's lock
OUTAGE = re.compile(  # what an operator can mend, or a retry can get past
    "SQLITE_(BUSY|LOCKED|READONLY|IOERR|CORRUPT|FULL|CANTOPEN|PROTOCOL|NOTADB)"
)

TRIGGERS = """
CREATE TRIGGER project_insert AFTER INSERT ON project BEGIN
        INSERT INTO account (name, revision, created, projects)
        VALUES (new.account, hex(randomblob(8)), new.seq, 1)
        ON CONFLICT (name) DO UPDATE SET
            revision = excluded.revision, created = new.seq, projects = projects + 1; END;
CREATE TRIGGER project_update AFTER UPDATE ON project BEGIN
        UPDATE account SET revision = hex(randomblob(8)) WHERE name = new.account; END;
CREATE TRIGGER project_delete AFTER DELETE ON project BEGIN
        UPDATE account SET revision = hex(randomblob(8)), projects = projects - 1
        WHERE name = old.account; END;
"""
TABLES = f"""
{tables.COMMON_TABLES}
{TRIGGERS}
PRAGMA application_id = {tables.APPLICATION_ID};
"""
# A migration must not change once it was released. Before you change KEY_TABLE, COUNT_* or
# TRIGGERS, write out here, and in engines/postgres.py, what they were.
TO_LAYOUT_2 = f"""
ALTER TABLE account ADD COLUMN created INTEGER NOT NULL DEFAULT 0;
{tables.COUNT_CREATED};
{tables.KEY_TABLE}
"""
TO_LAYOUT_3 = f"""
ALTER TABLE account ADD COLUMN projects INTEGER NOT NULL DEFAULT 0;
{tables.COUNT_PROJECTS};
"""
# SQLite cannot change the constraints of a table, so this makes new tables and copies the rows.
TO_LAYOUT_4 = f"""
DROP TRIGGER IF EXISTS project_insert;
DROP TRIGGER IF EXISTS project_update;
DROP TRIGGER IF EXISTS project_delete;
DROP INDEX part_project;
ALTER TABLE project RENAME TO project_3;
ALTER TABLE part RENAME TO part_3;
CREATE TABLE project (
    id TEXT NOT NULL, account TEXT NOT NULL, seq INTEGER NOT NULL, name TEXT,
    created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL,
    version INTEGER NOT NULL DEFAULT 1, postal_code TEXT, location TEXT,
    PRIMARY KEY (account, seq), UNIQUE (account, id)) STRICT, WITHOUT ROWID;
INSERT INTO project SELECT * FROM project_3 ORDER BY account, seq;
CREATE TABLE part (
    id TEXT NOT NULL, project TEXT NOT NULL, kind TEXT NOT NULL, account TEXT NOT NULL,
    PRIMARY KEY (account, id), FOREIGN KEY (account, project)
        REFERENCES project (account, id) ON DELETE CASCADE) STRICT;
INSERT INTO part SELECT part_3.id, project, kind, account
    FROM part_3 JOIN project_3 ON project_3.id = project;
DROP TABLE part_3;
DROP TABLE project_3;
CREATE INDEX part_project ON part (account, project);
{TRIGGERS}
"""


def document() -> str:
    """The SQL of a Project's JSON document."""
    fields = []
    for name, kind in tables.FIELDS.items():
        value = f"json({name})" if kind == tables.JSON else name
        fields.append(f"'{name}', {value}")
    return f"json_object({', '.join(fields)})"


DOCUMENT = document()
ETAG = "(version || '-' || updated_at)"
PROJECT = f"id, {ETAG}, CAST({DOCUMENT} AS BLOB)"
MATCHES = f"""id = :id AND account = :account
    AND (:if_match IS NULL OR {ETAG} IN (SELECT value FROM json_each(:if_match)))
    AND (:if_none_match IS NULL
        OR {ETAG} NOT IN (SELECT value FROM json_each(:if_none_match)))"""


class SQLite(Engine):
    """One file, or a private database in memory."""

    TABLES = TABLES
    MIGRATIONS = (TO_LAYOUT_2, TO_LAYOUT_3, TO_LAYOUT_4)
    GET = f"SELECT {PROJECT} FROM project WHERE id = :id AND account = :account"
    CREATE = f"""INSERT INTO project
            (id, account, seq, created_at, updated_at, {", ".join(tables.SETTABLE)})
        SELECT :id, :account,
            coalesce((SELECT created FROM account WHERE name = :account), 0) + 1,
            :now, :now, :{", :".join(tables.SETTABLE)}
        RETURNING {PROJECT}"""
    UPDATE = f"""UPDATE project
        SET {{changes}} version = version + 1, updated_at = max(updated_at, :now)
        WHERE {MATCHES} RETURNING {PROJECT}"""
    DELETE = f"DELETE FROM project WHERE {MATCHES} RETURNING id"
    # json_group_array keeps the order of the rows of its subquery.
    LIST = f"""SELECT (SELECT revision FROM account WHERE name = :account),
            (SELECT projects FROM account WHERE name = :account),
            nullif(max(seq), (SELECT max(seq) FROM project WHERE account = :account)),
            CAST(json_group_array({DOCUMENT}) AS BLOB)
        FROM (SELECT * FROM project WHERE account = :account AND seq > :after
            ORDER BY seq LIMIT :size OFFSET :offset)"""
    ERROR = sqlite3.Error

    def __init__(self, path: str, makes_folder: bool = False) -> None:
        """On the file at `path`; `:memory:` is a private database, which has its tables.

        With `makes_folder`, `create_database` also makes the folder of a new file.
        """
        super().__init__()
        self._queue = threading.Lock()  # in which the writers of this process wait
        self._process: int | None = None  # the one that opened the file
        self._is_migrated = False
        if path == ":memory:":
            self._file, self._name = None, "the database in memory"
            self._uri = f"file:/{secrets.token_hex(8)}?vfs=memdb"
            # The database lasts as long as one connection to it.
            kept = sqlite3.connect(self._uri, uri=True, check_same_thread=False)
            weakref.finalize(self, kept.close)
            self.create_database()
        else:
            self._file = DatabaseFile(path, makes_folder)
            self.folder = os.path.dirname(self._file.path)
            self._name = self._file.path
            # rw: SQLite must not put an empty file in the place of a lost one.
            self._uri = f"{Path(self._file.path).as_uri()}?mode=rw"

    def connect(self, creates: bool) -> "Connection":
        """A new connection. Raises Unavailable, also if a parent process has opened the file.

        A forked child inherits SQLite's table of its locks, but not the locks themselves.
        """
        if self._file:
            self._process = self._process or os.getpid()
            if self._process != os.getpid():
                raise Unavailable(
                    f"a parent of this process has opened it: {self._name}"
                )
            if creates:
                self._file.create()
            # Before SQLite reads it: it would apply the -wal of the old file to a new one.
            self._file.check_identity()
        connection = sqlite3.connect(
            self._uri,
            uri=True,
            timeout=LOCK_TIMEOUT,
            isolation_level=None,  # each statement is a transaction
            check_same_thread=False,  # any thread takes a connection that is idle
            factory=Connection,
        )
        connection.file = self._file
        try:
            connection.execute("PRAGMA foreign_keys = ON")  # off by default
            connection.execute("PRAGMA synchronous = FULL")  # NORMAL may lose commits
            if not self._is_migrated:
                self._migrate(connection, creates)
        except BaseException:
            connection.close()
            raise
        return connection

    def _migrate(self, connection: "Connection", creates: bool) -> None:
        """Create the tables or bring them up to date; leave alone what is not ours."""
        # Usually there is nothing to do, and to find that out takes no lock. A new file and a
        # backup are in the mode "delete".
        [(mode,)] = connection.fetch("PRAGMA journal_mode", {})
        if self._migrations(connection, creates) or mode == "delete":
            with self.write_lock():
                connection.execute("PRAGMA journal_mode = WAL")
                mark = f"PRAGMA user_version = {tables.LAYOUT}"
                # Asked again, since another process may have migrated meanwhile.
                migrations = self._migrations(connection, creates)
                script = ["BEGIN IMMEDIATE", *migrations, mark, "COMMIT"]
                connection.executescript(";".join(script))
        self._is_migrated = True

    def _migrations(self, connection: "Connection", creates: bool) -> tuple[str, ...]:
        [(application, layout, objects)] = connection.fetch(
            """SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)
            FROM pragma_application_id, pragma_user_version""",
            {},
        )
        is_ours = application == tables.APPLICATION_ID
        try:
            layout = layout if is_ours else None
            return self.migrations_from(layout, objects == 0, creates)
        except Unavailable as error:
            raise Unavailable(f"{error}: {self._name}") from None

    @contextmanager
    def write_lock(self) -> Iterator[None]:
        """Writers of a process queue, and the first waits for the lock that all processes share.

        SQLite's own lock would starve writers: the longer one has waited, the less often it
        asks again. Raises TimeoutError.
        """
        deadline = time.monotonic() + WRITE_LOCK_TIMEOUT
        if self._file:
            self._file.check_identity()
        if not self._queue.acquire(timeout=WRITE_LOCK_TIMEOUT):
            raise TimeoutError("other writers take too long")
        try:
            with self._file.lock(deadline) if self._file else nullcontext():
                yield
        finally:
            self._queue.release()
        if self._file:  # what was written may be in a file that has lost its name
            self._file.check_identity(OutcomeUnknown)

    def save(self, path: str) -> None:
        """Copy the database to this empty file."""
        self.read("VACUUM INTO :path", {"path": path})  # which waits for no writer

    def check(self) -> None:
        super().check()
        if self._file:
            self._file.check_identity()

    def waited_in_vain(self, error: BaseException) -> bool:
        name = getattr(error, "sqlite_errorname", "")
        return name.startswith("SQLITE_BUSY") or isinstance(error, TimeoutError)

    def outage(
        self, error: BaseException, may_have_committed: bool
    ) -> Unavailable | None:
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            return Unavailable(f"{reason}: {self._name}")
        name = getattr(error, "sqlite_errorname", "")
        if not OUTAGE.match(name):
            return None
        # After a crash, SQLite may still find a commit that could not be synced.
        is_unknown = may_have_committed and name.startswith("SQLITE_IOERR")
        return (OutcomeUnknown if is_unknown else Unavailable)(f"{error}: {self._name}")


class Connection(sqlite3.Connection):
    file: DatabaseFile | None  # None: in memory
    may_have_committed = True

    def fetch(self, sql: str, parameters: Parameters) -> Rows:
        # A statement that returns rows commits only when all of them are fetched.
        return self.execute(sql, parameters).fetchall()

    write = fetch

    def begin(self, _seconds: int) -> None:
        self.may_have_committed = False
        self.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self.may_have_committed = True
        super().commit()

    def begin_snapshot(self) -> None:
        self.execute("BEGIN")

    def stream(self, sql: str) -> Generator[Any]:
        yield from self.execute(sql)

    def insert(self, table: str, columns: Iterable[str], rows: Iterable[Any]) -> None:
        names = list(columns)
        values = f"({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
        self.executemany(f"INSERT INTO {table} {values}", rows)

    def close(self) -> None:
        """Close the connection, and leave no -wal behind if another file has the name.

        SQLite would apply that -wal to the new file at the next start.
        """
        try:
            if self.file:
                self.file.check_identity()
        except Unavailable:
            with suppress(sqlite3.Error):
                self.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        super().close()
