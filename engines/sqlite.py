"""The engine on one SQLite file, or in memory, and the queue of its writers.

It knows no rule of the store. Threads and processes may share a file, and a write that
has returned is on the disk.
"""

import atexit
import os
import re
import secrets
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    suppress,
)
from pathlib import Path
from typing import Any
from weakref import WeakSet

from engines import tables
from engines.base import Engine, OutcomeUnknown, Rows, Unavailable, Values, pop
from engines.files import create, locked

PATIENCE = 2.5  # seconds that a writer waits for other writers, then for SQLite's locks
SHORT_PATIENCE = 0.1  # seconds, after a failed write, until one succeeds
LOOK_INTERVAL = 1.0  # seconds after which a read looks again whether the file is there
OUTAGE = re.compile(  # what an operator can mend, or a retry can get past
    "SQLITE_(BUSY|LOCKED|READONLY|IOERR|CORRUPT|FULL|CANTOPEN|PROTOCOL|NOTADB)"
)
# Closing a file drops every POSIX lock that the process has on it, SQLite's as well. So
# SQLite alone opens a database that exists, and nobody opens one (this lock, by process
# id) while another thread creates it.
CREATING: dict[int, threading.Lock] = defaultdict(threading.Lock)

TRIGGERS = (
    """CREATE TRIGGER project_insert AFTER INSERT ON project BEGIN
        INSERT INTO account (name, revision, created, projects)
        VALUES (new.account, hex(randomblob(8)), new.seq, 1)
        ON CONFLICT (name) DO UPDATE SET
            revision = excluded.revision, created = new.seq, projects = projects + 1; END""",
    """CREATE TRIGGER project_update AFTER UPDATE ON project BEGIN
        UPDATE account SET revision = hex(randomblob(8)) WHERE name = new.account; END""",
    """CREATE TRIGGER project_delete AFTER DELETE ON project BEGIN
        UPDATE account SET revision = hex(randomblob(8)), projects = projects - 1
        WHERE name = old.account; END""",
)
DROP_TRIGGERS = (
    "DROP TRIGGER project_insert",
    "DROP TRIGGER project_update",
    "DROP TRIGGER project_delete",
)
TABLES = f"""
{tables.COMMON}
{";".join(TRIGGERS)};
PRAGMA application_id = {tables.APPLICATION_ID};
"""
LAYOUT_2 = f"""
ALTER TABLE account ADD COLUMN created INTEGER NOT NULL DEFAULT 0;
{tables.COUNT_CREATED};
{tables.KEYS}
"""
LAYOUT_3 = f"""
ALTER TABLE account ADD COLUMN projects INTEGER NOT NULL DEFAULT 0;
{tables.COUNT_PROJECTS};
{";".join([*DROP_TRIGGERS, *TRIGGERS])};
"""


def document() -> str:
    """The SQL of a Project's JSON document."""
    members = []
    for name, kind in tables.MEMBERS.items():
        value = f"json({name})" if kind == tables.JSON else name
        members.append(f"'{name}', {value}")
    return f"json_object({', '.join(members)})"


DOCUMENT = document()
ETAG = "version || '-' || updated_at"
PROJECT = f"id, {ETAG}, CAST({DOCUMENT} AS BLOB)"
MATCHES = f"""id = :id AND account = :account
    AND (:if_match IS NULL OR {ETAG} IN (SELECT value FROM json_each(:if_match)))
    AND (:if_none_match IS NULL
        OR {ETAG} NOT IN (SELECT value FROM json_each(:if_none_match)))"""
IS_KNOWN = "etag IN (SELECT value FROM json_each(:known))"


class SQLite(Engine):
    """One file, or a private database in memory."""

    TABLES = TABLES
    UPGRADES = (LAYOUT_2, LAYOUT_3)
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
    LIST = f"""SELECT etag, CASE WHEN NOT {IS_KNOWN} THEN CAST((
            SELECT json_group_array({DOCUMENT}) FROM (
                SELECT * FROM project WHERE account = :account ORDER BY seq)) AS BLOB) END
        {tables.FROM_LIST_ETAG}"""
    LIST_PAGE = f"""SELECT etag, CASE WHEN NOT {IS_KNOWN} THEN CAST((
            SELECT coalesce({tables.NEXT_AFTER}, '') || char(10) || json_object(
                'projectList', json_group_array({DOCUMENT}),
                'page', :page, 'size', :size, 'total', {tables.TOTAL})
            FROM (SELECT * FROM {tables.PAGE_ROWS})) AS BLOB) END
        {tables.FROM_LIST_ETAG}"""
    BEGIN = BEGIN_FILL = "BEGIN IMMEDIATE"
    LAST_TOKEN = (
        "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'token'"
    )
    SET_LAST_TOKEN = (
        "DELETE FROM sqlite_sequence WHERE name = 'token'",
        "INSERT INTO sqlite_sequence (name, seq) VALUES ('token', :last)",
    )
    STOP_TRIGGERS = DROP_TRIGGERS
    START_TRIGGERS = TRIGGERS

    def __init__(self, path: str) -> None:
        """Open the file at `path`, created if it is missing; `:memory:` is a private one.

        Raises Unavailable, with the reason and the path.
        """
        super().__init__()
        self._looked_at = 0.0  # on the clock of time.monotonic()
        self._file: os.stat_result | None = None
        self._kept: sqlite3.Connection | None = None
        is_file = path != ":memory:"
        self._path = os.path.abspath(path) if is_file else path
        self._queue = Queue(f"{self._path}-lock" if is_file else None)
        try:
            if is_file:
                # rw: SQLite must not put an empty file in the place of a lost one.
                self._uri = f"{Path(self._path).as_uri()}?mode=rw"
                self._create_file()
                ENGINES.add(self)
            else:
                self._uri = f"file:/{secrets.token_hex(8)}?vfs=memdb"
                # The database lasts as long as one connection to it.
                self._kept = self.connect()
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            self.raise_outage(error, writes=False)
            raise

    def connect(self) -> "Connection":
        connection = sqlite3.connect(
            self._uri,
            uri=True,
            timeout=self._queue.patience,
            isolation_level=None,  # each statement is a transaction
            check_same_thread=False,  # any thread takes a connection that is idle
            factory=Connection,
        )
        connection.patience = self._queue.patience
        try:
            # Before SQLite reads it: it would apply the -wal of the old file to a new one.
            self._check_file(Unavailable)
            connection.execute("PRAGMA foreign_keys = ON")  # off by default
            connection.execute("PRAGMA synchronous = FULL")  # NORMAL may lose commits
        except (sqlite3.Error, Unavailable):
            connection.close()
            raise
        return connection

    def take(self, idle: list[Any]) -> "Connection":
        if not idle or time.monotonic() - self._looked_at > LOOK_INTERVAL:
            self._check_file(Unavailable)
        while (connection := pop(idle)) is not None:
            # SQLite's own patience is set as the connection is opened.
            if connection.patience == self._queue.patience:
                return connection  # type: ignore[no-any-return]
            connection.close()
        return self.connect()

    def execute(self, connection: sqlite3.Connection, sql: str, values: Values) -> Rows:
        # A statement that returns rows commits only when all of them are fetched.
        return connection.execute(sql, values).fetchall()

    def session(self, writes: bool = False) -> AbstractContextManager[Any]:
        session = super().session(writes)
        return self._in_turn(session) if writes else session

    @contextmanager
    def _in_turn(self, session: AbstractContextManager[Any]) -> Iterator[Any]:
        with self._queue.turn():
            self._check_file(Unavailable)
            with session as connection:
                yield connection
            self._check_file(OutcomeUnknown)

    def check(self) -> None:
        self._check_file(Unavailable)
        super().check()

    def outage(self, error: BaseException, writes: bool) -> Unavailable | None:
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            return Unavailable(f"{reason}: {error.filename or self._path}")
        name = getattr(error, "sqlite_errorname", "")
        if not OUTAGE.match(name):
            return None
        # A commit that could not be synced may yet be found after a crash.
        is_unknown = writes and name.startswith("SQLITE_IOERR")
        return (OutcomeUnknown if is_unknown else Unavailable)(f"{error}: {self._path}")

    def close(self) -> None:
        """Close the connections that are idle; the engine can go on, with new ones.

        The -wal of a file that was replaced is first brought home to that file: SQLite
        leaves it there, and would apply it to the new file at the next start.
        """
        while (connection := pop(self.idle[os.getpid()])) is not None:
            with suppress(OSError, sqlite3.Error):
                if not self._has_its_name():
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.close()

    def __del__(self) -> None:
        super().__del__()
        if self._kept:
            self._kept.close()

    def _create_file(self) -> None:
        wal = f"{self._path}-wal"
        if os.path.exists(wal) and not os.path.exists(self._path):
            # SQLite would delete it, and with it what was acknowledged last.
            raise Unavailable(f"without its database, move this away: {wal}")
        with CREATING[os.getpid()]:
            create(os.path.realpath(self._path))
        self._file = os.stat(self._path)

    def _check_file(self, outage: type[Unavailable]) -> None:
        """Raise this outage if the file was removed or replaced.

        SQLite would go on with it, and nobody would find what was written.
        """
        self._looked_at = time.monotonic()
        try:
            has_its_name = self._has_its_name()
        except OSError as error:
            raise outage(f"{error.strerror}: {self._path}") from error
        if not has_its_name:
            self._looked_at = 0.0
            self.close()
            reason = "the file was removed or replaced; restart the service to use"
            raise outage(f"{reason} {self._path}")

    def _has_its_name(self) -> bool:
        if self._file is None:  # in memory, or not created yet
            return True
        try:  # without os.path.samestat, which costs a third more
            found, file = os.stat(self._path), self._file
        except (FileNotFoundError, NotADirectoryError):
            return False
        return found.st_ino == file.st_ino and found.st_dev == file.st_dev

    def _prepare(self) -> None:
        """Create the tables or bring them up to date; leave alone what is not ours.

        Its connection is closed, since a server may fork before the first request.
        """
        with closing(self.connect()) as connection:
            if self._is_ready(connection):
                return
            with self._queue.turn():  # in which another process may have been first
                connection.execute("PRAGMA journal_mode = WAL")
                steps = "".join(self._missing(connection))
                mark = f"PRAGMA user_version = {tables.LAYOUT}"
                connection.executescript(f"BEGIN IMMEDIATE; {steps} {mark}; COMMIT;")

    def _is_ready(self, connection: sqlite3.Connection) -> bool:
        # "delete" is SQLite's default, and the mode of a restored copy.
        [(mode,)] = connection.execute("PRAGMA journal_mode").fetchall()
        return not self._missing(connection) and mode != "delete"

    def _missing(self, connection: sqlite3.Connection) -> tuple[str, ...]:
        [(application, layout, objects)] = connection.execute(
            """SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)
            FROM pragma_application_id, pragma_user_version"""
        ).fetchall()
        is_ours = application == tables.APPLICATION_ID
        return self.missing(layout if is_ours else None, is_empty=objects == 0)


class Connection(sqlite3.Connection):
    patience: float  # seconds that it waits for SQLite's locks


class Queue:
    """The writers of a file, one at a time: first those of the process queue for a lock,
    then its first one for an flock on the file `-lock`.

    SQLite alone backs off longer the longer a writer has waited, which starves it. After
    a failed write, all have a short patience, until one succeeds.
    """

    def __init__(self, path: str | None) -> None:
        """`path` of the file to lock, or None if one process has the database alone."""
        self.patience = PATIENCE
        self._path = path
        self._first: dict[int, threading.Lock] = defaultdict(threading.Lock)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Raises Unavailable if the patience ends first."""
        try:
            with ExitStack() as held:
                deadline = time.monotonic() + self.patience
                first = self._first[os.getpid()]
                if not first.acquire(timeout=self.patience):
                    raise Unavailable(f"other writers take too long: {self._path}")
                held.callback(first.release)
                if self._path:
                    held.enter_context(locked(self._path, deadline))
                yield
        except Unavailable:
            self.patience = SHORT_PATIENCE
            raise
        self.patience = PATIENCE


ENGINES: WeakSet[SQLite] = WeakSet()  # those on a file


@atexit.register
def close_all() -> None:
    """Close the files properly: at exit, Python may call __del__ late or never."""
    for engine in list(ENGINES):
        engine.close()
