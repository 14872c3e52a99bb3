from contextlib import ExitStack

import pytest

from deployment.servers.pgserver import emptying, start_pgserver
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


@pytest.fixture(scope="session")
def shared_postgresql(pgserver):
    """The URL of a database, and a function that empties it for the next test."""
    database = pgserver.create_database()
    with emptying(database) as empty:
        yield database, empty


@pytest.fixture
def postgresql(shared_postgresql):
    """The URL of an empty PostgreSQL database."""
    database, empty = shared_postgresql
    yield database
    empty()


@pytest.fixture
def new_postgresql(pgserver):
    """The URL of an empty database that is nobody else's: a test may change its settings."""
    new_postgresql = pgserver.create_database()
    yield new_postgresql
    pgserver.drop_database(new_postgresql)


@pytest.fixture
def mount():
    """Mounts a small disk at a new folder, for the test."""
    with ExitStack() as mounted:

        def mount(folder, size):
            folder.mkdir()
            run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
            mounted.callback(run, "umount", folder)

        yield mount
