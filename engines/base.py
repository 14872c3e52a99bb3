"""What an engine is: the statements of one kind of database, and its connections.

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
from typing import Any, Protocol

from engines.tables import LAYOUT

Values = dict[str, Any]  # the parameters of a statement, by name
Rows = list[Any]
LONG = 3600  # seconds that a command may take; a request gets far fewer
TRIAL = 5.0  # seconds after which another caller may try, though a trial has not ended


class Unavailable(Exception):
    """The database is locked, full or out of reach.

    Nothing was changed, unless it is an OutcomeUnknown.
    """


class OutcomeUnknown(Unavailable):
    """A write may or may not have been made: its connection or its disk failed."""


class Connection(Protocol):
    """A connection of either driver; one thread at a time uses it."""

    # Whether what is under way may last although its response gets lost: a COMMIT, or a
    # statement outside of a transaction.
    is_committing: bool

    def fetch(self, sql: str, values: Values) -> Rows:
        """All rows of a statement, which is a transaction unless `begin` was called."""

    def write(self, sql: str, values: Values) -> Rows:
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


class Engine(ABC):
    """A database. Its idle connections are kept by process id: after a fork, the child
    opens connections of its own.
    """

    TABLES: str  # of the current layout
    UPGRADES: tuple[str, ...]  # the steps to it: from layout 1 to 2, from 2 to 3, …
    # The next three return Projects: the id, the ETag and the JSON document.
    GET: str
    CREATE: str
    UPDATE: str  # with {changes} for the columns to set
    DELETE: str  # returns the id
    # The revision and the number of the account's Projects; `seq` of the last one here,
    # if others follow; and the JSON array of those after :after and :offset, up to :size.
    LIST: str
    PAUSE = 1.0  # seconds for which callers are refused after one has waited in vain
    # For backup and restore alone:
    LAST_TOKEN: str  # the highest id that a token has had, if there was one
    SET_LAST_TOKEN: tuple[str, ...]
    ERROR: type[Exception]  # the base of the driver's errors
    folder: str | None = None  # where the database is, if it is a file

    def __init__(self) -> None:
        self.idle: dict[int, list[Connection]] = defaultdict(list)
        # After one has waited in vain, readers (False) or writers (True) are refused until
        # this time. Then one of them tries, and the others once it succeeds. 0: all is well.
        self._retry_at = {False: 0.0, True: 0.0}
        weakref.finalize(self, close_idle, self.idle)  # at the latest as Python exits

    @abstractmethod
    def connect(self, creates: bool) -> Connection:
        """A new connection. The first one brings the tables up to date.

        It creates those that are missing only if it `creates`. Raises Unavailable.
        """

    @abstractmethod
    def outage(self, error: BaseException, may_last: bool) -> Unavailable | None:
        """The outage that an error means, if it is one and no defect.

        OutcomeUnknown only for a change that `may_last`.
        """

    def turn(self) -> AbstractContextManager[None]:
        """What a writer waits for before it writes. By default, nothing."""
        return nullcontext()

    @abstractmethod
    def waited_in_vain(self, error: BaseException) -> bool:
        """Whether the error says so; then others need not wait as well."""

    def create(self) -> None:
        """Create the database, unless there is one. Raises Unavailable.

        Only what fills a database calls this: `flask run`, gunicorn's start, and the
        commands `token create` and `restore`. A backup or a worker that created one would
        hide that a database was lost.
        """
        self.idle[os.getpid()].append(self.open(writes=True, creates=True))

    def check(self) -> None:
        """Raises Unavailable if the database cannot be read now."""
        self.read("SELECT id FROM token LIMIT 1", {})

    def read(self, sql: str, values: Values) -> Rows:
        """All rows of a statement. Raises Unavailable."""
        # Not in a session(), which is a generator: that costs a tenth of a read.
        connection = self.take(writes=False)
        try:
            rows = connection.fetch(sql, values)
        except BaseException as error:
            connection.close()
            self.fail(error, writes=False, may_last=False)
            raise
        self._retry_at[False] = 0.0
        self.idle[os.getpid()].append(connection)
        return rows

    def write(self, sql: str, values: Values) -> Rows:
        """The same for one that writes. Raises OutcomeUnknown as well."""
        with self.session(writes=True) as connection, self.turn():
            return connection.write(sql, values)

    @contextmanager
    def transaction(self, seconds: int = 0) -> Iterator[Connection]:
        """A connection for several statements: all of them are made, or none.

        They may take so many seconds, or as long as a request.
        """
        with self.session(writes=True) as connection, self.turn():
            connection.begin(seconds)
            yield connection
            connection.commit()

    @contextmanager
    def session(self, writes: bool) -> Iterator[Connection]:
        """A connection for a while. After an error it is closed, and an outage raised."""
        connection = self.take(writes)
        try:
            yield connection
        except BaseException as error:
            connection.close()
            self.fail(error, writes, may_last=writes and connection.is_committing)
            raise
        self._retry_at[writes] = 0.0
        self.idle[os.getpid()].append(connection)

    def take(self, writes: bool) -> Connection:
        """An idle connection, or a new one. Raises Unavailable."""
        if self._retry_at[writes]:
            now = time.monotonic()
            if now < self._retry_at[writes]:
                raise Unavailable("another caller has just waited in vain")
            self._retry_at[writes] = now + TRIAL  # this caller tries, the others do not
        try:
            return self.idle[os.getpid()].pop()
        except IndexError:  # none is left
            return self.open(writes)

    def open(self, writes: bool, creates: bool = False) -> Connection:
        """A new connection. Raises Unavailable."""
        try:
            return self.connect(creates)
        except BaseException as error:
            self.fail(error, writes, may_last=False)
            raise

    def fail(self, error: BaseException, writes: bool, may_last: bool) -> None:
        """Note whether others must pause; raise the outage that the error means, if any."""
        is_pause = self.waited_in_vain(error)
        self._retry_at[writes] = time.monotonic() + self.PAUSE if is_pause else 0.0
        if outage := self.outage(error, may_last):
            raise outage from error

    def steps_from(
        self, layout: int | None, is_empty: bool, creates: bool
    ) -> tuple[str, ...]:
        """The steps to the current layout, from this one or from no tables at all.

        `layout` is None for the database of another program. Raises Unavailable for
        that, for the layout of a newer release, and for no tables unless it `creates`.
        """
        if is_empty:
            if not creates:
                raise Unavailable(
                    "the database is empty; a start of the service creates its tables"
                )
            return (self.TABLES,)
        if layout is None or layout < 1:
            raise Unavailable("the database was made by another program")
        if layout > LAYOUT:
            raise Unavailable("the database was made by a newer release")
        return self.UPGRADES[layout - 1 :]

    def close(self) -> None:
        """Close the connections that are idle; the engine can go on, with new ones."""
        close_idle(self.idle)

    # The rest is for backup and restore alone.

    def filling(self) -> AbstractContextManager[Connection]:
        """A transaction that fills empty tables."""
        return self.transaction(LONG)

    def save(self, path: str) -> bool:
        """Copy the database to this empty SQLite file; False if this engine cannot."""
        return False


def close_idle(idle: dict[int, list[Connection]]) -> None:
    """Close those of this process."""
    connections = idle[os.getpid()]
    while connections:
        try:
            connection = connections.pop()
        except IndexError:  # another thread has taken the last one
            return
        connection.close()
