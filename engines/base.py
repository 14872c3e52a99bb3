"""What an engine is: one kind of database, with its statements and connections."""

import json
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from engines.migrations import EMPTY, SCHEMA_VERSION, Migrations, incompatibility

Parameters = dict[str, Any]  # of a statement, by name
Rows = list[Any]
Columns = dict[str, object]  # some of a Project's, as they are stored
REQUEST_TIMEOUT = 4.5  # seconds for a statement or a transaction of a request
COMMAND_TIMEOUT = 3600  # seconds for a backup, a restore, a migration, a deletion
PAUSE = 1.0  # seconds for which a breaker refuses everybody
TRIAL_INTERVAL = 5.0  # seconds between two callers whom a half-open breaker admits


class Unavailable(Exception):
    """The database is locked, full or out of reach.

    Nothing was changed, except perhaps by a write that raises OutcomeUnknown.
    """


class OutcomeUnknown(Unavailable):
    """A write may or may not have been made: its connection or its disk failed."""


class Project(NamedTuple):
    id: str
    etag: str  # version and updated_at: never the same for other content, even after a restore
    document: bytes  # JSON


class KeyedProject(NamedTuple):
    project: Project
    fingerprint: bytes  # of the request that created it


class ProjectPage(NamedTuple):
    """A part of an account's list."""

    total: int | None  # all Projects of the account; None if it has no row
    next_after: int | None  # the seq of the last Project here, if more follow
    documents: bytes  # a JSON array


class Precondition(NamedTuple):
    """Which ETags a Project may have, for a change to be made (RFC 9110 13.1)."""

    if_match: Sequence[str] | None = None  # one of these; None: any
    if_none_match: Sequence[str] = ()  # none of these

    def allows(self, etag: str) -> bool:
        is_named = self.if_match is None or etag in self.if_match
        return is_named and etag not in self.if_none_match


class Connection(ABC):
    """A connection, used by one thread at a time.

    A statement names its parameters `:account`, `:id` and so on, and nothing else in it has that
    form. It has no `%`. It is a transaction of its own unless `begin` was called.
    """

    # GET, CREATE and UPDATE return the Project's id, ETag and document, or no row.
    GET: str
    # The columns of a ProjectPage: up to :size Projects with seq > :after, skipping :offset.
    LIST: str
    # The last of them returns the Project. If the account is full or has the key, one returns no
    # row, and the rest must not run.
    CREATE: tuple[str, ...]
    # <changes> stands for assignments to columns, each with a comma after it.
    UPDATE: str
    # Returns the id, or no row.
    DELETE: str

    def get_project(self, account: str, id: str) -> Project | None:
        # PostgreSQL refuses U+0000 in text. No id contains a "?", so this finds no Project.
        rows = self.fetch(self.GET, {"account": account, "id": id.replace("\0", "?")})
        return Project(*rows[0]) if rows else None

    def list_projects(self, account: str, size: int, after: int, offset: int) -> ProjectPage:
        page = {"account": account, "size": size, "after": after, "offset": offset}
        [row] = self.fetch(self.LIST, page)
        return ProjectPage(*row)

    def create_project(
        self, account: str, id: str, columns: Columns, now: int, limit: int
    ) -> Project | None:
        """Add a Project with these columns.

        None if the account has the key, or `limit` Projects or more. Then a transaction has to be
        rolled back.
        """
        parameters = columns | {
            "account": account,
            "id": id,
            "now": now,
            "limit": limit,
        }
        rows: Rows = []
        for statement in self.CREATE:
            rows = self.fetch(statement, parameters)
            if not rows:
                return None
        return Project(*rows[0])

    def find_by_key(self, account: str, key: str | None) -> KeyedProject | None:
        """The account's Project that has this key."""
        rows = self.fetch(
            "SELECT id, fingerprint FROM project WHERE account = :account AND key = :key",
            {"account": account, "key": key},
        )
        for id, fingerprint in rows:
            if project := self.get_project(account, id):
                return KeyedProject(project, fingerprint)
        return None

    def update_project(
        self, account: str, id: str, columns: Columns, now: int, condition: Precondition
    ) -> Project | None:
        """Change these columns; None if the condition fails or there is no such Project."""
        changes = "".join(f"{name} = :{name}, " for name in columns)
        parameters = change_parameters(account, id, condition) | columns | {"now": now}
        rows = self.fetch(self.UPDATE.replace("<changes>", changes), parameters)
        return Project(*rows[0]) if rows else None

    def delete_project(self, account: str, id: str, condition: Precondition) -> bool:
        """False if the condition fails or there is no such Project."""
        return bool(self.fetch(self.DELETE, change_parameters(account, id, condition)))

    def needs_transaction(self, has_key: bool) -> bool:
        """Whether one change, perhaps the creation of a Project with a key, is a transaction."""
        return False

    @abstractmethod
    def fetch(self, sql: str, parameters: Parameters) -> Rows:
        """Run a statement and return all its rows."""

    @abstractmethod
    def begin(self, seconds: float) -> None:
        """Begin a transaction that writes, and may take this long."""

    @abstractmethod
    def commit(self) -> None:
        """Commit the transaction, if there is one."""

    @abstractmethod
    def rollback(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def is_usable(self) -> bool:
        """Whether an idle connection can serve another request."""
        return True

    @abstractmethod
    def bring_up_to_date(self, engine: "Engine", creates: bool) -> int:
        """Migrate the tables, or create them; leave alone what is not ours.

        Returns the schema version that they had. Raises Unavailable: see Engine.scripts_for.
        """

    # For backup and restore alone:

    @abstractmethod
    def begin_snapshot(self) -> None:
        """Begin a long transaction that sees the database as it is at its first statement.

        On a cluster, each account is seen as it is at a moment of its own.
        """

    @abstractmethod
    def stream(self, sql: str) -> Generator[Any]:
        """The rows of a statement, one by one, without holding all of them in memory."""

    @abstractmethod
    def insert(self, table: str, columns: Iterable[str], rows: Iterable[Any]) -> None:
        """Add the rows to a table."""

    def advance_token_sequence(self) -> None:
        """Let the ids of tokens go on after those that were inserted."""


def change_parameters(account: str, id: str, condition: Precondition) -> Parameters:
    if_match, if_none_match = condition
    return {
        "account": account,
        "id": id.replace("\0", "?"),  # as in get_project
        "if_match": None if if_match is None else json.dumps(if_match),
        # None, so that the database parses nothing.
        "if_none_match": json.dumps(if_none_match) if if_none_match else None,
    }


class Breaker:
    """A circuit breaker: after a caller's timeout, others are refused for a while.

    A timeout opens it for PAUSE seconds, in which it admits nobody. Then it is half-open: one
    caller may try, and one more after each TRIAL_INTERVAL. Any response closes it, even an error,
    and even one to a caller who was admitted earlier.
    """

    def __init__(self) -> None:
        self.is_open = False  # read and reset by Acquisition, where calls would slow each read
        self._retry_at = 0.0  # on the clock of time.monotonic()

    def admit(self) -> None:
        """Let a caller try although the breaker is open, or raise Unavailable."""
        now = time.monotonic()
        if now < self._retry_at:
            raise Unavailable("not tried: requests have just timed out")
        self._retry_at = now + TRIAL_INTERVAL

    def open(self) -> None:
        self._retry_at = time.monotonic() + PAUSE
        self.is_open = True


class Engine(ABC):
    """A database: its connections, and what their errors mean.

    Idle connections are kept by process id, since after a fork the child may neither use nor close
    those of its parent.
    """

    SCHEMA: str  # the name of the file with the tables
    MIGRATIONS: Migrations
    ERROR: type[Exception]  # the base of the driver's errors
    name: str  # of the database, as an operator knows it, without a password
    folder: str | None = None  # where the database is, if it is a file
    is_default = False  # no setting names the database

    def __init__(self) -> None:
        self.idle: dict[int, list[Connection]] = defaultdict(list)
        self.read_breaker, self.write_breaker = Breaker(), Breaker()
        self.is_up_to_date = False
        self.was_created = False  # the database, by `open_database`
        weakref.finalize(self, close_idle, self.idle)  # at exit at the latest

    @abstractmethod
    def open_connection(self, creates: bool) -> Connection:
        """A new connection. With `creates`, create the file that is missing.

        Raises Unavailable, or an error that `translate_error` knows.
        """

    @abstractmethod
    def translate_error(self, error: BaseException, may_have_committed: bool) -> Unavailable | None:
        """The outage that an error means; None for a defect.

        It is OutcomeUnknown only if the change may have been committed.
        """

    @abstractmethod
    def is_timeout(self, error: BaseException) -> bool:
        """Whether the error ended a wait, so that the next caller would wait in vain."""

    def write_lock(self) -> AbstractContextManager[None]:
        """What a writer holds while it writes. By default, nothing."""
        return nullcontext()

    def open_database(self, creates: bool = False) -> None:
        """Bring the database up to date. Raises Unavailable.

        A missing database is created if it is the default one, or with `creates`. No other method
        creates one: in place of a database that a setting names, an empty one would hide a loss or
        a mistyped path.
        """
        self.was_created = False
        with Acquisition(self, writes=True, creates=creates or self.is_default):
            pass

    def check(self) -> None:
        """Raises Unavailable if the database cannot be read now."""
        self.read("SELECT id FROM token LIMIT 1", {})

    def read(self, sql: str, parameters: Parameters) -> Rows:
        """Run a statement and return all its rows. Raises Unavailable."""
        with Acquisition(self) as connection:
            return connection.fetch(sql, parameters)

    @contextmanager
    def writer(
        self, seconds: float | None = None, *, has_key: bool = False
    ) -> Iterator[Connection]:
        """A connection for one change, or with `seconds` for a transaction that may take this long.

        `has_key` says that the change creates a Project with a key. Raises Unavailable,
        OutcomeUnknown.
        """
        acquisition = Acquisition(self, writes=True)
        with acquisition as connection, self.write_lock():
            if seconds is None and not connection.needs_transaction(has_key):
                yield connection
                return
            acquisition.may_have_committed = False
            connection.begin(seconds or REQUEST_TIMEOUT)
            yield connection
            acquisition.may_have_committed = True
            connection.commit()

    def connect(self, creates: bool) -> Connection:
        """A new connection. The first one brings the tables up to date.

        Only with `creates` does it create missing ones. Raises as `open_connection` does.
        """
        connection = self.open_connection(creates)
        try:
            if not self.is_up_to_date:
                version = connection.bring_up_to_date(self, creates)
                self.was_created = version == EMPTY
                self.is_up_to_date = True
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Close the idle connections. The engine can still be used, and opens new ones."""
        close_idle(self.idle)

    def scripts_for(self, version: int, creates: bool) -> list[str]:
        """What creates the tables, or brings those of this schema version up to date.

        Raises Unavailable for a version that this release cannot use, and for an empty database
        unless the caller `creates` the tables.
        """
        if version == EMPTY:
            if not creates:
                raise Unavailable("the database is empty; run `flask init-db`")
            return [Path(__file__).with_name(self.SCHEMA).read_text()]
        if reason := incompatibility(version):
            raise Unavailable(f"the database was {reason}")
        later = range(version + 1, SCHEMA_VERSION + 1)
        return [statement for each in later for statement in self.MIGRATIONS[each]]


class Acquisition:
    """Borrows a connection for a `with` block, and closes it after an error.

    Raises Unavailable, OutcomeUnknown. A generator in place of the class would make a read a tenth
    slower.
    """

    def __init__(self, engine: Engine, writes: bool = False, creates: bool = False) -> None:
        self._engine, self._writes, self._creates = engine, writes, creates
        self._breaker = engine.write_breaker if writes else engine.read_breaker
        # True while a write that fails may have been committed: always outside of a transaction,
        # and within one only during COMMIT (see Engine.writer).
        self.may_have_committed = False

    def __enter__(self) -> Connection:
        if self._breaker.is_open:
            self._breaker.admit()
        idle = self._engine.idle[os.getpid()]
        try:
            while True:
                try:
                    connection = idle.pop()
                except IndexError:  # none is left; other threads take some, too
                    connection = self._engine.connect(self._creates)
                    break
                if connection.is_usable():
                    break
                connection.close()
        except BaseException as error:
            self._fail(error)
            raise
        self._connection = connection
        self.may_have_committed = self._writes
        return connection

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        connection = self._connection
        if error is None:
            self._breaker.is_open = False
            self._engine.idle[os.getpid()].append(connection)
            return
        connection.close()
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Raise the outage that the error means, if it means one."""
        if self._engine.is_timeout(error):
            self._breaker.open()
        else:
            self._breaker.is_open = False
        if outage := self._engine.translate_error(error, self.may_have_committed):
            raise outage from error


def close_idle(idle: dict[int, list[Connection]]) -> None:
    """Close this process's connections."""
    with suppress(IndexError):
        while True:
            idle[os.getpid()].pop().close()
