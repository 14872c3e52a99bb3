"""What tests ask of a store, and of the locks and files below it."""

import json
import os
import sqlite3
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from engines.errors import Unavailable
from helpers.running import LIMIT, openings, wait_for

REFUSED_BY_BREAKER = "not tried: requests have just timed out"
RESPONSE_TIME = 6  # seconds within which the service responds, whatever happens


def read(row):
    """What the document of a Project or a list says."""
    return json.loads(row.document)


def listed(store, account="ann"):
    """The account's Projects."""
    return read(store.list_projects(account))


def fetch(store, sql):
    """The rows of a statement, over a connection of the store."""
    with store.engine.reader() as connection:
        return connection.fetch(sql, {})


def plain_sql_on(database):
    """A connection for plain SQL, each statement a transaction."""
    if database.startswith("postgresql://"):
        import psycopg

        return psycopg.connect(database, autocommit=True)
    return sqlite3.connect(database, isolation_level=None)


def is_sqlite(plain_sql):
    return isinstance(plain_sql, sqlite3.Connection)


def journal_that_names(victim, size):
    """The -journal of a database of this size which lets SQLite delete the file `victim`.

    SQLite takes that for its super-journal (file format, 3.1).
    """
    page, sector, magic = 4096, 512, bytes.fromhex("d9d505f920a163d7")
    header = magic + struct.pack(">5I", 0, 0, size // page, sector, page)
    name = os.fsencode(victim)
    end = struct.pack(">I", 2**30 // page + 1) + name + struct.pack(">2I", len(name), sum(name))
    return header.ljust(sector, b"\0") + end + magic


def put_journal_beside(database, victim):
    victim.write_text("not empty")
    journal = journal_that_names(victim, os.path.getsize(database))
    Path(f"{database}-journal").write_bytes(journal)


def open_files():
    return sorted(os.listdir("/dev/fd"))


def count_waiters(database):
    """How many wait for a lock in PostgreSQL, or have the lock file open."""
    if database.startswith("postgresql://"):
        from deployment.servers.pgserver import WAITS, backends

        return len(backends(database, WAITS))
    return openings(f"{database}-lock")


def result_after_unlock(lock, database, work):
    """What `work()` returns: it begins under the lock, and waits for its end."""
    with ThreadPoolExecutor() as pool:
        with lock:
            before = count_waiters(database)
            future = pool.submit(work)
            wait_for(lambda: future.done() or count_waiters(database) > before)
            assert not future.done()
        return future.result(LIMIT)


@contextmanager
def lasts(at_least, at_most=RESPONSE_TIME):
    start = time.monotonic()
    yield
    assert at_least <= time.monotonic() - start <= at_most


@contextmanager
def fails(exactly, reason=None):
    """Unavailable, but not the OutcomeUnknown that is one, or the reverse."""
    with pytest.raises(exactly, match=reason) as failure:
        yield failure
    assert failure.type is exactly
    assert "\n" not in str(failure.value)


class Refusal(NamedTuple):
    seconds: float
    reason: str


def refusal(store):
    """How long a write takes that is refused, and why it is."""
    started = time.monotonic()
    with pytest.raises(Unavailable) as refused:
        store.create_project("ann", {})
    return Refusal(time.monotonic() - started, str(refused.value))
