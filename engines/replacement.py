"""Puts a new file in the place of an SQLite database that may be in use, and keeps the old file."""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from typing import Any

from engines.errors import Unavailable
from engines.names import is_printable
from engines.new_files import new_file, remove, sync_folder
from engines.sqlite import SQLite


def require_replaceable(path: str) -> None:
    """Raises Unavailable if `replace` cannot replace the file at this path."""
    target = os.path.realpath(path)
    if not is_printable(target):  # the way back, which is printed and pasted, has its folder
        raise Unavailable(f"the path has a character that cannot be printed: {path}")
    if os.path.dirname(target) != os.path.realpath(os.path.dirname(path)):
        raise Unavailable(f"a link that leads to another folder: {path}")


def replace(
    path: str,
    write: Callable[[str], Any],
    switching: Callable[[Any, str], AbstractContextManager[None]],
) -> None:
    """Let `path` become a link to a new file, which `write` fills.

    A rename makes the switch, in the block of `switching`, which gets what `write` returned and the
    path at which the old file is kept. After an error, everything is as it was. Raises OSError,
    Unavailable.
    """
    folder = os.path.dirname(os.path.realpath(path))
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    # With the nanoseconds, nobody can foresee the name, and lay a -wal or a -journal beside it.
    name = f"{time.strftime('%Y-%m-%dT%H%M%S', time.gmtime(seconds))}.{nanoseconds:09}Z.db"
    new, kept = os.path.join(folder, name), os.path.join(folder, f"before-{name}")
    link = os.path.join(folder, f"gardening-{name}.partial")
    try:
        try:
            os.symlink(name, link)
        except OSError as error:  # before the work
            hint = "if the file system has no links, stop the service, move the database away with"
            reason = f"{error.strerror} ({hint} its -wal, and restore again): {path}"
            raise Unavailable(reason) from error
        with new_file(new) as partial:
            written = write(partial)
        with held_open(path):
            if os.path.islink(path):
                # Root may paste it, so whoever changes the link must not choose the folder.
                old = os.path.join(folder, os.path.basename(os.path.realpath(path)))
            else:
                old = kept
                os.link(path, kept, follow_symlinks=False)
                with suppress(FileNotFoundError):
                    os.link(f"{path}-wal", f"{kept}-wal")
            with switching(written, old):
                os.rename(link, path)
    except BaseException:
        if os.path.realpath(path) != os.path.realpath(new):
            remove(link, new, kept, f"{kept}-wal")
        raise
    # They were beside a plain file, whose -wal has a second name by now.
    remove(f"{path}-wal", f"{path}-shm")
    sync_folder(folder)


@contextmanager
def held_open(path: str) -> Iterator[None]:
    """Let the database keep its -wal: the last connection to be closed would delete it."""
    with ExitStack() as opened:
        # Nobody writes to a file that SQLite cannot read.
        with suppress(sqlite3.Error, UnicodeDecodeError, Unavailable):
            connection = opened.enter_context(closing(SQLite(path).open_to_read()))
            connection.begin_snapshot()
            connection.fetch("SELECT count(*) FROM sqlite_schema", {})  # acquires the lock
        yield
