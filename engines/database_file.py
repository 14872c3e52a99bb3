"""Which file a database is, and which of its connections this process has.

Notices what SQLite does not: that the file was replaced, or that a process was forked from one that
has it open.
"""

import os
import stat
from contextlib import suppress

from engines.errors import HOW_TO_BEGIN, Unavailable

FileID = tuple[int, int] | None  # device and inode; None: no file was seen yet
# The file and the process of each open connection.
CONNECTIONS: list[tuple[FileID, int]] = []


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

    def is_missing(self) -> bool:
        """Whether no file was ever seen. Raises Unavailable if none may be created."""
        # Looked for first: whoever creates these has created the database before.
        others = [path for path in (self._wal, self._journal) if os.path.lexists(path)]
        if self._id or os.path.exists(self.path):
            return False
        if others:
            # SQLite would delete the -wal, and with it the last writes that were acknowledged. It
            # would follow the -journal (docs/design.md, "What an attacker is kept from").
            raise Unavailable(f"{others[0]} has no database beside it; move it away first")
        if os.path.islink(self.path):
            raise Unavailable(self._no_file())
        return True

    def check_identity(self, outage: type[Unavailable] = Unavailable) -> None:
        """Remember the first file that has the name.

        Raises this outage if there is none, or if it is another one by now.
        """
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            raise outage(self._no_file()) from None
        except OSError as error:
            raise outage(f"{error.strerror}: {self.path}") from error
        if not stat.S_ISREG(found.st_mode):  # SQLite would wait for whoever writes to a pipe
            raise outage(f"not a regular file: {self.path}")
        id = found.st_dev, found.st_ino
        self._id = self._id or id
        if id != self._id:
            raise outage(f"the database file was replaced; restart the service: {self.path}")

    def _no_file(self) -> str:
        if self._id:
            return f"the database file was removed: {self.path}"
        if os.path.islink(self.path):  # to a disk that is not mounted, perhaps
            return f"a link that leads to no file: {self.path}"
        return f"no database at {self.path}: {HOW_TO_BEGIN}"

    def is_at(self, path: str | int) -> bool:
        """Whether this path, or this descriptor, leads to the same file. Raises OSError."""
        found = os.stat(path)
        return (found.st_dev, found.st_ino) == self._id

    def unreadable(self) -> str | None:
        """The file that this user may not read: the database's, or one of SQLite's beside it."""
        for path in (self.target, self._wal, f"{self.target}-shm"):
            if os.path.exists(path) and not os.access(path, os.R_OK):
                return path
        return None

    def add_connection(self) -> None:
        """Register a connection of this process.

        Raises Unavailable if this process was forked from one that had the file open. The child
        inherits SQLite's record of the locks on the file, but not the locks, so SQLite would lock
        nothing for it, and the parent's last close would delete the -wal that the child writes.
        """
        # A fork copies the list, with the connections of the parent.
        if any(id == self._id and pid != os.getpid() for id, pid in list(CONNECTIONS)):
            raise Unavailable(f"opened before this process forked: {self.path}")
        CONNECTIONS.append((self._id, os.getpid()))

    def remove_connection(self) -> None:
        CONNECTIONS.remove((self._id, os.getpid()))


class NoFile:
    """Stands in for the DatabaseFile of a database that has none."""

    folder = None

    def is_missing(self) -> None: ...

    def check_identity(self) -> None: ...

    def is_at(self, _path: str | int) -> None: ...

    def unreadable(self) -> None: ...

    def add_connection(self) -> None: ...

    def remove_connection(self) -> None: ...
