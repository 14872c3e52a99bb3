"""Creates whole files or none: a file gets its name once it has been written."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress


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
        sync_folder(folder)
    finally:
        # The file has its name, or an error is being raised: a failure here must not hide that.
        remove(partial, f"{partial}-journal")  # SQLite leaves the latter on a full disk


def give_name(partial: str, path: str) -> None:
    """Raises FileExistsError if the name is taken: a rename alone would replace that file."""
    with suppress(OSError):  # there may be no links, as on exFAT and some network disks
        os.link(partial, path)
        return
    # A kill after this leaves an empty file, which is neither a backup nor a database with tables.
    os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    if os.path.getsize(partial):  # an empty one could replace what another process has written
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
    """Create an empty file, unless there is one. If root does, the owner of its folder gets it."""
    with suppress(FileExistsError), new_file(path):
        pass


def sync(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_folder(path: str) -> None:
    with suppress(OSError):  # some file systems sync no folders
        sync(path)


def remove(*paths: str) -> None:
    """Remove the files that are there and can be removed."""
    for path in paths:
        with suppress(OSError):
            os.unlink(path)
