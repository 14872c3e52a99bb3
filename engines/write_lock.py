"""Lets one writer at a time have an SQLite database."""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from engines.database_file import DatabaseFile, NoFile
from engines.errors import OutcomeUnknown
from engines.new_files import create_empty

POLL_INTERVAL = 0.0002  # seconds between two attempts to acquire an flock


class WriteLock:
    """Two locks: one for the threads of this process, and an flock for all processes.

    SQLite's own would starve writers: the longer one has waited, the less often it asks again.
    """

    def __init__(self, file: DatabaseFile | NoFile, timeout: float) -> None:
        self._file, self._timeout = file, timeout
        self._thread_lock = threading.Lock()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold both. Raises TimeoutError, OSError; and Unavailable if the file has lost its name.

        It is OutcomeUnknown if the file has lost it meanwhile.
        """
        deadline = time.monotonic() + self._timeout
        if not self._thread_lock.acquire(timeout=self._timeout):
            raise TimeoutError("other writers take too long")
        try:
            if isinstance(self._file, NoFile):
                yield
                return
            self._file.check_identity()
            with held_flock(f"{self._file.target}-lock", deadline):
                yield
            # The block has succeeded, but perhaps it wrote to a file that had lost its name before.
            self._file.check_identity(OutcomeUnknown)
        finally:
            self._thread_lock.release()


@contextmanager
def held_flock(path: str, deadline: float) -> Iterator[None]:
    """Hold an flock on this file, waiting until this time of time.monotonic().

    Raises OSError; TimeoutError at the deadline.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        create_empty(path)
        file = os.open(path, os.O_RDONLY)
    try:
        acquire_flock(file, path, deadline)
        try:
            yield
        finally:
            # Closing is not enough: a process forked meanwhile keeps the file open.
            fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


def acquire_flock(file: int, path: str, deadline: float) -> None:
    """Wait for it, since flock has no timeout of its own. Raises TimeoutError."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"still locked: {path}") from None
            time.sleep(POLL_INTERVAL)
