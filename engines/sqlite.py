"""The engine on one SQLite file, or in memory.

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
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from engines import tables
from engines.base import Engine, OutcomeUnknown, Rows, Unavailable, Values, pop
from engines.files import create
from engines.waiting import SHORT_PATIENCE, Queue

LOOK_INTERVAL = 1.0  # seconds after which a read looks again whether the file is there
OUTAGE = re.compile(  # what an operator can mend, or a retry can get past
    "SQLITE_(BUSY|LOCKED|READONLY|IOERR|CORRUPT|FULL|CANTOPEN|PROTOCOL|NOTADB)"
)
FileId = tuple[int, int]  # of a file: its device and its inode
REPLACED = "{} was removed or replaced; restart the service to use {}"
# Closing a file drops every POSIX lock that the process has on it, SQLite's as well. So
# this code never opens a database that exists, and these locks (by process id, for after a
# fork) keep other threads from opening a new one until its creator has closed it.
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
DROP_TRIGGERS = tuple(
    f"DROP TRIGGER project_{event}" for event in ("insert", "update", "delete")
)
TABLES = f"""
{tables.COMMON_TABLES}
{";".join(TRIGGERS)};
PRAGMA application_id = {tables.APPLICATION_ID};
"""
LAYOUT_2 = f"""
ALTER TABLE account ADD COLUMN created INTEGER NOT NULL DEFAULT 0;
{tables.COUNT_CREATED};
{tables.KEY_TABLE}
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

    def __init__(self, path: str, file: FileId | None = None) -> None:
        """Open the file at `path`, created if it is missing; `:memory:` is a private one.

        With `file`, it must be this one, and is opened at the first use: a worker may
        start in an outage. Raises Unavailable, with the path.
        """
        super().__init__()
        self._looked_at = 0.0  # on the clock of time.monotonic()
        self.file = file
        self._kept: sqlite3.Connection | None = None
        self._is_ready = False
        is_file = path != ":memory:"
        self._path = os.path.abspath(path) if is_file else path
        target = os.path.realpath(self._path)  # beside which SQLite puts its own files
        self._wal, self._is_wal_lost = f"{target}-wal", False
        self._queue = Queue(f"{target}-lock" if is_file else None)
        if is_file:
            # rw: SQLite must not put an empty file in the place of a lost one.
            self._uri = f"{Path(self._path).as_uri()}?mode=rw"
            ENGINES.add(self)
        else:
            self._uri = f"file:/{secrets.token_hex(8)}?vfs=memdb"
            # The database lasts as long as one connection to it.
            self._kept = self._connect()
        if not file:
            try:
                if is_file:
                    self._create_file()
                self._prepare()
            except (OSError, sqlite3.Error) as error:
                self.raise_outage(error, writes=False)
                raise

    def connect(self) -> "Connection":
        if not self._is_ready:
            self._prepare()
        return self._connect()

    def _connect(self) -> "Connection":
        patience = self._queue.patience  # which another thread may change
        connection = sqlite3.connect(
            self._uri,
            uri=True,
            timeout=patience,
            isolation_level=None,  # each statement is a transaction
            check_same_thread=False,  # any thread takes a connection that is idle
            factory=Connection,
        )
        connection.patience = patience
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
        if not self._is_ready:
            self.close()  # else nobody would connect, and so prepare the file
            self.check()  # which does, in a turn of its own
        with self._queue.turn():
            self._check_file(Unavailable)
            with session as connection:
                yield connection
                self._check_wal(connection)
        self._check_file(OutcomeUnknown)  # after the turn, for which others wait

    def check(self) -> None:
        self._check_file(Unavailable)
        super().check()

    def note_error(self, error: BaseException) -> None:
        """After one has waited in vain, let all wait only briefly until a write succeeds."""
        if getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
            self._queue.patience = SHORT_PATIENCE

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
                if not self._is_in_place():
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.close()

    def __del__(self) -> None:
        super().__del__()
        if self._kept:
            self._kept.close()

    def _create_file(self) -> None:
        if os.path.exists(self._wal) and not os.path.exists(self._path):
            # SQLite would delete it, and with it what was acknowledged last.
            raise Unavailable(f"without its database, move this away: {self._wal}")
        with CREATING[os.getpid()]:
            create(os.path.realpath(self._path))

    def _check_file(self, outage: type[Unavailable]) -> None:
        """Raise this outage if the file was removed or replaced.

        SQLite would go on with it, and nobody would find what was written.
        """
        self._looked_at = 0.0  # the next read looks again, unless all is well
        try:
            is_in_place = self._is_in_place()
        except OSError as error:
            raise outage(f"{error.strerror}: {self._path}") from error
        if not is_in_place:
            self.close()
            raise outage(REPLACED.format("the file", self._path))
        self._looked_at = time.monotonic()

    def _check_wal(self, connection: "Connection") -> None:
        """Raises OutcomeUnknown if somebody has removed the -wal, which holds the commit.

        It is there from a connection's first write to its end.
        """
        if self.file is None:  # in memory
            return
        try:
            wal = os.stat(self._wal).st_ino
        except FileNotFoundError:
            wal = 0
        if wal and connection.wal in (0, wal):
            connection.wal = wal
        elif not connection.wal and journal_mode(connection) != "wal":
            self._is_ready = False  # another program has changed it: set it again
        else:
            self._is_wal_lost = True
            raise OutcomeUnknown(REPLACED.format(self._wal, self._path))

    def _is_in_place(self) -> bool:
        if self.file is None:  # in memory, or not created yet
            return True
        try:
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (found.st_dev, found.st_ino) == self.file and not self._is_wal_lost

    def _prepare(self) -> None:
        """Create the tables or bring them up to date; leave alone what is not ours.

        Its connection is closed, since a server may fork before the first request.
        """
        if not self._kept and not self.file:
            found = os.stat(self._path)
            self.file = found.st_dev, found.st_ino
        with closing(self._connect()) as connection:
            # "delete" is SQLite's default, and the mode of a restored copy.
            if self._steps(connection) or journal_mode(connection) == "delete":
                with self._queue.turn():  # in which another one may have been first
                    connection.execute("PRAGMA journal_mode = WAL")
                    mark = f"PRAGMA user_version = {tables.LAYOUT}"
                    script = ["BEGIN IMMEDIATE", *self._steps(connection), mark]
                    connection.executescript(f"{';'.join(script)}; COMMIT")
        self._is_ready = True

    def _steps(self, connection: sqlite3.Connection) -> tuple[str, ...]:
        [(application, layout, objects)] = connection.execute(
            """SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)
            FROM pragma_application_id, pragma_user_version"""
        ).fetchall()
        if application != tables.APPLICATION_ID:
            layout = None
        try:
            return self.steps_from(layout, is_empty=objects == 0)
        except Unavailable as error:
            raise Unavailable(f"{error}: {self._path}") from None


def journal_mode(connection: sqlite3.Connection) -> str:
    [(mode,)] = connection.execute("PRAGMA journal_mode").fetchall()
    return str(mode)


class Connection(sqlite3.Connection):
    patience: float  # seconds that it waits for SQLite's locks
    wal = 0  # the inode of the -wal that holds its commits; 0: not known yet


ENGINES: WeakSet[SQLite] = WeakSet()  # those on a file


@atexit.register
def close_all() -> None:
    """Close the files properly: at exit, Python may call __del__ late or never."""
    for engine in list(ENGINES):
        engine.close()
