"""Projects and access tokens in one SQLite file: all SQL of the service.

It knows nothing of HTTP, nor of what a valid Project is. A Project leaves as the JSON
that goes over the wire, rendered by SQLite. Threads and processes may share the file,
and what a method has written is on the disk when it returns.
"""

import fcntl
import json
import os
import secrets
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from sqlite3 import Row

BUSY_TIMEOUT = 5.0  # seconds that a write waits for the lock of another program
APPLICATION_ID = 0x67617264  # "gard": the file is ours
LAYOUT = 1  # of the tables, kept as PRAGMA user_version
SCHEMA = f"""
BEGIN IMMEDIATE;
-- The revision validates an account's lists. It is random: after a backup is restored,
-- a counter would come to earlier values again.
CREATE TABLE IF NOT EXISTS account (
    name        TEXT    PRIMARY KEY,
    revision    TEXT    NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS token (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,  -- so a late revoke hits no other one
    account     TEXT    NOT NULL,
    digest      BLOB    NOT NULL UNIQUE,
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
) STRICT, WITHOUT ROWID; -- so the table is in this order, and a list is one range of it
CREATE TABLE IF NOT EXISTS part (                   -- a region, zone, parcel, controller
    id          TEXT    PRIMARY KEY,
    project     TEXT    NOT NULL REFERENCES project (id) ON DELETE CASCADE,
    kind        TEXT    NOT NULL
) STRICT;
-- Without it the delete of a Project would scan all parts.
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

SETTABLE = ("name", "postal_code", "location")
DOCUMENT = """json_object(
    'id', id, 'name', name, 'created_at', created_at, 'updated_at', updated_at,
    'version', version, 'postal_code', postal_code, 'location', json(location))"""
PROJECT = f"id, CAST(version AS TEXT) AS etag, CAST({DOCUMENT} AS BLOB) AS document"
EXPECTED = """id = :id AND account = :account AND (:etags IS NULL
    OR CAST(version AS TEXT) IN (SELECT value FROM json_each(:etags)))"""
LIST_ETAG = """printf('%s-%d-%d',
    (SELECT revision FROM account WHERE name = :account), :page, :size)"""
OWN = "SELECT * FROM project WHERE account = :account ORDER BY seq"
LIST = f"SELECT json_group_array({DOCUMENT}) FROM ({OWN})"
PAGE = f"""SELECT json_object('projectList', json_group_array({DOCUMENT}),
    'page', :page, 'size', :size,
    'total', (SELECT count(*) FROM project WHERE account = :account))
    FROM ({OWN} LIMIT :size OFFSET :page * :size)"""
Etags = list[str] | None  # of which a change expects one; None: any will do


class NotFound(Exception):
    """The account has no such Project."""


class Stale(Exception):
    """The Project's ETag is none of those that the caller expects."""


class Unavailable(OSError):
    """The database is locked, full or out of reach; nothing was changed."""


class Store:
    """Projects come as rows of id, etag and document; any method raises Unavailable."""

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        """Open the database at `path`, made if it is missing, or one in `:memory:`.

        `clock` gives epoch seconds. Raises OSError, with the path and the reason.
        """
        self._clock = clock
        self._idle: list[sqlite3.Connection] = []
        weakref.finalize(self, _close_all, self._idle)
        if path == ":memory:":
            self._path, self._uri = None, f"file:/{secrets.token_hex(8)}?vfs=memdb"
            # The database lasts as long as one connection to it.
            weakref.finalize(self, self._connect().close)
        else:
            self._path = os.path.abspath(path)
            # rw: no empty database takes the place of one that is lost.
            self._uri = f"{Path(self._path).as_uri()}?mode=rw"
            with suppress(FileExistsError):
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL, mode=0o600))
        try:
            self._prepare()
        except sqlite3.Error as error:
            raise Unavailable(f"{error}: {self._path}") from error

    def create_project(self, account: str, members: dict) -> Row:
        """Add a Project; what `members` leaves out is null."""
        sql = f"""INSERT INTO project
                (id, account, seq, name, postal_code, location, created_at, updated_at)
            SELECT :id, :account, coalesce(max(seq), 0) + 1,
                :name, :postal_code, :location, :now, :now
            FROM project WHERE account = :account
            RETURNING {PROJECT}"""
        members = dict.fromkeys(SETTABLE) | members
        return self._write(sql, id=secrets.token_hex(12), account=account, **members)[0]

    def get_project(self, account: str, id: str) -> Row:
        """Raises NotFound."""
        sql = f"SELECT {PROJECT} FROM project WHERE id = :id AND account = :account"
        for project in self._read(sql, {"id": id, "account": account}):
            return project
        raise NotFound

    def update_project(self, account: str, id: str, members: dict, etags: Etags) -> Row:
        """Change `members` and raise the version by 1. Raises NotFound, Stale."""
        changes = "".join(f"{name} = :{name}, " for name in SETTABLE if name in members)
        sql = f"""UPDATE project
            SET {changes}version = version + 1, updated_at = max(updated_at, :now)
            WHERE {EXPECTED}
            RETURNING {PROJECT}"""
        for project in self._write(sql, id=id, account=account, etags=etags, **members):
            return project
        raise self._refusal(account, id)

    def delete_project(self, account: str, id: str, etags: Etags) -> None:
        """Delete a Project and what belongs to it. Raises NotFound, Stale."""
        sql = f"DELETE FROM project WHERE {EXPECTED} RETURNING id"
        if not self._write(sql, id=id, account=account, etags=etags):
            raise self._refusal(account, id)

    def _refusal(self, account: str, id: str) -> Exception:
        """Why a change met no row. It may be asked late: no id is used twice."""
        self.get_project(account, id)
        return Stale()

    def list_projects(
        self, account: str, known: list[str], page: int = 0, size: int | None = None
    ) -> Row:
        """All Projects, oldest first, or with `size` a page of them: etag and document.

        The etag is new after any change, for good; a `known` one spares the document.
        """
        sql = f"""SELECT etag, CASE WHEN etag IN (SELECT value FROM json_each(:known))
                THEN NULL ELSE CAST(({PAGE if size else LIST}) AS BLOB) END AS document
            FROM (SELECT {LIST_ETAG} AS etag)"""
        parameters = {"account": account, "known": json.dumps(known)}
        return self._read(sql, parameters | {"page": page, "size": size})[0]

    def add_token(self, account: str, digest: bytes, days: int | None = None) -> None:
        """Let a token act for the account, for so many days or for ever."""
        sql = """INSERT INTO token (account, digest, created_at, expires_at)
            VALUES (:account, :digest, :now, :now + :days * 86400000)"""
        self._write(sql, account=account, digest=digest, days=days)

    def find_account(self, digest: bytes) -> str | None:
        """The account that a token acts for; None if it is unknown or has expired."""
        sql = """SELECT account FROM token
            WHERE digest = :digest AND (expires_at IS NULL OR expires_at > :now)"""
        for (account,) in self._read(sql, {"digest": digest, "now": self._now()}):
            return account

    def list_tokens(self) -> list[Row]:
        """Rows of id, creation and expiry (UTC, as text), and account."""
        text = "strftime('%Y-%m-%d %H:%M', {} / 1000, 'unixepoch')".format
        created, expires = text("created_at"), text("expires_at")
        sql = f"SELECT id, {created}, coalesce({expires}, 'never'), account FROM token"
        return self._read(sql, {})

    def revoke_token(self, id: int) -> bool:
        """Make a token invalid; False if there is none with this id."""
        return bool(self._write("DELETE FROM token WHERE id = :id RETURNING id", id=id))

    def _write(self, sql: str, **parameters: object) -> list[Row]:
        for name, value in parameters.items():
            if isinstance(value, (list, dict)):
                parameters[name] = json.dumps(value)
        return self._read(sql, parameters | {"now": self._now()}, self._turn)

    def _read(
        self, sql: str, parameters: dict, turn: Callable = nullcontext
    ) -> list[Row]:
        """All rows, since a statement commits only at its end."""
        try:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connect()
            try:
                with turn(connection):
                    rows = connection.execute(sql, parameters).fetchall()
            except:
                connection.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise Unavailable(f"{error}: {self._path}") from error
        self._idle.append(connection)
        return rows

    def _now(self) -> int:
        return int(self._clock() * 1000)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._uri,
            uri=True,
            timeout=BUSY_TIMEOUT,
            isolation_level=None,  # each statement is a transaction
            check_same_thread=False,  # any thread takes one that is idle
        )
        connection.row_factory = Row
        try:
            connection.execute("PRAGMA foreign_keys = ON")  # off by default
            connection.execute("PRAGMA synchronous = FULL")  # NORMAL may lose commits
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    @contextmanager
    def _turn(self, connection: sqlite3.Connection) -> Iterator[None]:
        """Wait in one queue with the writers of all processes.

        SQLite alone has a writer sleep longer the longer it waits, so that it starves.
        """
        if not self._path:
            yield
            return
        deadline = time.monotonic() + BUSY_TIMEOUT
        # Opened for each turn: an flock belongs to the open file, whoever shares it.
        queue = os.open(f"{self._path}-lock", os.O_RDWR | os.O_CREAT, mode=0o600)
        try:
            fcntl.flock(queue, fcntl.LOCK_EX)
            # Under a foreign lock the whole queue gives up at once, not one by one.
            rest = max(0, deadline - time.monotonic())
            connection.execute(f"PRAGMA busy_timeout = {rest * 1000:.0f}")
            yield
            connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT * 1000:.0f}")
        finally:
            os.close(queue)

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
                raise sqlite3.Error("made by another program or a newer release")
            with self._turn(connection):
                connection.execute("PRAGMA journal_mode = WAL")
                if not tables:
                    connection.executescript(SCHEMA)


def _close_all(connections: list[sqlite3.Connection]) -> None:
    while connections:
        connections.pop().close()
