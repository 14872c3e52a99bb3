"""Projects and access tokens: the rules of a store, and its engine on one SQLite file.

It knows nothing of HTTP, nor of what a valid Project is. The database renders a Project
as the JSON that goes over the wire. Threads and processes may share a database, and what
a method has written is on the disk when it returns.
"""

import fcntl
import hashlib
import json
import os
import re
import secrets
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple


class NotFound(Exception):
    """The account has no such Project."""


class Stale(Exception):
    """The Project's ETag is not among those that the caller expects."""


class Unavailable(Exception):
    """The database is locked, full or out of reach; nothing was changed."""


class OutcomeUnknown(Unavailable):
    """The connection was lost during a write, which may or may not have been made."""


class Project(NamedTuple):
    id: str
    etag: str
    document: bytes  # JSON


class ProjectList(NamedTuple):
    etag: str
    document: bytes | None  # None if the caller knows this etag


class Page(NamedTuple):
    page: int  # from 0
    size: int  # Projects


class Token(NamedTuple):
    id: int
    created_at: int  # epoch milliseconds
    expires_at: int | None  # None: never
    account: str


Members = Mapping[str, object]  # some or all of COLUMNS
Etags = Collection[str] | None  # a change expects one of these; None: any will do
Values = dict[str, Any]  # of the parameters of a statement

DAY = 86_400_000  # milliseconds


class Store:
    """The rules, for either engine: each method is one statement, so nothing is half done.

    Any method may raise Unavailable, one that writes OutcomeUnknown as well.
    """

    def __init__(
        self, engine: "Engine", clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` returns epoch seconds."""
        self._engine = engine
        self._clock = clock
        self.close = engine.close

    def create_project(
        self, account: str, members: Members, key: str | None = None
    ) -> Project:
        """Add a Project, or return the one that the account made with the same key."""
        id = project_id(account, key)
        values = {"account": account, "id": id, **dict.fromkeys(COLUMNS)}
        values |= as_columns(members)
        while not (rows := self._write(self._engine.CREATE, values)):
            with suppress(NotFound):  # deleted just now, so it can be made again
                return self.get_project(account, id)
        return Project(*rows[0])

    def get_project(self, account: str, id: str) -> Project:
        """Raises NotFound."""
        rows = self._engine.run(self._engine.GET, identity(account, id))
        if not rows:
            raise NotFound
        return Project(*rows[0])

    def update_project(
        self, account: str, id: str, members: Members, etags: Etags
    ) -> Project:
        """Change these members and raise the version by 1. Raises NotFound, Stale."""
        columns = as_columns(members)
        changes = "".join(f"{name} = :{name}, " for name in columns)
        sql = self._engine.UPDATE.replace(":changes", changes)
        return Project(*self._change(sql, identity(account, id) | columns, etags))

    def delete_project(self, account: str, id: str, etags: Etags) -> None:
        """Delete a Project and all that belongs to it. Raises NotFound, Stale."""
        self._change(self._engine.DELETE, identity(account, id), etags)

    def list_projects(
        self, account: str, known: Collection[str], page: Page | None = None
    ) -> ProjectList:
        """All Projects, oldest first, or one page of them.

        Any change gives the account's lists etags that never come back.
        """
        values = {"account": account, "known": as_list(known), "query": "-"}
        sql = self._engine.LIST
        if page:
            values |= page._asdict() | {"query": "-{}-{}".format(*page)}
            sql = self._engine.PAGE
        return ProjectList(*self._engine.run(sql, values)[0])

    def add_token(self, account: str, digest: bytes, days: int | None = None) -> None:
        """Let a token act for the account: for this many days, or without a limit."""
        now = self._now()
        sql = """INSERT INTO token (account, digest, created_at, expires_at)
            VALUES (:account, :digest, :now, :expires_at)
            RETURNING id"""
        values = {"account": account, "digest": digest, "now": now}
        values["expires_at"] = None if days is None else now + days * DAY
        self._engine.write(sql, values)

    def find_account(self, digest: bytes) -> str | None:
        """The account that a token acts for; None if it is unknown or has expired."""
        sql = """SELECT account FROM token
            WHERE digest = :digest AND (expires_at IS NULL OR expires_at > :now)"""
        rows = self._engine.run(sql, {"digest": digest, "now": self._now()})
        return rows[0][0] if rows else None

    def list_tokens(self) -> list[Token]:
        """Every token, in the order of the ids."""
        sql = "SELECT id, created_at, expires_at, account FROM token ORDER BY id"
        return [Token(*row) for row in self._engine.run(sql, {})]

    def revoke_token(self, id: int) -> bool:
        """Make a token invalid; False if there is none with this id."""
        sql = "DELETE FROM token WHERE id = :id RETURNING id"
        return bool(self._engine.write(sql, {"id": id}))

    def _change(self, sql: str, values: Values, etags: Etags) -> Any:
        values["etags"] = None if etags is None else as_list(etags)
        rows = self._write(sql, values)
        if rows:
            return rows[0]
        if etags is None:
            raise NotFound
        # This raises NotFound, unless it is only the ETag that did not match.
        self.get_project(values["account"], values["id"])
        raise Stale

    def _write(self, sql: str, values: Values) -> list[Any]:
        values["now"] = self._now()
        return self._engine.write(sql, values)

    def _now(self) -> int:
        return int(self._clock() * 1000)


def project_id(account: str, key: str | None) -> str:
    """24 hexadecimal digits: random, or with a key always the same."""
    if key is None:
        return secrets.token_hex(12)
    return hashlib.sha256(f"{account}\0{key}".encode()).hexdigest()[:24]


def identity(account: str, id: str) -> Values:
    # No id has U+0000, which PostgreSQL cannot hold: it is that of no Project either way.
    return {"account": account, "id": id.replace("\0", "?")}


def as_list(etags: Collection[str]) -> str:
    """The ETags as JSON. None has U+0000, which PostgreSQL cannot hold."""
    return json.dumps([etag for etag in etags if "\0" not in etag])


def as_columns(members: Members) -> Values:
    """The members as they are stored. Raises KeyError for one that has no column."""
    return {name: COLUMNS[name](value) for name, value in members.items()}


def as_text(value: Any) -> Any:
    return value


def as_json(value: Any) -> Any:
    """Compact, as it goes over the wire."""
    return value and json.dumps(value, separators=(",", ":"))


# The members that a caller sets, each with what turns its value into that of its column.
COLUMNS = {"name": as_text, "postal_code": as_text, "location": as_json}
LIST_ETAG = """(SELECT coalesce(
    (SELECT revision FROM account WHERE name = :account), '') || :query AS etag) AS list"""
FOREIGN = "made by another program or a newer release"
APPLICATION_ID = 0x67617264  # "gard": the database is ours


class Engine:
    """A database: its tables, the statements that are its own, and its connections.

    A connection is used by one thread at a time, and only by the process that opened it.
    A class of an engine says how to connect and execute, and which errors are an outage.
    """

    GET: str  # its rows are those of a Project, as are those of the next two
    CREATE: str
    UPDATE: str  # with :changes for the columns to set
    DELETE: str
    LIST: str  # its row is that of a ProjectList, as is that of the next one
    PAGE: str

    def __init__(self) -> None:
        self._idle: dict[int, list[Any]] = defaultdict(list)

    def run(self, sql: str, values: Values, writes: bool = False) -> list[Any]:
        """All rows of a statement, which is a transaction of its own. Raises Unavailable."""
        idle, connection = self._idle[os.getpid()], None
        try:
            connection = self.take(idle)
            rows = self.execute(connection, sql, values)
        except BaseException as error:
            if connection is not None:
                connection.close()
            self.raise_outage(error, writes)
            raise
        idle.append(connection)
        return rows

    def write(self, sql: str, values: Values) -> list[Any]:
        """Like run, for a statement that writes. Raises OutcomeUnknown as well."""
        return self.run(sql, values, writes=True)

    def take(self, idle: list[Any]) -> Any:
        """A connection that is open: one of the idle ones, or a new one."""
        raise NotImplementedError

    def execute(self, connection: Any, sql: str, values: Values) -> list[Any]:
        raise NotImplementedError

    def raise_outage(self, error: BaseException, writes: bool) -> None:
        """Raise Unavailable if the error is an outage, and no defect."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections that are idle; the engine can go on, with new ones."""
        idle = self._idle[os.getpid()]
        while (connection := pop(idle)) is not None:
            connection.close()

    def __del__(self) -> None:
        self.close()


def pop(idle: list[Any]) -> Any:
    """Take one out of the list, which other threads do as well; None if it is empty."""
    try:
        return idle.pop()
    except IndexError:
        return None


PATIENCE = 2.5  # seconds that a writer waits for other writers, then for SQLite's locks
POLL_INTERVAL = 0.0002  # seconds between two looks whether the queue is free
SHORT_PATIENCE = 0.1  # seconds, after a failed write, until one succeeds
OUTAGE = re.compile(  # what an operator can mend, or a retry can get past
    "SQLITE_(BUSY|LOCKED|READONLY|IOERR|CORRUPT|FULL|CANTOPEN|PROTOCOL|NOTADB)"
)
LAYOUT = 1  # of the tables, kept as PRAGMA user_version
TABLES = f"""
BEGIN IMMEDIATE;
-- The revision validates an account's lists. It is random, since a counter would
-- return to earlier values when a backup is restored.
CREATE TABLE IF NOT EXISTS account (
    name        TEXT    PRIMARY KEY,
    revision    TEXT    NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS token (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,  -- a late revoke hits no newer token
    account     TEXT    NOT NULL,
    digest      BLOB    NOT NULL UNIQUE,            -- SHA-256
    created_at  INTEGER NOT NULL,                   -- all times in epoch milliseconds
    expires_at  INTEGER                             -- NULL: never
) STRICT;
CREATE TABLE IF NOT EXISTS project (
    id          TEXT    NOT NULL UNIQUE,
    account     TEXT    NOT NULL,
    seq         INTEGER NOT NULL,                   -- the account's order of creation
    name        TEXT,
    created_at  INTEGER NOT NULL,
    updated_at  INTEGER NOT NULL,
    version     INTEGER NOT NULL DEFAULT 1,
    postal_code TEXT,
    location    TEXT,                               -- JSON: a REAL shows 15 digits only
    PRIMARY KEY (account, seq)
) STRICT, WITHOUT ROWID;  -- kept in the order of its key, so a list is one range of it
CREATE TABLE IF NOT EXISTS part (                   -- a region, zone, parcel, controller
    id          TEXT    PRIMARY KEY,
    project     TEXT    NOT NULL REFERENCES project (id) ON DELETE CASCADE,
    kind        TEXT    NOT NULL
) STRICT;
-- Without this index, deleting a Project would scan all parts.
CREATE INDEX IF NOT EXISTS part_project ON part (project);
CREATE TRIGGER IF NOT EXISTS project_insert AFTER INSERT ON project BEGIN
    REPLACE INTO account VALUES (new.account, hex(randomblob(8))); END;
CREATE TRIGGER IF NOT EXISTS project_update AFTER UPDATE ON project BEGIN
    REPLACE INTO account VALUES (new.account, hex(randomblob(8))); END;
CREATE TRIGGER IF NOT EXISTS project_delete AFTER DELETE ON project BEGIN
    REPLACE INTO account VALUES (old.account, hex(randomblob(8))); END;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {LAYOUT};
COMMIT;
"""

ETAG = "CAST(version AS TEXT)"
DOCUMENT = """json_object(
    'id', id, 'name', name, 'created_at', created_at, 'updated_at', updated_at,
    'version', version, 'postal_code', postal_code, 'location', json(location))"""
PROJECT = f"id, {ETAG}, CAST({DOCUMENT} AS BLOB)"
EXPECTED = f"""id = :id AND account = :account
    AND (:etags IS NULL OR {ETAG} IN (SELECT value FROM json_each(:etags)))"""
# json_group_array keeps the order of the rows of its subquery.
ROWS = "SELECT * FROM project WHERE account = :account ORDER BY seq"
UNKNOWN_LIST = """SELECT etag, CASE WHEN etag IN (SELECT value FROM json_each(:known))
        THEN NULL ELSE CAST(({}) AS BLOB) END
    FROM {}"""


class SQLite(Engine):
    """One file, and the queue of its writers.

    SQLite alone backs off longer the longer a writer has waited, which starves it. So
    writers queue: for a lock in their process, then for an flock on the file `-lock`.
    """

    GET = f"SELECT {PROJECT} FROM project WHERE id = :id AND account = :account"
    CREATE = f"""INSERT INTO project
            (id, account, seq, created_at, updated_at, {", ".join(COLUMNS)})
        SELECT :id, :account, coalesce(max(seq), 0) + 1, :now, :now,
            :{", :".join(COLUMNS)}
        FROM project WHERE account = :account
        ON CONFLICT (id) DO NOTHING RETURNING {PROJECT}"""
    UPDATE = f"""UPDATE project
        SET :changes version = version + 1, updated_at = max(updated_at, :now)
        WHERE {EXPECTED} RETURNING {PROJECT}"""
    DELETE = f"DELETE FROM project WHERE {EXPECTED} RETURNING id"
    LIST = UNKNOWN_LIST.format(
        f"SELECT json_group_array({DOCUMENT}) FROM ({ROWS})", LIST_ETAG
    )
    PAGE = UNKNOWN_LIST.format(
        f"""SELECT json_object('projectList', json_group_array({DOCUMENT}),
            'page', :page, 'size', :size,
            'total', (SELECT count(*) FROM project WHERE account = :account))
        FROM ({ROWS} LIMIT :size OFFSET :page * :size)""",
        LIST_ETAG,
    )

    def __init__(self, path: str) -> None:
        """Open the file at `path`, created if it is missing; `:memory:` is a private one.

        Raises Unavailable, with the reason and the path.
        """
        super().__init__()
        self._kept: list[sqlite3.Connection] = []
        self._writer: dict[int, threading.Lock] = defaultdict(threading.Lock)
        self._patience = PATIENCE
        self._path = path if path == ":memory:" else os.path.abspath(path)
        self._queue = "" if path == ":memory:" else f"{self._path}-lock"
        try:
            if self._queue:
                # rw: SQLite must not put an empty file in the place of a lost one.
                self._uri = f"{Path(self._path).as_uri()}?mode=rw"
                with suppress(FileExistsError):
                    os.close(os.open(self._path, os.O_CREAT | os.O_EXCL, mode=0o600))
            else:
                self._uri = f"file:/{secrets.token_hex(8)}?vfs=memdb"
                # The database lasts as long as one connection to it.
                self._kept.append(self._connect())
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            self.raise_outage(error, writes=False)
            raise

    def write(self, sql: str, values: Values) -> list[Any]:
        """Like run, in turn with the writers of all threads and processes."""
        try:
            with self._turn():
                rows = super().write(sql, values)
        except Unavailable:
            self._patience = SHORT_PATIENCE
            raise
        self._patience = PATIENCE
        return rows

    def take(self, idle: list[Any]) -> sqlite3.Connection:
        return pop(idle) or self._connect()

    def execute(
        self, connection: sqlite3.Connection, sql: str, values: Values
    ) -> list[Any]:
        return connection.execute(sql, values).fetchall()  # only then it commits

    def raise_outage(self, error: BaseException, writes: bool) -> None:
        if isinstance(error, OSError):
            place = error.filename or self._path
            raise Unavailable(f"{error.strerror}: {place}") from error
        if OUTAGE.match(getattr(error, "sqlite_errorname", "")):
            raise Unavailable(f"{error}: {self._path}") from error

    def close(self) -> None:
        """Close the connections that are idle, and with them a database in memory."""
        super().close()
        while (connection := pop(self._kept)) is not None:
            connection.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        deadline = time.monotonic() + self._patience
        writer = self._writer[os.getpid()]
        if not writer.acquire(timeout=self._patience):
            raise Unavailable(f"other writers take too long: {self._path}")
        with ExitStack() as turn:
            turn.callback(writer.release)
            if self._queue:
                # Opened anew: an flock belongs to the open file, whoever shares that.
                try:
                    queue = os.open(self._queue, os.O_CREAT, mode=0o600)
                except OSError as error:
                    self.raise_outage(error, writes=True)
                turn.callback(os.close, queue)
                while not try_lock(queue):
                    if time.monotonic() > deadline:
                        raise Unavailable(f"still locked: {self._queue}")
                    time.sleep(POLL_INTERVAL)
                # Not by the close alone: a process forked meanwhile keeps the file open.
                turn.callback(fcntl.flock, queue, fcntl.LOCK_UN)
            yield

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._uri,
            uri=True,
            timeout=PATIENCE,
            isolation_level=None,  # each statement is a transaction
            check_same_thread=False,  # any thread takes a connection that is idle
        )
        try:
            connection.execute("PRAGMA foreign_keys = ON")  # off by default
            connection.execute("PRAGMA synchronous = FULL")  # NORMAL may lose commits
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _prepare(self) -> None:
        """Create the tables in an empty database; leave alone one that is not ours.

        Closes its connection, since none may be carried across a server's fork.
        """
        with closing(self._connect()) as connection:
            [(application, layout, tables)] = connection.execute(
                """SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)
                FROM pragma_application_id, pragma_user_version"""
            ).fetchall()
            if tables and (application, layout) != (APPLICATION_ID, LAYOUT):
                raise Unavailable(f"{FOREIGN}: {self._path}")
            [(mode,)] = connection.execute("PRAGMA journal_mode").fetchall()
            if mode != "wal" or not tables:
                with self._turn():
                    connection.execute("PRAGMA journal_mode = WAL")
                    connection.executescript(TABLES)


def try_lock(file: int) -> bool:
    """Take the lock of the file, if nobody else has it."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
