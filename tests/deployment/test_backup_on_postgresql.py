"""PostgreSQL passes the tests of tests/test_backup.py, from one database to another."""

import os
import sys

import pytest

from deployment.servers.pgserver import silence
from deployment.test_disk import test_full_disk_leaves_no_half_backup_and_no_half_restore
from engines.backup import backup, restore
from engines.errors import Unavailable
from helpers.running import run
from test_backup import *


@pytest.fixture
def database(postgresql):
    return postgresql


@pytest.fixture
def target(another_postgresql):
    return another_postgresql


@pytest.mark.parametrize("what", ["project", "token", "account"])
def test_restore_into_a_filled_database_is_refused(source, database, file, target_store, what):
    backup(source.engine, file)
    target_store.engine.open_database(creates=True)
    if what == "token":
        target_store.add_token("eve", digest("eve's"))
    else:
        id = target_store.create_project("eve", {}).id
        if what == "account":
            target_store.delete_project("eve", id)
    before = everything(target_store)
    with pytest.raises(Unavailable, match="^the database is not empty; see docs/postgresql.md$"):
        restore(target_store.engine, file)
    assert everything(target_store) == before


def test_terminal_shows_how_far_a_backup_is(store, filled, database, file):
    restore(store.engine, filled)
    assert "61/61" in shown_on_a_terminal(database, "backup", file)


def test_silence_of_the_server_is_not_blamed_on_the_file(store, pgserver, database, file):
    store.check()  # over the connection that the backup takes
    output = f"the copy to {file} failed: no response before the deadline"
    with silence(pgserver, database), pytest.raises(Unavailable, match=f"^{output}$"):
        backup(store.engine, file)


BACK_UP = """
import sys
from resource import RUSAGE_SELF, getrusage
from engines import backup
from engines.postgres import PostgreSQL
engine = PostgreSQL(sys.argv[1])
engine.check()
before = getrusage(RUSAGE_SELF).ru_maxrss
backup.backup(engine, sys.argv[2])
print(getrusage(RUSAGE_SELF).ru_maxrss - before)
"""


def test_backup_does_not_hold_a_table_in_memory(store, plain_sql, database, file):
    plain_sql.execute("""INSERT INTO project (id, account, seq, name, created_at, updated_at)
        SELECT n, 'ann', n, repeat('x', 10000), 1, 1 FROM generate_series(1, 4000) AS n""")
    ended = run(sys.executable, "-c", BACK_UP, database, file)
    assert os.path.getsize(file) > 40_000_000
    assert int(ended.stdout) < 20_000  # KiB
