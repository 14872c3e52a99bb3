"""The SQLite engine: its statements, its file, its locks, and their faults."""

import fcntl
import os
import re
import sqlite3
import sys
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from engines.backup import backup, restore
from engines.breaker import Breaker
from engines.errors import OutcomeUnknown, Unavailable
from engines.sqlite import SQLite, SQLiteConnection
from helpers.running import at_once, closing_store, retry_while_unavailable, run, wait_for
from helpers.stores import (
    REFUSED_BY_BREAKER,
    fails,
    fetch,
    lasts,
    listed,
    open_files,
    put_journal_beside,
    read,
    refusal,
    result_after_unlock,
)

REPLACED = "^the database file was replaced; restart the service: {}$"


@contextmanager
def hold_write_lock(path):
    """Holds what writers wait for."""
    with open(f"{path}-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # which only an exclusive lock waits for
        yield


ATTEMPT = """
import os, resource, signal, sys
from engines.sqlite import SQLite
from store import Store

def read(store):
    return len(store.list_tokens())

def write(store, key=None):
    return store.create_project("ann", {}, key).id

def limit(kind, value):
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))

try:
    store = Store(SQLite(sys.argv[1]))
    %s
except Exception as error:
    print(type(error).__name__, error)
"""


def attempt(path, script, *tracer):
    """What a process prints that runs this on a store, or as what its error ends it."""
    return run(*tracer, sys.executable, "-c", ATTEMPT % script, path).stdout


# Its statements


def test_page_costs_the_same_however_many_projects_there_are(store, plain_sql):
    """Counted in steps of SQLite's virtual machine."""
    for account, count in [("few", 100), ("many", 20_000)]:
        plain_sql.execute(
            """WITH RECURSIVE n(seq) AS (SELECT 1 UNION ALL SELECT seq + 1 FROM n
                WHERE seq < :count)
            INSERT INTO project (id, account, seq, created_at, updated_at)
            SELECT :account || seq, :account, seq, 1, 1 FROM n""",
            {"account": account, "count": count},
        )

    def steps(account, after):
        values = {"account": account, "size": 20, "after": after, "offset": 0}
        counted = []
        plain_sql.set_progress_handler(lambda: counted.append(1), 1)
        plain_sql.execute(SQLiteConnection.LIST, values).fetchall()
        plain_sql.set_progress_handler(None, 0)
        return len(counted)

    assert steps("many", 0) < 1.1 * steps("few", 0)
    assert steps("many", 19_980) < 1.1 * steps("few", 80)


def test_page_skips_projects_in_an_index_without_their_texts(store, plain_sql):
    """Or one of the last pages would read nearly all that the account has."""
    values = {"account": "ann", "size": 20, "after": 0, "offset": 9000}
    plan = plain_sql.execute(f"EXPLAIN QUERY PLAN {SQLiteConnection.LIST}", values)
    skipping = "SEARCH project USING COVERING INDEX project_seq (account=? AND seq>?)"
    assert skipping in [step for *_, step in plan]


def test_deletion_costs_the_same_however_many_keys_are_spent(store, plain_sql):
    ids = [store.create_project("ann", {}, f"key {number}").id for number in range(3)]

    def steps(id):
        """Of SQLite's virtual machine."""
        [connection] = store.engine.idle[os.getpid()]
        counted = []
        connection.set_progress_handler(lambda: counted.append(1), 1)
        store.delete_project("ann", id)
        connection.set_progress_handler(None, 0)
        return len(counted)

    steps(ids[0])
    few = steps(ids[1])
    plain_sql.execute(
        """WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10000)
        INSERT INTO spent_key SELECT 'ann', i, 3 FROM n"""
    )
    assert steps(ids[2]) < 1.1 * few


def test_each_connection_syncs_its_commits_and_checks_references(store):
    for pragma, value in [("synchronous", 2), ("foreign_keys", 1)]:
        assert fetch(store, f"PRAGMA {pragma}") == [(value,)]


# Its file


def test_stores_may_create_a_missing_file_at_once(tmp_path):
    """Often, as a window between two looks at it is small."""
    for number in range(40):
        path = str(tmp_path / f"{number}.db")
        with ExitStack() as opened:
            stores = [opened.enter_context(closing_store(path)) for _ in range(12)]

            def start(number, stores=stores):
                stores[number].engine.open_database(creates=True)
                stores[number].create_project("ann", {})

            at_once(start, 12)
            assert len(listed(stores[0])) == 12


def test_file_is_durable_and_private(store, database, plain_sql):
    store.create_project("ann", {})
    assert plain_sql.execute("PRAGMA journal_mode").fetchall() == [("wal",)]
    for suffix in ("", "-lock", "-wal"):
        assert os.stat(database + suffix).st_mode & 0o777 == 0o600


def test_wal_that_a_long_reader_let_grow_is_small_again(store, database, plain_sql):
    plain_sql.execute("BEGIN").execute("SELECT * FROM token")
    for _ in range(6):
        store.create_project("ann", {"name": "x" * 1_000_000})
    assert os.path.getsize(f"{database}-wal") > 6_000_000
    plain_sql.execute("COMMIT")
    for _ in range(2):  # one writes back what is in it, and the next one begins it anew
        store.create_project("ann", {})
    assert os.path.getsize(f"{database}-wal") < 5_000_000


@pytest.mark.parametrize("name", ["odd ?%20#&.db", "grün.db", "file:x?mode=ro"])
def test_path_may_hold_any_character(tmp_path, name):
    with closing_store(str(tmp_path / name)) as store:
        store.engine.open_database(creates=True)
        store.create_project("ann", {})
    assert (tmp_path / name).stat().st_size > 0


@pytest.mark.parametrize("statement", ["CREATE TABLE theirs (x)", "VACUUM", "PRAGMA user_version"])
def test_refused_file_is_left_to_the_byte(tmp_path, statement):
    """Another program's, and an empty one that nobody has asked to fill."""
    file = tmp_path / "theirs.db"
    with closing(sqlite3.connect(file)) as theirs:
        theirs.execute(statement)
    before = file.read_bytes()
    for creates in {False, statement.startswith("CREATE")}:
        with pytest.raises(Unavailable):
            SQLite(str(file)).open_database(creates)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["theirs.db"]


def test_database_may_have_a_link_for_its_name(tmp_path):
    link, file = tmp_path / "link.db", tmp_path / "file.db"
    link.symlink_to(file.name)
    with closing_store(str(file)) as store:
        store.engine.open_database(creates=True)
        store.create_project("ann", {})
    with closing_store(str(link)) as store:
        assert len(listed(store)) == 1
    assert sorted(os.listdir(tmp_path)) == ["file.db", "file.db-lock", "link.db"]


@pytest.fixture
def backup_file(tmp_path):
    file = str(tmp_path / "backup.db")
    backup(SQLite(":memory:"), file)
    return file


@pytest.mark.parametrize(
    "is_link, reason",
    [("the file", "a link that leads to no file"), ("the folder", "No such file or directory")],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_link_to_a_disk_that_is_not_mounted_gets_no_database(
    tmp_path, backup_file, is_link, reason, is_there
):
    """Its folder may be there, as an empty mount point."""
    disk, instance = tmp_path / "disk", tmp_path / "instance"
    if is_link == "the file":
        instance.mkdir()
        (instance / "gardening.db").symlink_to(disk / "gardening.db")
    else:
        instance.symlink_to(disk / "instance")
    if is_there:
        disk.mkdir()
    engine = SQLite(str(instance / "gardening.db"))
    for use in (lambda: engine.open_database(creates=True), lambda: restore(engine, backup_file)):
        with pytest.raises(Unavailable, match=f"^({reason}|a link that leads to another folder): "):
            use()
    assert list(disk.glob("*")) == []
    if is_link == "the file":  # and nobody is sent to a command that creates none
        with pytest.raises(Unavailable, match=f"^{reason}: "):
            engine.open_database()


def test_folder_is_created_along_with_the_file_but_not_its_parents(tmp_path):
    SQLite(str(tmp_path / "new/x.db")).open_database(creates=True)
    assert (tmp_path / "new/x.db").exists()
    with pytest.raises(Unavailable, match="^No such file or directory: "):
        SQLite(str(tmp_path / "no/such/x.db")).open_database(creates=True)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "path, reason",
    [
        ("/", "not a regular file"),
        ("/dev/null/x.db", "Not a directory"),
        ("pipe", "not a regular file"),  # SQLite would wait for whoever writes to it
    ],
)
def test_impossible_path_is_refused(tmp_path, path, reason):
    os.mkfifo(tmp_path / "pipe")
    path = str(tmp_path / path)
    with pytest.raises(Unavailable, match=f"^{reason}: {path}$"):
        SQLite(path).open_database(creates=True)


@pytest.mark.parametrize("suffix", ["-wal", "-journal"])
@pytest.mark.parametrize("name", ["gardening.db", "link.db"])
def test_file_of_a_missing_database_is_neither_thrown_away_nor_used(
    database, backup_file, name, suffix
):
    """The -wal may hold acknowledged writes, and the -journal what somebody else made up."""
    Path(f"{database}{suffix}").write_text("acknowledged")
    Path(database).with_name("link.db").symlink_to(database)
    engine = SQLite(str(Path(database).with_name(name)))
    uses = [lambda: engine.open_database(creates=True)]
    if name == "gardening.db":  # a restore gives the link another file
        uses.append(lambda: restore(engine, backup_file))
    for use in uses:
        reason = f"{database}{suffix} has no database beside it; move it away first"
        with pytest.raises(Unavailable, match=f"^{reason}$"):
            use()
        assert Path(f"{database}{suffix}").read_text() == "acknowledged"
        assert not os.path.exists(database)


def test_backup_deletes_no_file_that_a_journal_names(store, database, tmp_path):
    """The service itself may not delete what a backup may: other backups."""
    victim = tmp_path / "another.db"
    store.engine.close()
    put_journal_beside(database, victim)
    with fails(Unavailable, "failed: the database has a -journal: restart the service$"):
        backup(store.engine, f"{database}-backup")
    assert victim.exists()
    store.check()  # which rolls back, as any other use
    backup(store.engine, f"{database}-backup")


@pytest.mark.parametrize("is_idle", [True, False])
def test_lost_file_is_unavailable_and_not_replaced(store, park, database, is_idle):
    if not is_idle:
        store.engine.close()
    os.rename(database, f"{database}-away")
    for use in (store.check, lambda: store.create_project("ann", {})):
        with pytest.raises(Unavailable):
            use()
    assert not os.path.exists(database)
    os.rename(f"{database}-away", database)
    assert listed(store) == [read(park)]


@pytest.mark.parametrize("first", ["check", "write"])
def test_replaced_file_is_not_used_until_a_restart(
    store, open_store, park, database, plain_sql, first
):
    """Not even by a write over a connection that is idle, before anybody has looked."""
    plain_sql.execute("VACUUM INTO ?", [f"{database}-copy"])
    os.rename(f"{database}-copy", database)
    uses = [store.check, lambda: store.update_project("ann", park.id, {})]
    for use in uses if first == "check" else reversed(uses):
        with pytest.raises(Unavailable, match=REPLACED.format(database)) as failure:
            use()
        assert type(failure.value) is Unavailable
    for suffix in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            os.remove(database + suffix)  # they belong to the old file
    assert listed(open_store()) == [read(park)]


# In memory


def test_memory_is_shared_by_threads_and_by_nobody_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with closing_store(":memory:") as store:
        at_once(lambda _: [store.create_project("ann", {}) for _ in range(20)])
        store.engine.close()  # after which the database is still there
        assert len(listed(store)) == 160
        with closing_store(":memory:") as other:
            assert listed(other) == []
    assert list(tmp_path.iterdir()) == []


# Its locks


@pytest.mark.parametrize("key", [None, "k"])
def test_writers_queue_in_the_lock_file(store, park, database, key):
    result_after_unlock(
        hold_write_lock(database), database, lambda: store.create_project("ann", {}, key)
    )
    assert len(listed(store)) == 2


def test_process_that_is_forked_during_a_write_holds_nobody_up(park, database):
    """It has the lock file open for as long as it lives."""
    script = """with store.engine.writer(in_transaction=True):
        child = os.fork() or signal.pause()
    try:
        write(store)
    finally:
        os.kill(child, signal.SIGKILL)"""
    assert attempt(database, script) == ""


def test_stuck_lock_is_waited_for_once_and_then_looked_at(store, park, database, open_store):
    newcomer = open_store()
    with hold_write_lock(database):
        for each in at_once(lambda _: refusal(store), 3):
            assert re.match("still locked: |other writers take too long", each.reason)
            assert 2.5 <= each.seconds < 3.5
        for each in at_once(lambda _: refusal(store), 3):
            assert each.reason == REFUSED_BY_BREAKER and each.seconds < 0.5
        for reader in store, newcomer:
            assert reader.get_project("ann", park.id) == park
    retry_while_unavailable(store.create_project, "ann", {})
    with hold_write_lock(database):
        assert refusal(store).seconds >= 2.5


def test_foreign_lock_is_waited_for_by_one_writer_at_a_time(store, park, foreign_lock):
    def refusals():
        """Of four writers, as soon as one of them may try again."""
        found = sorted(at_once(lambda _: refusal(store), 4))
        return found[-1].reason != REFUSED_BY_BREAKER and found

    with foreign_lock():
        first, second = refusal(store), refusal(store)
        *others, last = wait_for(refusals)
        for seconds, reason in first, last:
            assert reason.startswith("database is locked") and 1 <= seconds < 2
        assert max(second, *others).seconds < 0.5
        assert store.get_project("ann", park.id) == park
    with lasts(0, 5):  # which is what a client waits who obeys Retry-After
        retry_while_unavailable(store.create_project, "ann", {})
    with foreign_lock():
        assert refusal(store).seconds >= 1


def test_writer_that_did_not_have_to_wait_lets_the_next_one_try(
    store, park, database, foreign_lock
):
    with foreign_lock():
        assert refusal(store).reason.startswith("database is locked")
    os.rename(database, f"{database}-away")
    wait_for(lambda: refusal(store).reason != REFUSED_BY_BREAKER)
    os.rename(f"{database}-away", database)
    assert len(listed(store)) == 1
    store.create_project("ann", {})


def test_lock_that_stops_readers_is_waited_for_once(store, park, plain_sql):
    plain_sql.execute("PRAGMA locking_mode = EXCLUSIVE")
    store.engine.close()  # or the other program could not have it alone
    plain_sql.execute("UPDATE account SET last_seq = 1")
    for at_least, reason in [(1, "database is locked"), (0, REFUSED_BY_BREAKER)]:
        with lasts(at_least, at_least + 1), fails(Unavailable, reason):
            store.get_project("ann", park.id)
    plain_sql.close()
    assert retry_while_unavailable(store.get_project, "ann", park.id) == park


def test_half_open_breaker_admits_one_caller_in_five_seconds():
    breaker = Breaker()
    breaker.record_timeout()
    retry_while_unavailable(lambda: breaker.admit() is None)
    with lasts(4):
        retry_while_unavailable(lambda: breaker.admit() is None)


# Faults


PERMISSIONS = [  # of the folder, the file, its -wal, -shm and -lock; and the outage that they mean
    (0o711, [0o444] * 4, "read(store); write(store)", "attempt to write a readonly database: {}"),
    (0o777, [0o666, 0o666, 0o666, 0], "write(store)", "Permission denied: {}-lock"),
    (0o777, [0, 0o666, 0o666, 0o666], "read(store)", "Permission denied: {}"),
    (0o777, [0o666, 0, 0o666, 0o666], "read(store)", "Permission denied: {}-wal"),
    (0o777, [0o666, 0o666, 0, 0o666], "read(store)", "Permission denied: {}-shm"),
    # SQLite needs a -shm there, and would say that the file is read-only.
    (0o555, [0o444], "read(store)", "its folder cannot be written to: {}"),
]


@pytest.mark.parametrize("folder_mode, modes, script, reason", PERMISSIONS)
def test_missing_permission_is_an_outage_that_is_named(
    open_store, folder_mode, modes, script, reason
):
    # pytest's own folders are for their owner alone.
    with TemporaryDirectory(dir="/var/tmp") as folder:
        database = f"{folder}/gardening.db"
        store = open_store(database)
        store.create_project("ann", {})
        if len(modes) == 1:
            store.engine.close()  # which removes the -shm
        for suffix, mode in zip(("", "-wal", "-shm", "-lock"), modes, strict=False):
            os.chmod(database + suffix, mode)
        os.chmod(folder, folder_mode)
        printed = attempt(database, f"os.geteuid() or os.setuid(65534); {script}")
        os.chmod(folder, 0o700)
    assert printed == f"Unavailable {reason.format(database)}\n"


@pytest.mark.parametrize(
    "script, outage",
    [
        (
            "read(store); limit(resource.RLIMIT_NOFILE, os.dup(0)); write(store)",
            "Unavailable Too many open files: {}-lock",
        ),
        # The connection itself met the error, since SQLite cannot create the -shm.
        ("limit(resource.RLIMIT_FSIZE, 0); write(store)", "Unavailable disk I/O error: {}"),
        # As at a quota of the disk.
        (
            "read(store); limit(resource.RLIMIT_FSIZE, 2**15); [write(store) for _ in range(99)]",
            "OutcomeUnknown disk I/O error (is the disk full, or a quota used up?): {}",
        ),
    ],
)
def test_limit_that_a_write_has_met_is_named(database, store, script, outage):
    assert attempt(database, script) == f"{outage.format(database)}\n"


@pytest.mark.parametrize("kept", [0, 100])  # bytes: none, or those of its header
def test_damaged_file_is_unavailable_until_it_is_repaired(store, park, database, kept):
    store.engine.close()
    with open(database, "r+b") as file:
        good = file.read()
        file.seek(kept)
        file.write(b"x" * (len(good) - kept))
        file.flush()
        before = open_files()
        with pytest.raises(Unavailable):
            store.get_project("ann", park.id)
        assert open_files() == before
        file.seek(0)
        file.write(good)
    assert store.get_project("ann", park.id) == park


OUTAGES = {
    "SQLITE_BUSY": Unavailable,
    "SQLITE_BUSY_SNAPSHOT": Unavailable,
    "SQLITE_LOCKED": Unavailable,
    "SQLITE_READONLY_DBMOVED": Unavailable,
    "SQLITE_CORRUPT": Unavailable,
    "SQLITE_FULL": Unavailable,
    "SQLITE_CANTOPEN": Unavailable,
    "SQLITE_PROTOCOL": Unavailable,
    "SQLITE_NOTADB": Unavailable,
    "SQLITE_IOERR_FSYNC": OutcomeUnknown,
    "SQLITE_ERROR": None,
    "SQLITE_CONSTRAINT_UNIQUE": None,
    "SQLITE_MISUSE": None,
    "SQLITE_SCHEMA": None,
}


@pytest.mark.parametrize(("name", "outage"), OUTAGES.items())
def test_code_of_an_error_decides_whether_it_is_an_outage(store, name, outage):
    error = sqlite3.OperationalError("planned")
    error.sqlite_errorname = name
    for writes, expected in [(True, outage), (False, outage and Unavailable)]:
        found = store.engine.translate_error(error, writes)
        assert (type(found) if found else None) is expected
