"""Projects and access tokens: the rules of a store, and its engine on one SQLite file.

It knows nothing of HTTP, nor of what a valid Project is. The database renders a Project
as the JSON that goes over the wire. Threads and processes may share a database, and what
a method has written is on the disk when it returns.
"""

import atexit
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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet


class NotFound(Exception):
    """The account has no such Project."""


class Stale(Exception):
    """The Project's ETag is not one that the caller expects, or is one that it refuses."""


class KeyReused(Exception):
    """The account made a Project with the same key, and with other members."""


class KeySpent(Exception):
    """The account made a Project with the same key, and has deleted it."""


class Unavailable(Exception):
    """The database is locked, full or out of reach; nothing was changed."""


class OutcomeUnknown(Unavailable):
    """A write may or may not have been made: its connection or its disk failed."""


class Project(NamedTuple):
    id: str
    etag: str  # version and updated_at, so that none comes back after a restored backup
    document: bytes  # JSON


class ProjectList(NamedTuple):
    etag: str
    document: bytes | None  # None if the caller knows this etag
    next: int | None  # `after` of the page that follows, if there is one


class Page(NamedTuple):
    page: int  # from 0
    size: int  # Projects
    after: int | None = None  # starts behind this Project, whatever `page` says


class Account(NamedTuple):
    name: str
    projects: int
    tokens: int
    changed_at: int | None  # epoch milliseconds of the last change that is still there


class Caller(NamedTuple):
    account: str
    token: int  # its id


class Token(NamedTuple):
    id: int
    created_at: int  # epoch milliseconds
    expires_at: int | None  # None: never
    account: str


Members = Mapping[str, object]  # some or all of COLUMNS
Etags = Collection[str]
Values = dict[str, Any]  # of the parameters of a statement

DAY = 86_400_000  # milliseconds
LONG = 3600  # seconds that a command may take, where a request may not
# Every table with its columns, and a Project before its parts.
COLUMNS_OF = {
    "account": ("name", "revision", "created", "projects"),
    "token": ("id", "account", "digest", "created_at", "expires_at"),
    "project": (
        "id",
        "account",
        "seq",
        "name",
        "created_at",
        "updated_at",
        "version",
        "postal_code",
        "location",
    ),
    "part": ("id", "project", "kind"),
    "idempotency_key": ("account", "key", "digest", "project"),
}


class Store:
    """The rules, for either engine. Any method may raise Unavailable, one that writes
    OutcomeUnknown as well. A change finds its rows in the statement that makes it.
    """

    def __init__(
        self, engine: "Engine", clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` returns epoch seconds."""
        self.engine = engine
        self._clock = clock
        self.close = engine.close

    def create_project(
        self, account: str, members: Members, key: str | None = None
    ) -> Project:
        """Add a Project, or return the one that the account made with the same key.

        A key is remembered for good. Raises KeyReused, KeySpent.
        """
        columns = dict.fromkeys(COLUMNS) | as_columns(members)
        id = secrets.token_hex(12)
        values = {"account": account, "id": id, "now": self._now(), **columns}
        if key is None:
            return Project(*self.engine.write(self.engine.CREATE, values)[0])
        digest = digest_of(columns)
        claim = {"account": account, "key": key, "digest": digest, "project": id}
        with self.engine.transaction() as execute:
            [(made, claimed)] = execute(CLAIM, claim)
            if made == id:
                return Project(*execute(self.engine.CREATE, values)[0])
        try:
            project = self.get_project(account, made)
        except NotFound:
            raise KeySpent from None
        if claimed != digest:
            raise KeyReused
        return project

    def get_project(self, account: str, id: str) -> Project:
        """Raises NotFound."""
        rows = self.engine.run(self.engine.GET, identity(account, id))
        if not rows:
            raise NotFound
        return Project(*rows[0])

    def update_project(
        self,
        account: str,
        id: str,
        members: Members,
        expected: Etags | None = None,
        refused: Etags = (),
    ) -> Project:
        """Change these members and raise the version by 1. Raises NotFound, Stale.

        The ETag must be an expected one (None: any), and none of those refused.
        """
        columns = as_columns(members)
        changes = "".join(f"{name} = :{name}, " for name in columns)
        sql = self.engine.UPDATE.replace(":changes", changes)
        values = identity(account, id) | columns
        return Project(*self._change(sql, values, expected, refused))

    def delete_project(
        self,
        account: str,
        id: str,
        expected: Etags | None = None,
        refused: Etags = (),
    ) -> None:
        """Delete a Project and all that belongs to it. Raises NotFound, Stale."""
        self._change(self.engine.DELETE, identity(account, id), expected, refused)

    def list_projects(
        self, account: str, known: Etags, page: Page | None = None
    ) -> ProjectList:
        """All Projects, oldest first, or one page of them.

        Any change gives the account's lists etags that never come back.
        """
        values: Values = {"account": account, "known": as_list(known), "query": "-"}
        if page is None:
            [(etag, document)] = self.engine.run(self.engine.LIST, values)
            return ProjectList(etag, document, None)
        values |= page._asdict() | {"after": page.after or 0}
        values["offset"] = page.page * page.size if page.after is None else 0
        values["query"] = "".join(f"-{n}" for n in page if n is not None)
        [(etag, document)] = self.engine.run(self.engine.LIST_PAGE, values)
        if document is None:
            return ProjectList(etag, None, None)
        following, _, document = document.partition(b"\n")
        return ProjectList(etag, document, int(following) if following else None)

    def add_token(self, account: str, digest: bytes, days: int | None = None) -> int:
        """Let a token act for the account: for this many days, or without a limit.

        Returns the token's id.
        """
        now = self._now()
        sql = """INSERT INTO token (account, digest, created_at, expires_at)
            VALUES (:account, :digest, :now, :expires_at)
            RETURNING id"""
        values = {"account": account, "digest": digest, "now": now}
        values["expires_at"] = None if days is None else now + days * DAY
        [(id,)] = self.engine.write(sql, values)
        return int(id)

    def find_caller(self, digest: bytes) -> Caller | None:
        """Who calls with this token; None if it is unknown or has expired."""
        sql = """SELECT account, id FROM token
            WHERE digest = :digest AND (expires_at IS NULL OR expires_at > :now)"""
        rows = self.engine.run(sql, {"digest": digest, "now": self._now()})
        return Caller(*rows[0]) if rows else None

    def list_tokens(self) -> list[Token]:
        """Every token, in the order of the ids."""
        sql = "SELECT id, created_at, expires_at, account FROM token ORDER BY id"
        return [Token(*row) for row in self.engine.run(sql, {})]

    def revoke_token(self, id: int) -> bool:
        """Make a token invalid; False if there is none with this id."""
        sql = "DELETE FROM token WHERE id = :id RETURNING id"
        return bool(self.engine.write(sql, {"id": id}))

    def has_account(self, name: str) -> bool:
        """Whether the account has ever had a Project, or has a token."""
        sql = """SELECT name FROM account WHERE name = :name
            UNION SELECT account FROM token WHERE account = :name"""
        return bool(self.engine.run(sql, {"name": name}))

    def list_accounts(self) -> list[Account]:
        """Every account, in the order of the names."""
        return [Account(*row) for row in self.engine.run(ACCOUNTS, {})]

    def delete_account(self, name: str) -> bool:
        """Delete the account and all that is its own; False if there is none."""
        deleted = []
        with self.engine.transaction(LONG) as execute:
            # The account comes first: its row is where its writers wait for each other.
            for table in ("account", "project", "token", "idempotency_key"):
                column = "name" if table == "account" else "account"
                sql = f"DELETE FROM {table} WHERE {column} = :name RETURNING {column}"
                deleted += execute(sql, {"name": name})
        return bool(deleted)

    def check(self) -> None:
        """Raises Unavailable if the database cannot be read now."""
        self.engine.check()

    def _change(
        self, sql: str, values: Values, expected: Etags | None, refused: Etags
    ) -> Any:
        values["now"] = self._now()
        values["expected"] = None if expected is None else as_list(expected)
        values["refused"] = as_list(refused) if refused else None
        rows = self.engine.write(sql, values)
        if rows:
            return rows[0]
        if expected is None and not refused:
            raise NotFound
        # This raises NotFound, unless it is only the ETag that did not match.
        self.get_project(values["account"], values["id"])
        raise Stale

    def _now(self) -> int:
        return int(self._clock() * 1000)


def identity(account: str, id: str) -> Values:
    # No id has U+0000, which PostgreSQL cannot hold: it is that of no Project either way.
    return {"account": account, "id": id.replace("\0", "?")}


def as_list(etags: Etags) -> str:
    """The ETags as JSON, without any that holds U+0000: PostgreSQL would refuse it."""
    return json.dumps([etag for etag in etags if "\0" not in etag])


def as_columns(members: Members) -> Values:
    """The members as they are stored. Raises KeyError for one that has no column."""
    return {name: COLUMNS[name](value) for name, value in members.items()}


def digest_of(columns: Values) -> bytes:
    """The SHA-256 digest by which members sent with the same key are compared.

    It is the same in every release: of the members that came after 1.2.0, those that are
    null are left out.
    """
    compared = {
        name: value
        for name, value in columns.items()
        if name in MEMBERS_OF_1_2 or value is not None
    }
    return hashlib.sha256(json.dumps(compared).encode()).digest()


def as_text(value: Any) -> Any:
    return value


def as_json(value: Any) -> Any:
    """Compact, as it goes over the wire."""
    return value and json.dumps(value, separators=(",", ":"))


# The members that a caller sets, each with what turns its value into that of its column.
COLUMNS = {"name": as_text, "postal_code": as_text, "location": as_json}
MEMBERS_OF_1_2 = ("name", "postal_code", "location")
LIST_ETAG = """(SELECT coalesce(
    (SELECT revision FROM account WHERE name = :account), '') || :query AS etag) AS list"""
CLAIM = """INSERT INTO idempotency_key (account, key, digest, project)
    VALUES (:account, :key, :digest, :project)
    ON CONFLICT (account, key) DO UPDATE SET digest = idempotency_key.digest
    RETURNING project, digest"""
ACCOUNTS = """SELECT known.name, coalesce(projects, 0), coalesce(tokens, 0), changed_at
    FROM (SELECT name FROM account UNION SELECT account FROM token) AS known
    LEFT JOIN account ON account.name = known.name
    LEFT JOIN (SELECT account, max(updated_at) AS changed_at
        FROM project GROUP BY account) AS p ON p.account = known.name
    LEFT JOIN (SELECT account, count(*) AS tokens
        FROM token GROUP BY account) AS t ON t.account = known.name
    ORDER BY known.name"""
TOTAL = "coalesce((SELECT projects FROM account WHERE name = :account), 0)"
PAGE_ROWS = """project WHERE account = :account AND seq > :after
    ORDER BY seq LIMIT :size OFFSET :offset"""
# `after` of the page that follows; null behind the last Project.
NEXT = "nullif(max(seq), (SELECT max(seq) FROM project WHERE account = :account))"
COUNT_CREATED = """UPDATE account SET created =
    (SELECT coalesce(max(seq), 0) FROM project WHERE account = account.name)"""
COUNT_PROJECTS = """UPDATE account
    SET projects = (SELECT count(*) FROM project WHERE account = account.name)"""
APPLICATION_ID = 0x67617264  # "gard": the database is ours
LAYOUT = 3  # of the tables
# The tables that are the same in both engines, in SQLite's words for the types.
KEYS = """
CREATE TABLE idempotency_key (                      -- outlives its Project: it is spent
    account     TEXT    NOT NULL,
    key         TEXT    NOT NULL,
    digest      BLOB    NOT NULL,                   -- SHA-256 of the members
    project     TEXT    NOT NULL,
    PRIMARY KEY (account, key)
) STRICT, WITHOUT ROWID;
"""
COMMON = f"""
CREATE TABLE token (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,  -- a late revoke hits no newer token
    account     TEXT    NOT NULL,
    digest      BLOB    NOT NULL UNIQUE,            -- SHA-256
    created_at  INTEGER NOT NULL,                   -- all times in epoch milliseconds
    expires_at  INTEGER                             -- NULL: never
) STRICT;
CREATE TABLE project (
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
{KEYS}
CREATE TABLE part (                                 -- a region, zone, parcel, controller
    id          TEXT    PRIMARY KEY,
    project     TEXT    NOT NULL REFERENCES project (id) ON DELETE CASCADE,
    kind        TEXT    NOT NULL
) STRICT;
-- Without this index, deleting a Project would scan all parts.
CREATE INDEX part_project ON part (project);
"""


class Engine:
    """A database: its tables, the statements that are its own, and its connections.

    A connection is used by one thread at a time, and only by the process that opened it.
    A class of an engine says how to connect and execute, and which errors are an outage.
    """

    TABLES: str  # of the present layout
    UPGRADES: tuple[str, ...]  # the steps to it: from layout 1 to 2, from 2 to 3, …
    GET: str  # its rows are Projects, as are those of the next two
    CREATE: str
    UPDATE: str  # with :changes for the columns to set
    DELETE: str
    LIST: str  # its row is the etag, and the document unless the etag is known
    LIST_PAGE: str  # likewise; before the document, on a line of its own, stands `next`
    BEGIN: str  # a transaction that writes
    BEGIN_READ: str  # one that reads the state of one moment
    BEGIN_FILL: str  # one that writes, and lets nobody else do so
    LAST_TOKEN: str  # the highest id that a token has had
    SET_LAST_TOKEN: tuple[str, ...]
    STOP_TRIGGERS: tuple[str, ...]
    START_TRIGGERS: tuple[str, ...]
    take: Callable[[list[Any]], Any]  # a connection that is open: an idle or a new one
    execute: Callable[[Any, str, Values], list[Any]]  # all rows
    read: Callable[[Any, str], Any]  # a cursor over the rows of a SELECT
    fill: Callable[[Any, str, tuple[str, ...], Any], None]  # a table, with these rows
    # Raises Unavailable, or OutcomeUnknown for a write, unless the error is a defect.
    raise_outage: Callable[[BaseException, bool], None]

    def __init__(self) -> None:
        self._idle: dict[int, list[Any]] = defaultdict(list)

    def run(self, sql: str, values: Values, writes: bool = False) -> list[Any]:
        """All rows of a statement, which is a transaction of its own. Raises Unavailable."""
        idle, connection = self._idle[os.getpid()], None
        try:
            connection = self.take(idle)
            rows = self.execute(connection, sql, values)
        except BaseException as error:
            self.give_up(connection, error, writes)
            raise
        idle.append(connection)
        return rows

    def write(self, sql: str, values: Values) -> list[Any]:
        """Like run, for a statement that writes. Raises OutcomeUnknown as well."""
        return self.run(sql, values, writes=True)

    def check(self) -> None:
        """Read something now. Raises Unavailable."""
        self.run("SELECT id FROM token LIMIT 1", {})

    @contextmanager
    def transaction(
        self, seconds: int = 0
    ) -> Iterator[Callable[[str, Values], list[Any]]]:
        """For several statements that write: all of them are made, or none."""
        with self.session(self.BEGIN, seconds) as connection:
            yield partial(self.execute, connection)

    @contextmanager
    def session(self, begin: str, seconds: int = 0) -> Iterator[Any]:
        """A connection in a transaction, which may take so long; 0: as for a request."""
        idle, connection = self._idle[os.getpid()], None
        try:
            connection = self.take(idle)
            if seconds:
                self.allow(connection, seconds)
            connection.execute(begin)
            yield connection
            connection.execute("COMMIT")
        except BaseException as error:
            self.give_up(connection, error, writes=True)
            raise
        if seconds:
            connection.close()
        else:
            idle.append(connection)

    def allow(self, connection: Any, seconds: int) -> None:
        """Let its statements take so long."""

    def give_up(self, connection: Any, error: BaseException, writes: bool) -> None:
        """Close the connection; raise Unavailable if the error is an outage, no defect."""
        if connection is not None:
            connection.close()
        # Without a connection, nothing was sent that might have been made.
        self.raise_outage(error, writes and connection is not None)

    def upgrades(self, layout: int | None, tables: int) -> tuple[str, ...]:
        """What brings a database of so many tables up to date, if its mark is this.

        Raises Unavailable if it has no mark of ours, or that of a newer release.
        """
        if not tables:
            return (self.TABLES,)
        if layout is None or not 1 <= layout <= LAYOUT:
            made = "a newer release" if (layout or 0) > LAYOUT else "another program"
            raise Unavailable(f"the database was made by {made}")
        return self.UPGRADES[layout - 1 :]

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
LOOK_INTERVAL = 1.0  # seconds after which a read looks again whether the file is there
OUTAGE = re.compile(  # what an operator can mend, or a retry can get past
    "SQLITE_(BUSY|LOCKED|READONLY|IOERR|CORRUPT|FULL|CANTOPEN|PROTOCOL|NOTADB)"
)
# Closing a file drops every POSIX lock that the process has on it, SQLite's as well. So a
# database that exists is opened by SQLite alone, and while one thread creates a file, by
# process id, no other opens it.
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
TABLES = f"""
-- The revision validates an account's lists. It is random, since a counter would
-- return to earlier values when a backup is restored.
CREATE TABLE account (
    name        TEXT    PRIMARY KEY,
    revision    TEXT    NOT NULL,
    created     INTEGER NOT NULL DEFAULT 0,         -- Projects ever: the last one's seq
    projects    INTEGER NOT NULL DEFAULT 0          -- Projects now
) STRICT;
{COMMON}
{";".join(TRIGGERS)};
PRAGMA application_id = {APPLICATION_ID};
"""
DROP_TRIGGERS = (
    "DROP TRIGGER project_insert",
    "DROP TRIGGER project_update",
    "DROP TRIGGER project_delete",
)
LAYOUT_2 = f"""
ALTER TABLE account ADD COLUMN created INTEGER NOT NULL DEFAULT 0;
{COUNT_CREATED};
{KEYS}
"""
LAYOUT_3 = f"""
ALTER TABLE account ADD COLUMN projects INTEGER NOT NULL DEFAULT 0;
{COUNT_PROJECTS};
{";".join([*DROP_TRIGGERS, *TRIGGERS])};
"""

ETAG = "version || '-' || updated_at"
DOCUMENT = """json_object(
    'id', id, 'name', name, 'created_at', created_at, 'updated_at', updated_at,
    'version', version, 'postal_code', postal_code, 'location', json(location))"""
ROW = f"id, {ETAG}, CAST({DOCUMENT} AS BLOB)"
EXPECTED = f"""id = :id AND account = :account
    AND (:expected IS NULL OR {ETAG} IN (SELECT value FROM json_each(:expected)))
    AND (:refused IS NULL OR {ETAG} NOT IN (SELECT value FROM json_each(:refused)))"""
IS_KNOWN = "etag IN (SELECT value FROM json_each(:known))"


class SQLite(Engine):
    """One file, and the queue of its writers.

    SQLite alone backs off longer the longer a writer has waited, which starves it. So
    writers queue: for a lock in their process, then for an flock on the file `-lock`.
    """

    TABLES = TABLES
    UPGRADES = (LAYOUT_2, LAYOUT_3)
    BEGIN = BEGIN_FILL = "BEGIN IMMEDIATE"
    BEGIN_READ = "BEGIN"
    LAST_TOKEN = (
        "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'token'"
    )
    SET_LAST_TOKEN = (
        "DELETE FROM sqlite_sequence WHERE name = 'token'",
        "INSERT INTO sqlite_sequence (name, seq) VALUES ('token', :last)",
    )
    STOP_TRIGGERS = DROP_TRIGGERS
    START_TRIGGERS = TRIGGERS
    GET = f"SELECT {ROW} FROM project WHERE id = :id AND account = :account"
    CREATE = f"""INSERT INTO project
            (id, account, seq, created_at, updated_at, {", ".join(COLUMNS)})
        SELECT :id, :account,
            coalesce((SELECT created FROM account WHERE name = :account), 0) + 1,
            :now, :now, :{", :".join(COLUMNS)}
        RETURNING {ROW}"""
    UPDATE = f"""UPDATE project
        SET :changes version = version + 1, updated_at = max(updated_at, :now)
        WHERE {EXPECTED} RETURNING {ROW}"""
    DELETE = f"DELETE FROM project WHERE {EXPECTED} RETURNING id"
    # json_group_array keeps the order of the rows of its subquery.
    LIST = f"""SELECT etag, CASE WHEN NOT {IS_KNOWN} THEN CAST((
            SELECT json_group_array({DOCUMENT}) FROM (
                SELECT * FROM project WHERE account = :account ORDER BY seq)) AS BLOB) END
        FROM {LIST_ETAG}"""
    LIST_PAGE = f"""SELECT etag, CASE WHEN NOT {IS_KNOWN} THEN CAST((
            SELECT coalesce({NEXT}, '') || char(10) || json_object(
                'projectList', json_group_array({DOCUMENT}),
                'page', :page, 'size', :size, 'total', {TOTAL})
            FROM (SELECT * FROM {PAGE_ROWS})) AS BLOB) END
        FROM {LIST_ETAG}"""

    def __init__(self, path: str) -> None:
        """Open the file at `path`, created if it is missing; `:memory:` is a private one.

        Raises Unavailable, with the reason and the path.
        """
        super().__init__()
        self._kept: list[sqlite3.Connection] = []
        self._writer: dict[int, threading.Lock] = defaultdict(threading.Lock)
        self._patience = PATIENCE
        self._looked_at = 0.0  # as time.monotonic() has it
        self._path = path if path == ":memory:" else os.path.abspath(path)
        self._queue = "" if path == ":memory:" else f"{self._path}-lock"
        try:
            if self._queue:
                # rw: SQLite must not put an empty file in the place of a lost one.
                self._uri = f"{Path(self._path).as_uri()}?mode=rw"
                wal = f"{self._path}-wal"
                if os.path.exists(wal) and not os.path.exists(self._path):
                    # SQLite would delete it, and with it what was acknowledged last.
                    raise Unavailable(f"without its database, move this away: {wal}")
                with CREATING[os.getpid()]:
                    create(os.path.realpath(self._path))
                self._file = os.stat(self._path)
                ENGINES.add(self)
            else:
                self._uri = f"file:/{secrets.token_hex(8)}?vfs=memdb"
                # The database lasts as long as one connection to it.
                self._kept.append(self.connect())
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            self.raise_outage(error, writes=False)
            raise

    def write(self, sql: str, values: Values) -> list[Any]:
        """Like run, in turn with the writers of all threads and processes."""
        with self._turn():
            return super().write(sql, values)

    def check(self) -> None:
        self._check_file(Unavailable)
        super().check()

    @contextmanager
    def session(self, begin: str, seconds: int = 0) -> Iterator[Any]:
        with ExitStack() as stack:
            if begin == self.BEGIN:
                stack.enter_context(self._turn())
            yield stack.enter_context(super().session(begin, seconds))

    def take(self, idle: list[Any]) -> "Connection":
        if not idle or time.monotonic() - self._looked_at > LOOK_INTERVAL:
            self._check_file(Unavailable)
        while connection := pop(idle):
            if connection.patience == self._patience:
                return connection  # type: ignore[no-any-return]
            connection.close()
        return self.connect()

    def execute(
        self, connection: sqlite3.Connection, sql: str, values: Values
    ) -> list[Any]:
        return connection.execute(sql, values).fetchall()  # only then it commits

    def raise_outage(self, error: BaseException, writes: bool) -> None:
        if isinstance(error, OSError):
            place = error.filename or self._path
            raise Unavailable(f"{error.strerror}: {place}") from error
        name = getattr(error, "sqlite_errorname", "")
        if OUTAGE.match(name):
            # A commit that could not be synced may yet be found after a crash.
            unknown = writes and name.startswith("SQLITE_IOERR")
            raised = OutcomeUnknown if unknown else Unavailable
            raise raised(f"{error}: {self._path}") from error

    def close(self) -> None:
        """Close the connections that are idle, and with them a database in memory.

        What is in the -wal of a file that was replaced goes home to that file first:
        SQLite leaves it there, and would apply it to the new file at the next start.
        """
        while connection := pop(self._idle[os.getpid()]):
            if not self._has_its_name():
                with suppress(sqlite3.Error):
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.close()
        while (connection := pop(self._kept)) is not None:
            connection.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        deadline = time.monotonic() + self._patience
        writer = self._writer[os.getpid()]
        with ExitStack() as turn:
            try:
                if not writer.acquire(timeout=self._patience):
                    raise Unavailable(f"other writers take too long: {self._path}")
                turn.callback(writer.release)
                if self._queue:
                    if not os.path.exists(self._queue):
                        create(self._queue)
                    turn.enter_context(locked(self._queue, deadline))
                self._check_file(Unavailable)
                yield
                self._check_file(OutcomeUnknown)
            except Unavailable:
                self._patience = SHORT_PATIENCE
                raise
            self._patience = PATIENCE

    def _check_file(self, error: type[Unavailable]) -> None:
        """A file that was removed or replaced takes writes that nobody would find."""
        self._looked_at = time.monotonic()
        if not self._has_its_name():
            self._looked_at = 0.0
            self.close()
            reason = "the file was removed or replaced; restart the service to use"
            raise error(f"{reason} {self._path}")

    def _has_its_name(self) -> bool:
        if not self._queue:
            return True
        try:  # without samestat, which costs a third more
            found, file = os.stat(self._path), self._file
        except FileNotFoundError:
            return False
        return found.st_ino == file.st_ino and found.st_dev == file.st_dev

    def connect(self) -> "Connection":
        connection = sqlite3.connect(
            self._uri,
            uri=True,
            timeout=self._patience,
            isolation_level=None,  # each statement is a transaction
            check_same_thread=False,  # any thread takes a connection that is idle
            factory=Connection,
        )
        connection.patience = self._patience
        try:
            self._check_file(Unavailable)  # nothing but the file's name is read so far
            connection.execute("PRAGMA foreign_keys = ON")  # off by default
            connection.execute("PRAGMA synchronous = FULL")  # NORMAL may lose commits
        except (sqlite3.Error, Unavailable):
            connection.close()
            raise
        return connection

    def _prepare(self) -> None:
        """Create the tables or bring them up to date; leave alone what is not ours.

        Closes its connection, since none may be carried across a server's fork.
        """
        with closing(self.connect()) as connection:
            if self._missing(connection):
                with self._turn():  # in which another process may have been first
                    connection.execute("PRAGMA journal_mode = WAL")
                    connection.executescript(
                        f"""BEGIN IMMEDIATE; {"".join(self._missing(connection))}
                        PRAGMA user_version = {LAYOUT}; COMMIT;"""
                    )

    def _missing(self, connection: "Connection") -> list[str]:
        """The steps to the present layout; an empty one if only WAL is missing."""
        [(application, layout, tables)] = connection.execute(
            """SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)
            FROM pragma_application_id, pragma_user_version"""
        ).fetchall()
        [(mode,)] = connection.execute("PRAGMA journal_mode").fetchall()
        steps = self.upgrades(layout if application == APPLICATION_ID else None, tables)
        return [*steps, *[""] * (mode == "delete")]


ENGINES: WeakSet[SQLite] = WeakSet()  # those on a file


@atexit.register
def close_all() -> None:
    """Leave the files in order: at its end, Python may not call __del__."""
    for engine in list(ENGINES):
        engine.close()


class Connection(sqlite3.Connection):
    patience: float  # seconds that it waits for SQLite's locks


def create(path: str) -> None:
    """Create a file that only its owner can read, unless there is one."""
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL, mode=0o600)
    except FileExistsError:
        return
    os.close(file)
    give_to_owner(path)


def give_to_owner(path: str) -> None:
    """Give what root creates, as `flask token` may, to the owner of the folder."""
    if os.geteuid() == 0:
        folder = os.stat(os.path.dirname(os.path.abspath(path)))
        os.chown(path, folder.st_uid, folder.st_gid)


@contextmanager
def locked(path: str, deadline: float) -> Iterator[None]:
    """Hold an flock on the file, if it can be had in time. Raises Unavailable."""
    try:
        # Opened anew: an flock belongs to the open file, whoever shares that.
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise Unavailable(f"{error.strerror}: {path}") from error
    try:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise Unavailable(f"still locked: {path}")
            time.sleep(POLL_INTERVAL)
        try:
            yield
        finally:
            # Not by the close alone: a process forked meanwhile keeps the file open.
            fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)
