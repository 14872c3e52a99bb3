"""What an engine is: one kind of database, its connections, and what their errors mean."""

import os
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from engines.breaker import Breaker
from engines.connection import Connection
from engines.database_file import DatabaseFile, NoFile
from engines.errors import Unavailable
from engines.migrations import EMPTY
from engines.new_files import create_empty, create_folder_of


class Engine(ABC):
    """A database.

    Idle connections are kept by process id, since after a fork the child may neither use nor close
    those of its parent.
    """

    ERROR: type[Exception]  # the base of the driver's errors
    name: str  # of the database, as an operator knows it, without a password
    # Whether a timeout also closes the idle connections, which lead to the same server.
    TIMEOUT_CLOSES_IDLE = False

    def __init__(self, file: DatabaseFile | NoFile) -> None:
        self.file = file
        self.idle: dict[int, list[Connection]] = defaultdict(list)
        self.read_breaker, self.write_breaker = Breaker(), Breaker()
        self._is_migrated = False  # True after a first connection has looked
        weakref.finalize(self, close_idle, self.idle)  # at exit at the latest

    @abstractmethod
    def open_connection(self) -> Connection:
        """A new connection. Raises Unavailable, or an error that `translate_error` knows."""

    @abstractmethod
    def translate_error(self, error: BaseException, may_have_committed: bool) -> Unavailable | None:
        """The outage that an error of the driver or the system means; None for any other error.

        It is OutcomeUnknown only if the change may have been committed.
        """

    @abstractmethod
    def is_timeout(self, error: BaseException) -> bool:
        """Whether the error ended a wait, so that the next caller would wait in vain."""

    def raise_if_outage(self, error: BaseException, may_have_committed: bool = False) -> None:
        """Raise the outage that the error means, if it means one."""
        if outage := self.translate_error(error, may_have_committed):
            raise outage from error

    def write_lock(self) -> AbstractContextManager[None]:
        """What a writer holds while it writes, besides the database's own locks."""
        return nullcontext()

    def open_database(self, creates: bool = False) -> bool:
        """Bring the database up to date; with `creates`, create a missing one.

        No other method creates one: an empty one would hide a loss or a mistyped path. Returns
        whether it was created. Raises Unavailable.
        """
        try:
            if creates and self.file.is_missing():
                create_folder_of(self.name)
                create_empty(self.name)
            connection = self.open_connection()
            is_new = self._migrate(connection, creates)
        except BaseException as error:
            self.raise_if_outage(error)
            raise
        self.release(connection)
        return is_new

    def check(self) -> None:
        """Raises Unavailable if the database cannot be read now."""
        with self.reader() as connection:
            connection.fetch("SELECT id FROM token LIMIT 1", {})
        self.file.check_identity()

    def reader(self) -> "Acquisition":
        """A connection to read with. Raises Unavailable."""
        return Acquisition(self)

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A connection for a command's reads, as after `begin_snapshot`. Raises Unavailable."""
        with self.reader() as connection:
            connection.begin_snapshot()
            yield connection
            connection.commit()

    @contextmanager
    def writer(self, *, in_transaction: bool = False) -> Iterator[Connection]:
        """A connection for one statement that writes, or for a transaction.

        Raises Unavailable, OutcomeUnknown.
        """
        acquisition = Acquisition(self, writes=True)
        # The connection first: a new one may take the lock itself, to migrate.
        with acquisition as connection, self.write_lock():
            if in_transaction or connection.ALWAYS_IN_TRANSACTION:
                connection.begin()
                yield connection
                acquisition.may_have_committed = True
                connection.commit()
            else:
                # The statement commits by itself, so an error may come after the commit.
                acquisition.may_have_committed = True
                yield connection

    def _migrate(self, connection: Connection, creates: bool = False) -> bool:
        """Bring the tables up to date over the first connection; close it if that fails.

        Returns whether they were created. Raises as `open_connection` does.
        """
        if self._is_migrated:
            return False
        try:
            found = connection.migrate(creates)
        except BaseException:
            connection.close()
            raise
        self._is_migrated = True
        return found == EMPTY

    def acquire(self) -> Connection:
        """An idle connection, or a new one. Raises as `open_connection` does."""
        idle = self.idle[os.getpid()]
        while True:
            try:
                connection = idle.pop()
            except IndexError:  # none is left; other threads take some, too
                connection = self.open_connection()
                self._migrate(connection)
                return connection
            connection.start_deadline()
            if connection.is_usable():
                return connection
            connection.close()

    def release(self, connection: Connection) -> None:
        self.idle[os.getpid()].append(connection)

    def close(self) -> None:
        """Close the idle connections. The engine can still be used, and opens new ones."""
        close_idle(self.idle)


class Acquisition:
    """Acquires a connection for a `with` block, and releases it.

    After an error it closes the connection, which rolls back. It asks the breaker first, and
    reports the result to it. Raises Unavailable, OutcomeUnknown. A generator in place of the class
    would make a read a tenth slower.
    """

    def __init__(self, engine: Engine, writes: bool = False) -> None:
        self._engine = engine
        self._breaker = engine.write_breaker if writes else engine.read_breaker
        # Set by Engine.writer: whether an error may come after the commit.
        self.may_have_committed = False

    def __enter__(self) -> Connection:
        self._breaker.admit()
        try:
            self._connection = self._engine.acquire()
        except BaseException as error:
            self._fail(error)
            raise
        return self._connection

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self._breaker.record_response()
            self._engine.release(self._connection)
            return
        self._connection.close()
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Report the error to the breaker, and raise the outage that it means, if it means one."""
        if self._engine.is_timeout(error):
            self._breaker.record_timeout()
            if self._engine.TIMEOUT_CLOSES_IDLE:
                self._engine.close()
        else:
            self._breaker.record_response()
        self._engine.raise_if_outage(error, self.may_have_committed)


def close_idle(idle: dict[int, list[Connection]]) -> None:
    """Close this process's connections."""
    with suppress(IndexError):
        while True:
            idle[os.getpid()].pop().close()
