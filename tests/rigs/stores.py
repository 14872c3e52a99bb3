"""What tests ask of a store, and of the locks and files below it."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

from rigs.running import LIMIT, openings, wait_for


def read(row):
    return json.loads(row.document)


def listed(store, account="ann"):
    return read(store.list_projects(account))


def open_files():
    return sorted(os.listdir("/proc/self/fd"))


def waiters(database):
    """How many wait for a lock in PostgreSQL, or have the file of the queue open."""
    if database.startswith("postgresql://"):
        from rigs.pgserver import WAITS, backends

        return len(backends(database, WAITS))
    return openings(f"{database}-lock")


def waits(work, database, lock):
    """What it returns, which it does only after the lock."""
    with ThreadPoolExecutor() as pool:
        with lock:
            before = waiters(database)
            waiter = pool.submit(work)
            wait_for(lambda: waiter.done() or waiters(database) > before)
            assert not waiter.done()
        return waiter.result(LIMIT)
