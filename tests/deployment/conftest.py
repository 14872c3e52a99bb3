import os
from contextlib import ExitStack

import pytest

from deployment.servers.pgserver import start_pgserver
from helpers.running import run


@pytest.fixture(scope="session")
def pgserver():
    """A PostgreSQL server for the session."""
    with start_pgserver(fsync="off") as pgserver:
        yield pgserver


@pytest.fixture
def postgresql_to_break():
    """A PostgreSQL server of the test's own, to be broken."""
    with start_pgserver(fsync="off") as postgresql_to_break:
        yield postgresql_to_break


@pytest.fixture
def postgresql(pgserver):
    """The URL of an empty PostgreSQL database, whose settings a test may change."""
    database = pgserver.create_database()
    yield database
    pgserver.drop_database(database)


@pytest.fixture
def another_postgresql(pgserver):
    database = pgserver.create_database()
    yield database
    pgserver.drop_database(database)


@pytest.fixture
def mount():
    """Mounts a small disk at a new folder, for the test."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a disk")
    with ExitStack() as mounted:

        def mount(folder, size):
            folder.mkdir()
            run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
            mounted.callback(run, "umount", folder)

        yield mount
