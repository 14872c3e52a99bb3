"""Files: created for their owner alone, locked with a deadline, named once complete."""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from engines.base import Unavailable

PARTIAL = (
    ".gardening-partial"  # the end of the name of a folder in which a backup is written
)
POLL_INTERVAL = 0.0002  # seconds between two attempts to take a lock


@contextmanager
def locked(path: str | Path, deadline: float) -> Iterator[None]:
    """Hold an flock on a file or folder, waiting until this time of time.monotonic().

    Raises Unavailable.
    """
    with ExitStack() as held:
        try:
            if not os.path.exists(path):
                create(path)
            # Opened for each holder: threads that share an open file share its lock.
            file = os.open(path, os.O_RDONLY)
            held.callback(os.close, file)
            while not try_lock(file):
                if time.monotonic() > deadline:
                    raise Unavailable(f"still locked: {path}")
                time.sleep(POLL_INTERVAL)
        except OSError as error:
            raise Unavailable(f"{error.strerror}: {path}") from error
        # To close it is not enough: a process forked meanwhile keeps the file open.
        held.callback(fcntl.flock, file, fcntl.LOCK_UN)
        yield


def try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def create(path: str | Path) -> None:
    """Create a file that only its owner can read, unless there is one."""
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL, mode=0o600)
    except FileExistsError:
        return
    os.close(file)
    give_to_owner(path)


def give_to_owner(path: str | Path) -> None:
    """Give what root creates, as `flask token` may, to the owner of the folder."""
    if os.geteuid() == 0:
        folder = os.stat(os.path.dirname(os.path.abspath(path)))
        os.chown(path, folder.st_uid, folder.st_gid)


@contextmanager
def new_file(path: str) -> Iterator[str]:
    """The path of an empty file, which gets the name `path` once it is written whole.

    It lies in a locked folder, so the next backup can tell and remove what a killed one
    has left. Raises OSError with `path`, and Unavailable.
    """
    parent, folder = os.path.dirname(os.path.abspath(path)), path + PARTIAL
    file = os.path.join(folder, "backup.db")
    try:
        os.stat(parent)  # fails if it is missing, where locked() would create a file
        with locked(parent, time.monotonic() + 1.0):
            for left in Path(parent).glob(f"*{PARTIAL}"):
                with suppress(OSError, Unavailable), locked(left, deadline=0.0):
                    shutil.rmtree(left)
            check_is_free(path)
            check_is_free(folder)
            os.mkdir(folder, mode=0o700)
            give_to_owner(folder)
            claim = ExitStack()  # held longer than the lock on the parent
            claim.enter_context(locked(folder, deadline=0.0))
        with claim:
            try:
                create(file)
                yield file
                sync(file)
                check_is_free(path)
                os.rename(file, path)
                sync(parent)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, path) from error


def check_is_free(path: str) -> None:
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


def sync(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
