"""Projects and access tokens: what a store does, and the store on one SQLite file.

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
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol


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


MEMBERS = ("name", "postal_code", "location")
Members = dict[str, object]  # some or all of these
Etags = Collection[str] | None  # a change expects one of these; None: any will do


class Store(Protocol):
    """What both engines do. Any method may raise Unavailable, a write OutcomeUnknown."""

    def create_project(self, account: str, members: Members, key: str = "") -> Project:
        """Add a Project, or return the one that the account made with the same key."""

    def get_project(self, account: str, id: str) -> Project:
        """Raises NotFound."""

    def update_project(
        self, account: str, id: str, members: Members, etags: Etags
    ) -> Project:
        """Change these members and raise the version by 1. Raises NotFound, Stale."""

    def delete_project(self, account: str, id: str, etags: Etags) -> None:
        """Delete a Project and all that belongs to it. Raises NotFound, Stale."""

    def list_projects(
        self, account: str, known: Collection[str], page: int = 0, size: int = 0
    ) -> ProjectList:
        """All Projects, oldest first; with a size, one page of them.

        Any change gives the account's lists etags that never come back.
        """

    def add_token(self, account: str, digest: bytes, days: int | None = None) -> None:
        """Let a token act for the account: for this many days, or without a limit."""

    def find_account(self, digest: bytes) -> str | None:
        """The account that a token acts for; None if it is unknown or has expired."""

    def list_tokens(self) -> list[tuple[int, str, str, str]]:
        """The id, creation and expiry (UTC, as text) and account of every token."""

    def revoke_token(self, id: int) -> bool:
        """Make a token invalid; False if there is none with this id."""

    def close(self) -> None:
        """Close the idle connections, and with them a database in memory."""


def project_id(account: str, key: str) -> str:
    """24 hexadecimal digits: random, or with a key always the same."""
    if not key:
        return secrets.token_hex(12)
    return hashlib.sha256(f"{account}\0{key}".encode()).hexdigest()[:24]


def as_columns(members: Members) -> Members:
    """The members as they are stored: a location as compact JSON text."""
    if not members.get("location"):
        return members
    return members | {
        "location": json.dumps(members["location"], separators=(",", ":"))
    }


PATIENCE = 2.5  # seconds that a writer waits for other writers, then for SQLite's locks
POLL_INTERVAL = 0.0002  # seconds between two looks whether the queue is free
SHORT_PATIENCE = 0.1  # seconds, after a failed write, until one succeeds
OUTAGE = re.compile(  # what an operator can mend, or a retry can get past
    "SQLITE_(BUSY|LOCKED|READONLY|IOERR|CORRUPT|FULL|CANTOPEN|PROTOCOL|NOTADB)"
)
FOREIGN = "made by another program or a newer release"
APPLICATION_ID = 0x67617264  # "gard": the file is ours
LAYOUT = 1  # of the tables, kept as PRAGMA user_version
SCHEMA = f"""
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

DOCUMENT = """json_object(
    'id', id, 'name', name, 'created_at', created_at, 'updated_at', updated_at,
    'version', version, 'postal_code', postal_code, 'location', json(location))"""
PROJECT = f"id, CAST(version AS TEXT), CAST({DOCUMENT} AS BLOB)"
ROWS = "SELECT * FROM project WHERE account = :account ORDER BY seq"
LIST = f"SELECT json_group_array({DOCUMENT}) FROM ({ROWS})"
PAGE = f"""SELECT json_object('projectList', json_group_array({DOCUMENT}),
        'page', :page, 'size', :size,
        'total', (SELECT count(*) FROM project WHERE account = :account))
    FROM ({ROWS} LIMIT :size OFFSET :page * :size)"""
EXPECTED = """id = :id AND account = :account AND (:etags IS NULL
    OR CAST(version AS TEXT) IN (SELECT value FROM json_each(:etags)))"""


class SQLiteStore:
    """The statements of the SQLite engine; Store says what the methods do."""

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        """Open the file at `path`, created if it is missing; `:memory:` is a private one.

        `clock` returns epoch seconds. Raises Unavailable, with the reason and the path.
        """
        self._database = Database(path)
        self._clock = clock
        self.close = self._database.close

    def create_project(self, account: str, members: Members, key: str = "") -> Project:
        sql = f"""INSERT INTO project
                (id, account, seq, name, postal_code, location, created_at, updated_at)
            SELECT :id, :account, coalesce(max(seq), 0) + 1,
                :name, :postal_code, :location, :now, :now
            FROM project WHERE account = :account
            ON CONFLICT (id) DO NOTHING RETURNING {PROJECT}"""
        id = project_id(account, key)
        values = dict.fromkeys(MEMBERS) | as_columns(members)
        while not (rows := self._write(sql, id=id, account=account, **values)):
            with suppress(NotFound):  # deleted just now, so it can be made again
                return self.get_project(account, id)
        return Project(*rows[0])

    def get_project(self, account: str, id: str) -> Project:
        sql = f"SELECT {PROJECT} FROM project WHERE id = :id AND account = :account"
        rows = self._database.run(sql, {"id": id, "account": account})
        if not rows:
            raise NotFound
        return Project(*rows[0])

    def update_project(
        self, account: str, id: str, members: Members, etags: Etags
    ) -> Project:
        changes = "".join(f"{name} = :{name}, " for name in members)
        sql = f"""UPDATE project
            SET {changes}version = version + 1, updated_at = max(updated_at, :now)
            WHERE {EXPECTED} RETURNING {PROJECT}"""
        columns = as_columns(members)
        return Project(*self._change(sql, etags, account=account, id=id, **columns))

    def delete_project(self, account: str, id: str, etags: Etags) -> None:
        sql = f"DELETE FROM project WHERE {EXPECTED} RETURNING id"
        self._change(sql, etags, account=account, id=id)

    def list_projects(
        self, account: str, known: Collection[str], page: int = 0, size: int = 0
    ) -> ProjectList:
        sql = f"""SELECT etag, CASE WHEN etag IN (SELECT value FROM json_each(:known))
                THEN NULL ELSE CAST(({PAGE if size else LIST}) AS BLOB) END
            FROM (SELECT printf('%s-%d-%d', max(revision), :page, :size) AS etag
                FROM account WHERE name = :account)"""
        values: Members = {"account": account, "known": json.dumps(list(known))}
        values |= {"page": page, "size": size}
        return ProjectList(*self._database.run(sql, values)[0])

    def add_token(self, account: str, digest: bytes, days: int | None = None) -> None:
        sql = """INSERT INTO token (account, digest, created_at, expires_at)
            VALUES (:account, :digest, :now, :now + :days * 86400000)"""
        self._write(sql, account=account, digest=digest, days=days)

    def find_account(self, digest: bytes) -> str | None:
        sql = """SELECT account FROM token
            WHERE digest = :digest AND (expires_at IS NULL OR expires_at > :now)"""
        rows = self._database.run(sql, {"digest": digest, "now": self._now()})
        return rows[0][0] if rows else None

    def list_tokens(self) -> list[tuple[int, str, str, str]]:
        sql = """SELECT id, strftime(:utc, created_at / 1000, 'unixepoch'),
                ifnull(strftime(:utc, expires_at / 1000, 'unixepoch'), 'never'), account
            FROM token ORDER BY id"""
        return self._database.run(sql, {"utc": "%Y-%m-%d %H:%M"})

    def revoke_token(self, id: int) -> bool:
        return bool(self._write("DELETE FROM token WHERE id = :id RETURNING id", id=id))

    def _change(self, sql: str, etags: Etags, **values: Any) -> Any:
        values |= {"etags": None if etags is None else json.dumps(list(etags))}
        rows = self._write(sql, **values)
        if rows:
            return rows[0]
        if etags is None:
            raise NotFound
        # This raises NotFound, unless it is only the ETag that did not match.
        self.get_project(values["account"], values["id"])
        raise Stale

    def _write(self, sql: str, **values: object) -> list[Any]:
        return self._database.write(sql, values | {"now": self._now()})

    def _now(self) -> int:
        return int(self._clock() * 1000)


class Database:
    """Connections to one SQLite file, and the queue of its writers.

    A connection is used by one thread at a time, and only by the process that opened it.
    SQLite alone backs off longer the longer a writer has waited, which starves it. So
    writers queue: for a lock in their process, then for an flock on the file `-lock`.
    """

    def __init__(self, path: str) -> None:
        self._idle: dict[int, list[sqlite3.Connection]] = defaultdict(list)
        self._kept: list[sqlite3.Connection] = []
        self._writer: dict[int, threading.Lock] = defaultdict(threading.Lock)
        self._patience = PATIENCE
        in_memory = path == ":memory:"
        self._path = path if in_memory else os.path.abspath(path)
        self._queue_path = None if in_memory else f"{self._path}-lock"
        self._outages = Outages(self._path)
        with self._outages:
            if self._queue_path:
                # rw: SQLite must not put an empty file in the place of a lost one.
                self._uri = f"{Path(self._path).as_uri()}?mode=rw"
                with suppress(FileExistsError):
                    os.close(os.open(self._path, os.O_CREAT | os.O_EXCL, mode=0o600))
            else:
                self._uri = f"file:/{secrets.token_hex(8)}?vfs=memdb"
                # The database lasts as long as one connection to it.
                self._kept.append(self._connect())
            self._prepare()

    def run(self, sql: str, values: Members) -> list[Any]:
        """Run a statement and fetch all its rows: only then does it commit."""
        idle = self._idle[os.getpid()]
        with self._outages:
            try:
                connection = idle.pop()
            except IndexError:
                connection = self._connect()
            try:
                rows = connection.execute(sql, values).fetchall()
            except BaseException:
                connection.close()
                raise
        idle.append(connection)
        return rows

    def write(self, sql: str, values: Members) -> list[Any]:
        """Like run, in turn with the writers of all threads and processes."""
        try:
            with self._turn():
                rows = self.run(sql, values)
        except Unavailable:
            self._patience = SHORT_PATIENCE
            raise
        self._patience = PATIENCE
        return rows

    def close(self) -> None:
        for connections in (self._idle[os.getpid()], self._kept):
            while connections:
                connections.pop().close()

    __del__ = close

    @contextmanager
    def _turn(self) -> Iterator[None]:
        deadline = time.monotonic() + self._patience
        writer = self._writer[os.getpid()]
        if not writer.acquire(timeout=self._patience):
            raise Unavailable(f"other writers take too long: {self._path}")
        with ExitStack() as turn, self._outages:
            turn.callback(writer.release)
            if self._queue_path:
                # Opened anew: an flock belongs to the open file, whoever shares that.
                queue = os.open(self._queue_path, os.O_CREAT, mode=0o600)
                turn.callback(os.close, queue)
                while not try_lock(queue):
                    if time.monotonic() > deadline:
                        raise Unavailable(f"still locked: {self._queue_path}")
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
                    connection.executescript(SCHEMA)


class Outages:
    """Raises Unavailable for what an operator can mend, or a retry can get past."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            place = error.filename or self._path
            raise Unavailable(f"{error.strerror}: {place}") from error
        if error and OUTAGE.match(getattr(error, "sqlite_errorname", "")):
            raise Unavailable(f"{error}: {self._path}") from error


def try_lock(file: int) -> bool:
    """Take the lock of the file, if nobody else has it."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
