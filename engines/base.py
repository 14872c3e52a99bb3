"""What an engine is: the statements of one kind of database, and a pool of connections.

It knows no rule of the store, and depends on no database.
"""
# Tested in tests/test_store.py.

import os
import time
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Protocol

from engines.tables import LAYOUT

Parameters = dict[str, Any]  # of a statement, by name
Rows = list[Any]
LONG = 3600  # seconds that a command may take; a request gets far fewer
TRIAL = 5.0  # seconds after which another caller may try, even if a trial has not ended


class Unavailable(Exception):
    """The database is locked, full or out of reach.

    Nothing was changed, unless it is an OutcomeUnknown.
    """


class OutcomeUnknown(Unavailable):
    """A write may or may not have been made: its connection or its disk failed."""


class Connection(Protocol):
    """A connection of either driver; one thread at a time uses it."""

    # False from BEGIN to COMMIT: until then, an error means that nothing was changed.
    may_commit: bool

    def fetch(self, sql: str, parameters: Parameters) -> Rows:
        """All rows of a statement, which is a transaction unless `begin` was called."""

    def write(self, sql: str, parameters: Parameters) -> Rows:
        """The same for one that writes, outside of a transaction."""

    def begin(self, seconds: int) -> None:
        """Begin a transaction that writes, and may take so long; 0: as long as a request."""

    def commit(self) -> None: ...

    def close(self) -> None: ...

    # The rest is for backup and restore alone.

    def begin_snapshot(self) -> None:
        """Begin a long transaction that sees the database as it is at this moment."""

    def stream(self, sql: str) -> Generator[Any]:
        """The rows of a statement, however many: they are not all in memory at once."""

    def insert(self, table: str, columns: Iterable[str], rows: Iterable[Any]) -> None:
        """Add the rows to a table."""


class Breaker:
    """A circuit breaker: once a caller has waited in vain, it refuses the others.

    While it is closed, all may pass. It opens for `pause` seconds, in which nobody may.
    Then it is half-open: one caller may try, and the others once that has succeeded.
    """

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._retry_at = 0.0  # on the clock of time.monotonic()
        self.is_closed = True

    def enter(self) -> None:
        """While it is not closed: raises Unavailable for a caller who may not pass."""
        now = time.monotonic()
        if now < self._retry_at:
            raise Unavailable("another caller has just waited in vain")
        self._retry_at = now + TRIAL

    def open(self) -> None:
        self._retry_at = time.monotonic() + self._pause
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Engine(ABC):
    """A database.

    Its idle connections are kept by process id. After a fork, the child neither uses nor
    closes those of its parent.
    """

    TABLES: str  # of the current layout
    MIGRATIONS: tuple[str, ...]  # to it: from layout 1 to 2, from 2 to 3, …
    # The next three return Projects: the id, the ETag and the JSON document.
    GET: str
    CREATE: str
    UPDATE: str  # with {changes} for the columns to set
    DELETE: str  # returns the id
    # The account's revision and number of Projects; the `seq` of the last one returned, or
    # null if none follows; and the JSON array of those after :after and :offset, up to :size.
    LIST: str
    PAUSE = 1.0  # seconds for which callers are refused after one has waited in vain
    # For backup and restore alone:
    AFTER_FILLING: tuple[str, ...] = ()  # statements
    ERROR: type[Exception]  # the base of the driver's errors
    folder: str | None = None  # where the database is, if it is a file

    def __init__(self) -> None:
        self.idle: dict[int, list[Connection]] = defaultdict(list)
        self.readers, self.writers = Breaker(self.PAUSE), Breaker(self.PAUSE)
        weakref.finalize(self, close_idle, self.idle)  # at the latest as Python exits

    @abstractmethod
    def connect(self, creates: bool) -> Connection:
        """A new connection. The first one brings the tables up to date.

        It creates those that are missing only if it `creates`. Raises Unavailable, or an
        error that `outage` knows.
        """

    @abstractmethod
    def outage(
        self, error: BaseException, may_have_been_committed: bool
    ) -> Unavailable | None:
        """The outage that an error means, if it is one and no defect.

        OutcomeUnknown only if the change may have been committed.
        """

    @abstractmethod
    def waited_in_vain(self, error: BaseException) -> bool:
        """Whether the caller waited until a limit, so that others should not even try."""

    def write_lock(self) -> AbstractContextManager[None]:
        """What a writer holds while it writes. By default, nothing."""
        return nullcontext()

    def create(self) -> None:
        """Create the database, unless there is one. Raises Unavailable.

        `flask run`, gunicorn's start, by the command `init-db`, `token create` and `restore`
        call this. A backup or a worker that created one would hide that it was lost.
        """
        self.idle[os.getpid()].append(self.open(self.writers, creates=True))

    def check(self) -> None:
        """Raises Unavailable if the database cannot be read now."""
        self.read("SELECT id FROM token LIMIT 1", {})

    def read(self, sql: str, parameters: Parameters) -> Rows:
        """All rows of a statement. Raises Unavailable."""
        with Session(self, self.readers) as connection:
            return connection.fetch(sql, parameters)

    def write(self, sql: str, parameters: Parameters) -> Rows:
        """The same for one that writes. Raises OutcomeUnknown as well."""
        with Session(self, self.writers) as connection, self.write_lock():
            return connection.write(sql, parameters)

    @contextmanager
    def transaction(self, seconds: int = 0) -> Iterator[Connection]:
        """A connection for several statements: all of them are made, or none.

        They may take this many seconds; by default, as long as a request may.
        """
        with Session(self, self.writers) as connection, self.write_lock():
            connection.begin(seconds)
            yield connection
            connection.commit()

    def take_idle(self) -> Connection | None:
        """A connection that is idle, if there is one."""
        try:
            return self.idle[os.getpid()].pop()
        except IndexError:
            return None

    def open(self, breaker: Breaker, creates: bool = False) -> Connection:
        """A new connection. Raises Unavailable."""
        try:
            return self.connect(creates)
        except BaseException as error:
            self.on_error(error, breaker, may_have_been_committed=False)
            raise

    def on_error(
        self, error: BaseException, breaker: Breaker, may_have_been_committed: bool
    ) -> None:
        """Open or close the breaker; raise the outage that the error means, if any."""
        if self.waited_in_vain(error):
            breaker.open()
        else:
            breaker.close()
        if outage := self.outage(error, may_have_been_committed):
            raise outage from error

    def migrations_from(
        self, layout: int | None, is_empty: bool, creates: bool
    ) -> tuple[str, ...]:
        """The migrations to the current layout, from this one or from no tables at all.

        `layout` is None for the database of another program. Raises Unavailable for
        that, for the layout of a newer release, and for no tables unless it `creates`.
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
        """Close the connections that are idle; the engine can go on, with new ones."""
        close_idle(self.idle)


def close_idle(idle: dict[int, list[Connection]]) -> None:
    """Close those of this process."""
    connections = idle[os.getpid()]
    while connections:
        try:
            connection = connections.pop()
        except IndexError:  # another thread has taken the last one
            return
        connection.close()


class Session:
    """A connection for a while. After an error it is closed, and an outage raised.

    It is a class, since a generator in its place costs a tenth of a read.
    """

    def __init__(self, engine: Engine, breaker: Breaker) -> None:
        self._engine, self._breaker = engine, breaker

    def __enter__(self) -> Connection:
        engine, breaker = self._engine, self._breaker
        if not breaker.is_closed:
            breaker.enter()
        self._connection = engine.take_idle() or engine.open(breaker)
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
        writes = self._breaker is engine.writers
        engine.on_error(error, self._breaker, writes and connection.may_commit)
