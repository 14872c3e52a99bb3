"""What an engine is: one kind of database, with its connections and its circuit breakers.

It knows no rule of the store, and no dialect of SQL.
"""
# Tested in tests/test_store.py, and its breaker in tests/test_sqlite.py.

import os
import time
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

from engines.migrations import SCHEMA_VERSION, incompatibility

Parameters = dict[str, Any]  # of a statement, by name
Rows = list[Any]
COMMAND_TIMEOUT = 3600  # seconds for a backup, a restore, a migration, a deletion
PAUSE = 1.0  # seconds for which a breaker refuses everybody
TRIAL_INTERVAL = 5.0  # seconds between two callers whom a half-open breaker lets try
EMPTY = 0  # in the place of a schema version: the database has no tables


class Unavailable(Exception):
    """The database is locked, full or out of reach.

    Nothing was changed, except perhaps by a write that raises OutcomeUnknown.
    """


class OutcomeUnknown(Unavailable):
    """A write may or may not have been made: its connection or its disk failed."""


class Connection(Protocol):
    """A connection of either driver. One thread at a time uses it.

    A statement has its parameters as `:name`. It has no `%`, and no other `:name`. Unless `begin`
    was called, it is a transaction of its own.
    """

    # Whether a write that fails now may have been committed nevertheless: always, for a statement
    # outside of a transaction; in one, only during the COMMIT. `begin` and `commit` set it.
    may_have_committed: bool

    def fetch(self, sql: str, parameters: Parameters) -> Rows:
        """Run a statement and return all its rows."""

    def write(self, sql: str, parameters: Parameters) -> Rows:
        """Run a statement that writes, and return all its rows."""
        return self.fetch(sql, parameters)

    def create(self, values: Parameters) -> Rows:
        """Add a Project with these values of its columns. Return it as Engine.GET does.

        If the account has :max_projects, add none and return no row.
        """

    def update(self, columns: Iterable[str], values: Parameters) -> Rows:
        """Set these columns of one Project if its ETag is allowed, as in Engine.DELETE.

        Return it as Engine.GET does, or no row.
        """

    def begin(self, seconds: int) -> None:
        """Begin a transaction that writes. It may take this long; 0: as long as a request."""

    def commit(self) -> None: ...

    def close(self) -> None: ...

    # For backup and restore alone:

    def begin_snapshot(self) -> None:
        """Begin a long transaction that sees the database as it is at its first statement.

        On a cluster, each account is seen as it is at a moment of its own.
        """

    def stream(self, sql: str) -> Generator[Any]:
        """The rows of a statement, one by one, without holding all of them in memory."""

    def insert(self, table: str, columns: Iterable[str], rows: Iterable[Any]) -> None:
        """Add the rows to a table."""


class Breaker:
    """A circuit breaker: after a caller's timeout, others are refused for a while.

    Closed, it lets everybody pass. It opens for PAUSE seconds, in which nobody passes. Then it
    is half-open: one caller may try, and closes it unless that times out as well. If the caller
    has no answer after TRIAL_INTERVAL, one more may try.
    """

    def __init__(self) -> None:
        self._retry_at = 0.0  # on the clock of time.monotonic()
        self.is_closed = True

    def admit(self) -> None:
        """Raise Unavailable for a caller who may not pass. Call it unless `is_closed`."""
        now = time.monotonic()
        if now < self._retry_at:
            raise Unavailable("not tried: requests have just timed out")
        self._retry_at = now + TRIAL_INTERVAL

    def open(self) -> None:
        self._retry_at = time.monotonic() + PAUSE
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Engine(ABC):
    """A database: it lends connections, and says what their errors mean.

    Idle connections are kept by process id, since after a fork the child may neither use nor
    close those of its parent.
    """

    SCHEMA: str  # the name of the file with the tables
    MIGRATIONS: dict[int, str]  # by the schema version that they lead to
    # Returns one Project, as its id, its ETag and its JSON document; or no row.
    GET: str
    # Deletes one Project if its ETag is allowed: :if_match and :if_none_match are JSON arrays of
    # ETags, or null for no condition. Returns the id, or no row.
    DELETE: str
    # Returns one page as a row: the account's list_revision and project_count, the parameter
    # `after` of the next page or null, and a JSON array. The page starts behind the `seq`
    # :after, skips :offset Projects and has up to :size.
    LIST: str
    # For backup and restore alone:
    AFTER_FILLING: tuple[str, ...] = ()  # statements
    ERROR: type[Exception]  # the base of the driver's errors
    folder: str | None = None  # where the database is, if it is a file
    name: str  # of the database, as an operator knows it; without a password
    is_default = False  # no setting names it
    was_created = False  # by this object

    def __init__(self) -> None:
        self.idle: dict[int, list[Connection]] = defaultdict(list)
        self._read_breaker, self._write_breaker = Breaker(), Breaker()
        weakref.finalize(self, close_idle, self.idle)  # at the latest as Python exits

    @abstractmethod
    def connect(self, creates: bool = False) -> Connection:
        """A new connection. The first one brings the tables up to date.

        Only with `creates` does it create missing tables. Raises Unavailable, or an error
        that `outage` knows.
        """

    @abstractmethod
    def outage(
        self, error: BaseException, may_have_committed: bool
    ) -> Unavailable | None:
        """The outage that an error means; None for a defect.

        It is OutcomeUnknown only if the change may have been committed.
        """

    @abstractmethod
    def is_timeout(self, error: BaseException) -> bool:
        """Whether the error ended a wait, so that the next caller would wait in vain."""

    def write_lock(self) -> AbstractContextManager[None]:
        """What a writer holds while it writes. By default, nothing."""
        return nullcontext()

    def create_database(self) -> bool:
        """Create the database unless there is one; True if it was. Raises Unavailable."""
        return self._prepare(creates=True)

    def open_database(self) -> bool:
        """Bring the database up to date, and create it only if it is the default one.

        In place of one that a setting names, an empty database would hide a lost one, or a
        path that is slightly wrong. Returns whether it was created. Raises Unavailable.
        """
        return self._prepare(creates=self.is_default)

    def _prepare(self, creates: bool) -> bool:
        with self.lend(writes=True, creates=creates):
            pass
        was_created, self.was_created = self.was_created, False
        return was_created

    def check(self) -> None:
        """Raises Unavailable if the database cannot be read now."""
        self.read("SELECT id FROM token LIMIT 1", {})

    def read(self, sql: str, parameters: Parameters) -> Rows:
        """Run a statement and return all its rows. Raises Unavailable."""
        with self.lend(writes=False) as connection:
            return connection.fetch(sql, parameters)

    def write(self, sql: str, parameters: Parameters) -> Rows:
        """Run a statement that writes. Raises Unavailable, OutcomeUnknown."""
        with self.writer() as connection:
            return connection.write(sql, parameters)

    @contextmanager
    def writer(self) -> Iterator[Connection]:
        """Lend a connection for one write. Raises Unavailable, OutcomeUnknown."""
        with self.lend(writes=True) as connection, self.write_lock():
            yield connection

    @contextmanager
    def transaction(self, seconds: int = 0) -> Iterator[Connection]:
        """A transaction of several statements. Raises Unavailable, OutcomeUnknown.

        It may take this many seconds; by default, as long as a request may.
        """
        with self.writer() as connection:
            connection.begin(seconds)
            yield connection
            connection.commit()

    @contextmanager
    def lend(self, writes: bool, creates: bool = False) -> Iterator[Connection]:
        """Lend an idle connection, or a new one. After an error, it is closed.

        Raises the outage that the error means, if it means one.
        """
        breaker = self._write_breaker if writes else self._read_breaker
        if not breaker.is_closed:
            breaker.admit()
        connection = None
        try:
            connection = self.take_idle() or self.connect(creates)
            yield connection
        except BaseException as error:
            may_have_committed = bool(
                writes and connection and connection.may_have_committed
            )
            if connection:
                connection.close()
            if self.is_timeout(error):
                breaker.open()
            else:
                breaker.close()  # what fails at once keeps nobody waiting
            if outage := self.outage(error, may_have_committed):
                raise outage from error
            raise
        if not breaker.is_closed:
            breaker.close()
        self.idle[os.getpid()].append(connection)

    def take_idle(self) -> Connection | None:
        """A connection that is idle, if there is one."""
        try:
            return self.idle[os.getpid()].pop()
        except IndexError:
            return None

    def close(self) -> None:
        """Close the idle connections. The engine can still be used, and opens new ones."""
        close_idle(self.idle)

    def scripts_for(self, version: int | None, creates: bool) -> list[str]:
        """What creates the tables, or brings those of this schema version up to date.

        `version` is None for the database of another program. Raises Unavailable for one that
        this release cannot use, and for an empty one unless the caller `creates` the tables.
        """
        if version == EMPTY:
            if not creates:
                raise Unavailable("the database is empty; run `flask init-db`")
            self.was_created = True
            return [Path(__file__).with_name(self.SCHEMA).read_text()]
        if reason := incompatibility(version):
            raise Unavailable(f"the database was {reason}")
        assert version is not None  # incompatibility(None) has raised
        later = range(version + 1, SCHEMA_VERSION + 1)
        return [self.MIGRATIONS[each] for each in later]


def close_idle(idle: dict[int, list[Connection]]) -> None:
    """Close this process's connections."""
    with suppress(IndexError):  # none is left; other threads may take some, too
        while True:
            idle[os.getpid()].pop().close()
