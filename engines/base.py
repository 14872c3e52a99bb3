"""What an engine is: the statements of one kind of database, and its connections.

It knows no rule of the store, and depends on no database.
"""

import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from engines.tables import LAYOUT

Values = dict[str, Any]  # the parameters of a statement, by name
Rows = list[Any]
LONG = 3600  # seconds that a command may take; a request gets far fewer


class Unavailable(Exception):
    """The database is locked, full or out of reach.

    Nothing was changed, unless it is an OutcomeUnknown.
    """


class OutcomeUnknown(Unavailable):
    """A write may or may not have been made: its connection or its disk failed."""


class Engine(ABC):
    """A database. A connection is used by one thread at a time, and only by the process
    that opened it: what is idle is kept by process id.
    """

    TABLES: str  # of the current layout
    UPGRADES: tuple[str, ...]  # the steps to it: from layout 1 to 2, from 2 to 3, …
    # The next three return Projects: the id, the ETag and the JSON document.
    GET: str
    CREATE: str
    UPDATE: str  # with {changes} for the columns to set
    DELETE: str  # returns the id
    # The ETag, and the JSON document unless the ETag is known to the caller.
    LIST: str
    LIST_PAGE: str  # likewise; next_after stands on a line before the document
    BEGIN: str  # a transaction that writes
    BEGIN_FILL: str  # one that writes, and lets nobody else do so
    LAST_TOKEN: str  # the highest id that a token has had
    SET_LAST_TOKEN: tuple[str, ...]
    STOP_TRIGGERS: tuple[str, ...]
    START_TRIGGERS: tuple[str, ...]

    def __init__(self) -> None:
        self.idle: dict[int, list[Any]] = defaultdict(list)

    @abstractmethod
    def connect(self) -> Any:
        """A new connection."""

    @abstractmethod
    def take(self, idle: list[Any]) -> Any:
        """One of the idle connections that still works, or a new one."""

    @abstractmethod
    def execute(self, connection: Any, sql: str, values: Values) -> Rows:
        """All rows of a statement."""

    @abstractmethod
    def outage(self, error: BaseException, writes: bool) -> Unavailable | None:
        """The outage that an error means, if it is one and no defect.

        OutcomeUnknown only for what `writes`.
        """

    def note_error(self, error: BaseException) -> None:
        """Learn from an error how the database is doing. By default, nothing."""

    def allow(self, connection: Any, seconds: int) -> None:
        """Let the transaction take these seconds; for an engine that has a limit."""

    def read(self, sql: str, values: Values) -> Rows:
        """All rows of a statement. Raises Unavailable."""
        # Not self.session(), which does more only for writers: a read saves the call.
        with Session(self) as connection:
            return self.execute(connection, sql, values)

    def write(self, sql: str, values: Values) -> Rows:
        """The same for one that writes. Raises OutcomeUnknown as well."""
        with self.session(writes=True) as connection:
            return self.execute(connection, sql, values)

    @contextmanager
    def transaction(
        self, account: str, seconds: int = 0
    ) -> Iterator[Callable[[str, Values], Rows]]:
        """For several statements that write to the account: all of them are made, or none.

        It may take these seconds, or as long as a request.
        """
        with self.begin(self.BEGIN, seconds) as connection:
            yield partial(self.execute, connection)

    @contextmanager
    def begin(self, begin: str, seconds: int, writes: bool = True) -> Iterator[Any]:
        """A connection in a transaction that the statement `begin` starts."""
        with self.session(writes) as connection:
            connection.execute(begin)
            if seconds:
                self.allow(connection, seconds)
            yield connection
            connection.execute("COMMIT")

    def session(self, writes: bool = False) -> AbstractContextManager[Any]:
        return Session(self, writes)

    def check(self) -> None:
        """Raises Unavailable if the database cannot be read now."""
        self.read("SELECT id FROM token LIMIT 1", {})

    def raise_outage(self, error: BaseException, writes: bool) -> None:
        """Raises Unavailable or OutcomeUnknown, unless the error is a defect."""
        if outage := self.outage(error, writes):
            raise outage from error

    def steps_from(self, layout: int | None, is_empty: bool) -> tuple[str, ...]:
        """The steps to the current layout, from this one or from no tables at all.

        `layout` is None for the database of another program. Raises Unavailable for
        that, and for the layout of a newer release.
        """
        if is_empty:
            return (self.TABLES,)
        if layout is None or layout < 1:
            raise Unavailable("the database was made by another program")
        if layout > LAYOUT:
            raise Unavailable("the database was made by a newer release")
        return self.UPGRADES[layout - 1 :]

    def close(self) -> None:
        """Close the connections that are idle; the engine can go on, with new ones."""
        idle = self.idle[os.getpid()]
        while (connection := pop(idle)) is not None:
            connection.close()

    def __del__(self) -> None:
        self.close()


class Session:
    """A connection for one thread. After an error it is closed, and an outage is raised.

    A class: a generator would add 1.5 microseconds to a read of 9.
    """

    __slots__ = ("connection", "engine", "idle", "writes")

    def __init__(self, engine: Engine, writes: bool = False) -> None:
        self.engine, self.writes = engine, writes

    def __enter__(self) -> Any:
        self.idle = self.engine.idle[os.getpid()]
        try:
            self.connection = self.engine.take(self.idle)
        except BaseException as error:
            # Nothing was sent that might have been made.
            self._fail(error, writes=False)
            raise  # a defect, or Unavailable already
        return self.connection

    def __exit__(self, _kind: object, error: BaseException | None, _: object) -> None:
        if error is None:
            self.idle.append(self.connection)
        else:
            self.connection.close()
            self._fail(error, self.writes)

    def _fail(self, error: BaseException, writes: bool) -> None:
        self.engine.note_error(error)
        self.engine.raise_outage(error, writes)


def pop(idle: list[Any]) -> Any:
    """Pop a connection; None if none is left, since other threads take them as well."""
    try:
        return idle.pop()
    except IndexError:
        return None
