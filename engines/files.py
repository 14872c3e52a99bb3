"""Creates whole files or none (see give_name), and lets one writer at a time have a database.

Notices what SQLite does not: that the database was replaced, or that a process was forked from one
that has it open.
"""

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from engines.errors import HOW_TO_BEGIN, OutcomeUnknown, Unavailable

POLL_INTERVAL = 0.0002  # seconds between two attempts to acquire an flock
FileID = tuple[int, int] | None  # device and inode; None: no file was seen yet
# The file and the process of each open connection.
CONNECTIONS: list[tuple[FileID, int]] = []


@contextmanager
def new_file(path: str) -> Iterator[str]:
    """The path of an empty file, which is named `path` once it has been written.

    Only its owner can read it. Raises OSError; FileExistsError if the name is taken.
    """
    # Refused before the work. The name may be taken meanwhile, so give_name can refuse it, too.
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    folder = os.path.dirname(os.path.abspath(path))
    # Named first, so that a signal that arrives as the file is created leaves nothing.
    partial = os.path.join(folder, f"gardening-{secrets.token_hex(8)}.partial")
    try:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        give_away(descriptor, folder)
        os.close(descriptor)
        yield partial
        sync(partial)
        give_name(partial, path)
        with suppress(OSError):  # some file systems sync no folders
            sync(folder)
    finally:
        # By now the file has its name, or an error is on its way: a failure here changes neither.
        for leftover in (partial, f"{partial}-journal"):  # SQLite leaves the latter on a full disk
            with suppress(OSError):
                os.unlink(leftover)


def give_name(partial: str, path: str) -> None:
    """Raises FileExistsError if the name is taken: a rename alone would replace that file."""
    try:
        os.link(partial, path)
    except OSError:  # the name is taken; or there are no links, as on exFAT and some network disks
        # A kill here leaves an empty file, which is neither a backup nor a database with tables.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
        if not os.path.getsize(partial):
            return  # an empty file is there now, and another process may have begun to fill it
        try:
            os.rename(partial, path)
        except BaseException:
            os.unlink(path)
            raise


def give_away(descriptor: int, folder: str | int) -> None:
    """Let the owner of this folder, the service's user, have what root has created in it."""
    if os.geteuid() == 0:
        owner = os.stat(folder)
        with suppress(OSError):  # as on NFS, where root may be nobody
            os.fchown(descriptor, owner.st_uid, owner.st_gid)


def sync(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class DatabaseFile:
    """The file of a database: the one that has the name when this object is made.

    If there is none, it is the first one that is seen there. SQLite would go on with a file that
    was removed or replaced, and what it wrote there would be lost.

    Nothing here opens the database. Closing a file drops every POSIX lock that the process has on
    it, SQLite's too. So this class asks os.stat.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        # SQLite puts its own files beside the file that a link leads to.
        self.target = os.path.realpath(self.path)
        self.folder = os.path.dirname(self.target)
        self._wal, self._journal = f"{self.target}-wal", f"{self.target}-journal"
        self._id: FileID = None
        with suppress(Unavailable):  # the first use will say what is wrong
            self.check_identity()

    def path_to_create(self) -> str | None:
        """The path at which the file is missing; None if it is or was there.

        Raises Unavailable if no file may be created there.
        """
        if self._id:
            return None
        # In this order, since a process that creates all of them makes the database first.
        others = [path for path in (self._wal, self._journal) if os.path.lexists(path)]
        if os.path.exists(self.path):
            return None
        if others:
            # SQLite would delete the -wal, and with it the last writes that were acknowledged. It
            # would follow the -journal (docs/design.md, "What an attacker is kept from").
            raise Unavailable(f"{others[0]} has no database beside it; move it away first")
        if os.path.islink(self.path):
            self.check_identity()  # raises, since the link leads to no file
        return self.path

    def check_identity(self, outage: type[Unavailable] = Unavailable) -> None:
        """Remember the first file that has the name.

        Raises this outage if there is none, or if it is another one by now.
        """
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            if self._id:
                reason = f"the database file was removed: {self.path}"
            elif os.path.islink(self.path):  # to a disk that is not mounted, perhaps
                reason = f"a link that leads to no file: {self.path}"
            else:
                reason = f"no database at {self.path}: {HOW_TO_BEGIN}"
            raise outage(reason) from None
        except OSError as error:
            raise outage(f"{error.strerror}: {self.path}") from error
        if not stat.S_ISREG(found.st_mode):  # SQLite would wait for whoever writes to a pipe
            raise outage(f"not a regular file: {self.path}")
        id = found.st_dev, found.st_ino
        self._id = self._id or id
        if id != self._id:
            raise outage(f"the database file was replaced; restart the service: {self.path}")

    def unreadable(self) -> str | None:
        """The file that this user may not read: the database's, or one of SQLite's beside it."""
        for path in (self.target, self._wal, f"{self.target}-shm"):
            if os.path.exists(path) and not os.access(path, os.R_OK):
                return path
        return None

    def add_connection(self) -> None:
        """Register a connection of this process.

        Raises Unavailable if the -journal is not a regular file, or if this process was forked from
        one that had the file open. The child inherits SQLite's record of the locks on the file, but
        not the locks, so SQLite would lock nothing for it, and the parent's last close would delete
        the -wal that the child writes.
        """
        with suppress(FileNotFoundError):  # SQLite would wait for whoever writes to a pipe
            if not stat.S_ISREG(os.lstat(self._journal).st_mode):
                raise Unavailable(f"not a regular file: {self._journal}")
        # A fork copies the list, with the connections of the parent.
        if any(id == self._id and pid != os.getpid() for id, pid in list(CONNECTIONS)):
            raise Unavailable(f"opened before this process forked: {self.path}")
        CONNECTIONS.append((self._id, os.getpid()))

    def remove_connection(self) -> None:
        CONNECTIONS.remove((self._id, os.getpid()))

    @contextmanager
    def lock(self, deadline: float) -> Iterator[None]:
        """Hold an flock on the file `-lock`, waiting until this time of time.monotonic().

        Raises OSError; TimeoutError at the deadline; and Unavailable if the file has lost its name,
        or OutcomeUnknown if that happened under the lock.
        """
        self.check_identity()
        path = f"{self.target}-lock"
        flags = os.O_RDONLY | os.O_NONBLOCK  # or a pipe with this name would be waited for
        try:
            file = os.open(path, flags)
        except FileNotFoundError:
            create_empty(path)
            file = os.open(path, flags)
        try:
            acquire_flock(file, path, deadline)
            try:
                yield
            finally:
                # Closing is not enough: a process forked meanwhile keeps the file open.
                fcntl.flock(file, fcntl.LOCK_UN)
        finally:
            os.close(file)
        # The block has succeeded, but perhaps it wrote to a file that had lost its name before.
        self.check_identity(OutcomeUnknown)


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


class NoFile:
    """Stands in for the DatabaseFile of a database that has none."""

    folder = None

    def path_to_create(self) -> None: ...

    def check_identity(self) -> None: ...

    def unreadable(self) -> None: ...

    def add_connection(self) -> None: ...

    def remove_connection(self) -> None: ...

    def lock(self, _deadline: float) -> AbstractContextManager[None]:
        return nullcontext()


def create_folder_of(path: str) -> None:
    """Create the folder for this file, unless there is one. Raises OSError.

    Only its owner can enter it.
    """
    folder = os.path.dirname(path)
    if os.path.isdir(folder):
        return
    # The parent stays open: whoever owns a folder around it could put another one in its place
    # meanwhile, and root would give away what is there.
    name, flags = os.path.basename(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    parent = os.open(os.path.dirname(folder), os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
            descriptor = os.open(name, flags, dir_fd=parent)
            try:
                give_away(descriptor, parent)
            finally:
                os.close(descriptor)
    finally:
        os.close(parent)


def create_empty(path: str) -> None:
    """Create an empty file, unless there is one. Root's belongs to the folder's owner."""
    with suppress(FileExistsError), new_file(path):
        pass
