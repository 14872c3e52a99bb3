"""What an engine is: the statements of one kind of database, and a pool of connections.

It knows no rule of the store, and depends on no database.
"""
# Tested in tests/test_store.py, and its breaker in tests/test_sqlite.py.

import os
import time
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Protocol

from engines.statements import CHECK
from engines.tables import LAYOUT

Parameters = dict[str, Any]  # of a statement, by name
Rows = list[Any]
COMMAND_TIMEOUT = 3600  # seconds that a command may take; a request gets far fewer
# Seconds after which another caller may try, even if the first one is still trying.
TRIAL_TIMEOUT = 5.0


class Unavailable(Exception):
    """The database is locked, full or out of reach.

    Nothing was changed, except perhaps by a write that raises OutcomeUnknown.
    """


class OutcomeUnknown(Unavailable):
    """A write may or may not have been made: its connection or its disk failed."""


class Connection(Protocol):
    """A connection of either driver; one thread at a time uses it."""

    # False between `begin` and `commit`, where an error means that nothing was changed.
    may_have_committed: bool

    def fetch(self, sql: str, parameters: Parameters) -> Rows:
        """Run a statement and return all its rows.

        Unless `begin` was called, the statement is a transaction of its own.
        """

    def write(self, sql: str, parameters: Parameters) -> Rows:
        """Run a statement that writes, as a transaction of its own."""

    def begin(self, seconds: int) -> None:
        """Begin a transaction that writes. It may take this long; 0: as long as a request."""

    def commit(self) -> None: ...

    def close(self) -> None: ...

    # The rest is for backup and restore alone.

    def begin_snapshot(self) -> None:
        """Begin a long transaction that sees the database as it is at this moment.

        On a cluster, each account is seen as it is at a moment of its own.
        """

    def stream(self, sql: str) -> Generator[Any]:
        """The rows of a statement, one by one, without holding all of them in memory."""

    def insert(self, table: str, columns: Iterable[str], rows: Iterable[Any]) -> None:
        """Add the rows to a table."""


class Breaker:
    """A circuit breaker: once a caller has waited in vain, it refuses the others.

    While it is closed, everybody may pass. It opens for `pause` seconds, in which nobody may.
    Then it is half-open: one caller may try, and if that succeeds, it closes.
    """

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._retry_at = 0.0  # on the clock of time.monotonic()
        self.is_closed = True

    def admit(self) -> None:
        """Called while it is not closed. Raises Unavailable for a caller who may not pass."""
        now = time.monotonic()
        if now < self._retry_at:
            raise Unavailable("another caller has just waited in vain")
        self._retry_at = now + TRIAL_TIMEOUT

    def open(self) -> None:
        self._retry_at = time.monotonic() + self._pause
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Engine(ABC):
    """A database.

    Its idle connections are kept by process id, since after a fork the child may neither use
    nor close those of its parent.
    """

    TABLES: str  # of the current layout
    MIGRATIONS: tuple[str, ...]  # from layout 1 to 2, from 2 to 3, …
    # The next three return a Project: its id, its ETag and its JSON document.
    GET: str
    CREATE: str
    UPDATE: str  # with {changes} for the columns to set
    DELETE: str  # returns the id
    # Returns the account's revision, its number of Projects, the `seq` of the last Project
    # of this page (null if none follows), and the page as a JSON array. The page starts
    # behind the `seq` :after, skips :offset Projects and has up to :size.
    LIST: str
    PAUSE = 1.0  # seconds for which callers are refused after one has waited in vain
    # For backup and restore alone:
    AFTER_FILLING: tuple[str, ...] = ()  # statements
    ERROR: type[Exception]  # the base of the driver's errors
    folder: str | None = None  # where the database is, if it is a file

    def __init__(self) -> None:
        self.idle: dict[int, list[Connection]] = defaultdict(list)
        self.read_breaker, self.write_breaker = Breaker(self.PAUSE), Breaker(self.PAUSE)
        weakref.finalize(self, close_idle, self.idle)  # at the latest as Python exits

    @abstractmethod
    def connect(self, creates: bool) -> Connection:
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
    def waited_in_vain(self, error: BaseException) -> bool:
        """Whether the error is a timeout, after which others should not try yet."""

    def write_lock(self) -> AbstractContextManager[None]:
        """What a writer holds while it writes. By default, nothing."""
        return nullcontext()

    def create_database(self) -> None:
        """Create the database, unless there is one. Raises Unavailable.

        For the service's database, only `flask run`, `init-db` (which gunicorn's start
        runs), `token create` and `restore` call this. In any other command, or in a worker,
        an empty database in the place of a lost one would hide the loss.
        """
        connection = self.open_connection(self.write_breaker, creates=True)
        self.idle[os.getpid()].append(connection)

    def check(self) -> None:
        """Raises Unavailable if the database cannot be read now."""
        self.read(CHECK, {})

    def read(self, sql: str, parameters: Parameters) -> Rows:
        """Run a statement and return all its rows. Raises Unavailable."""
        with Session(self, writes=False) as connection:
            return connection.fetch(sql, parameters)

    def write(self, sql: str, parameters: Parameters) -> Rows:
        """Run a statement that writes. Raises Unavailable, OutcomeUnknown."""
        with Session(self, writes=True) as connection, self.write_lock():
            return connection.write(sql, parameters)

    @contextmanager
    def transaction(self, seconds: int = 0) -> Iterator[Connection]:
        """A transaction of several statements. Raises Unavailable, OutcomeUnknown.

        It may take this many seconds; by default, as long as a request may.
        """
        with Session(self, writes=True) as connection, self.write_lock():
            connection.begin(seconds)
            yield connection
            connection.commit()

    def take_idle(self) -> Connection | None:
        """A connection that is idle, if there is one."""
        try:
            return self.idle[os.getpid()].pop()
        except IndexError:
            return None

    def open_connection(self, breaker: Breaker, creates: bool = False) -> Connection:
        """A new connection. Raises Unavailable."""
        try:
            return self.connect(creates)
        except BaseException as error:
            self.on_error(error, breaker, may_have_committed=False)
            raise

    def on_error(
        self, error: BaseException, breaker: Breaker, may_have_committed: bool
    ) -> None:
        """Open or close the breaker, and raise the outage that the error means, if any."""
        if self.waited_in_vain(error):
            breaker.open()
        else:
            breaker.close()  # what fails at once keeps nobody waiting
        if outage := self.outage(error, may_have_committed):
            raise outage from error

    def migrations_from(
        self, layout: int | None, is_empty: bool, creates: bool
    ) -> tuple[str, ...]:
        """What brings a database of this layout up to date, or creates the tables.

        `layout` is None for the database of another program. Raises Unavailable for the
        database of another program or of a newer release, and for an empty one unless the
        caller `creates` the tables.
        """
        if is_empty:
            if not creates:
                hint = "a start of the service creates its tables"
                raise Unavailable(f"the database is empty; {hint}")
            return (self.TABLES,)
        if layout is None or layout < 1:
            raise Unavailable("the database was made by another program")
        if layout > LAYOUT:
            raise Unavailable("the database was made by a newer release")
        return self.MIGRATIONS[layout - 1 :]

    def close(self) -> None:
        """Close the idle connections. The engine can still be used, and opens new ones."""
        close_idle(self.idle)


def close_idle(idle: dict[int, list[Connection]]) -> None:
    """Close this process's connections."""
    connections = idle[os.getpid()]
    while connections:
        try:
            connection = connections.pop()
        except IndexError:  # another thread has taken the last one
            return
        connection.close()


class Session:
    """Lends a connection. After an error, it closes the connection and raises the outage.

    It is a class because a generator would make a read a tenth slower.
    """

    def __init__(self, engine: Engine, writes: bool) -> None:
        self._engine, self._writes = engine, writes
        self._breaker = engine.write_breaker if writes else engine.read_breaker

    def __enter__(self) -> Connection:
        engine, breaker = self._engine, self._breaker
        if not breaker.is_closed:
            breaker.admit()
        self._connection = engine.take_idle() or engine.open_connection(breaker)
        return self._connection

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        engine, connection = self._engine, self._connection
        if error is None:
            if not self._breaker.is_closed:
                self._breaker.close()
            engine.idle[os.getpid()].append(connection)
            return
        connection.close()
        may_have_committed = self._writes and connection.may_have_committed
        engine.on_error(error, self._breaker, may_have_committed)
