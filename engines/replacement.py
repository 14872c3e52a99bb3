"""Gives an SQLite database that may be in use other contents, and keeps the old ones in a file.

SQLite copies page by page, in one transaction (its Online Backup API): every process sees the old
contents or the new ones, also after a kill or a power cut.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from engines.errors import OutcomeUnknown, Unavailable
from engines.migrations import FOREIGN, incompatibility
from engines.new_files import new_file, remove
from engines.sqlite import SQLite, SQLiteConnection, version_of


def page_size(engine: SQLite) -> int:
    """Of the database, in bytes. Raises Unavailable if it is not ours, or cannot be opened."""
    with open_live(engine) as live:
        [(size,)] = live.execute("PRAGMA page_size")
    return int(size)


def replace(engine: SQLite, new: SQLite, kept: str, committing: Callable[[], None]) -> None:
    """Copy the contents of the new database, which has the same page size, to this one.

    The old contents become the file `kept`, and stay there once the copy has begun, even if that
    fails. Calls `committing` before it begins. Raises Unavailable, OutcomeUnknown.
    """
    with (
        open_live(engine, kept) as live,
        closing(new.open_to_read()) as source,
        engine.write_lock(),
    ):
        # WAL, so that readers go on and a kill leaves no -journal. Both fail if the schema is
        # damaged: then the file keeps its mode.
        for pragma in ("synchronous = FULL", "journal_mode = WAL"):
            with suppress(sqlite3.Error, UnicodeDecodeError):
                live.execute(f"PRAGMA {pragma}")
        with new_file(kept) as unnamed:
            keep(live, unnamed)
            committing()
        try:
            source.backup(live, progress=raise_if_refused)
        except Refused:
            remove(kept)
            raise
        # Under the lock: before SQLite 3.51.3, two checkpoints at once could damage the file.
        with suppress(sqlite3.Error):  # the change is made
            live.execute("PRAGMA wal_checkpoint(PASSIVE)")


@contextmanager
def open_live(engine: SQLite, kept: str = "") -> Iterator[SQLiteConnection]:
    """A connection to the database, of any release, that reads no table.

    Raises Unavailable for another program's database. An error of SQLite or the system in the block
    becomes Unavailable; once `kept` is there, OutcomeUnknown, unless SQLite has surely rolled back.
    """
    try:
        with closing(engine.open_unread()) as live:
            if version_of(live) == FOREIGN:
                raise Unavailable(f"the database was {incompatibility(FOREIGN)}: {engine.name}")
            yield live
    except (sqlite3.Error, OSError) as error:
        has_begun = os.path.exists(kept)
        outage = engine.translate_error(error, has_begun) or Unavailable(f"{error}: {engine.name}")
        if has_begun:
            hint = f"what was there is kept in {kept}"
            if not isinstance(outage, OutcomeUnknown):
                hint = f"nothing was changed, and {hint}"
        elif getattr(error, "sqlite_errorname", "") in ("SQLITE_NOTADB", "SQLITE_CORRUPT"):
            hint = "stop the service, and move it away with its -wal, -shm and -journal"
        else:
            raise outage from error
        raise type(outage)(f"{outage}; {hint}") from error


def keep(live: SQLiteConnection, path: str) -> None:
    """Copy the database to this empty file, which like any backup is not in WAL mode."""
    with closing(sqlite3.connect(path)) as copy:
        live.backup(copy, progress=raise_if_refused)
    # SQLite would read the schema to change the mode (file format, 1.3.3).
    with open(path, "r+b") as file:
        file.seek(18)
        file.write(b"\1\1")


class Refused(sqlite3.OperationalError):
    """The copy has not begun. SQLite also says READONLY if the page size has changed."""


def raise_if_refused(status: int, _remaining: int, _pages: int) -> None:
    """For a lock, Python would try for ever."""
    if status & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_READONLY):
        raise Refused("locked or changed by another program, or read-only")
