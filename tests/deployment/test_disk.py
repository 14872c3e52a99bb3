"""SQLite files and backups on disks that fail, are full, or belong to somebody else."""

import os
import re
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from engines.backup import scratch
from helpers.running import (
    BIN,
    LIMIT,
    PROJECTS,
    ROOT,
    Client,
    closing_store,
    environment_of,
    fill,
    gunicorn,
    run,
    token_on,
)
from helpers.stores import fetch, listed
from test_backup import file, filled, run_command, source, target
from test_sqlite import attempt

STRACE = ["strace", "-f", "-qq", "-o", os.devnull, "-e"]


def test_sqlite_itself_creates_no_file(park, database, tmp_path):
    """SQLite might put another in the place of one that was lost meanwhile."""
    calls = tmp_path / "calls"
    trace = ["strace", "-f", "-o", calls, "-e", "%file", "-P", database]
    attempt(database, "write(store)", *trace)
    assert "O_RDWR" in calls.read_text() and "O_CREAT" not in calls.read_text()


@pytest.mark.parametrize("key", [None, "k"])
def test_write_that_the_disk_failed_to_sync_is_in_doubt(store, park, database, key):
    """After a crash, SQLite may find it in the WAL."""
    fault = [*STRACE, "inject=fdatasync,fsync:error=EIO"]
    printed = attempt(database, f"write(store, {key!r})", *fault)
    assert printed == f"OutcomeUnknown disk I/O error: {database}\n"


def test_command_says_that_its_outcome_is_unknown(store, database):
    store.engine.close()
    environment = environment_of(database)
    fault = [*STRACE, "inject=fdatasync,fsync:error=EIO"]
    command = [*fault, BIN / "flask", "token", "create", "ann"]
    ended = run(*command, environment=environment, status=1)
    hint = "the change may have been made, or not"
    assert ended.stderr == f"Error: disk I/O error: {database}; {hint}\n"


def test_full_disk_stops_writes_until_there_is_room(mount, tmp_path):
    disk = tmp_path / "disk"
    mount(disk, "1m")
    database = str(disk / "gardening.db")
    token = token_on(database)
    with gunicorn(environment_of(database)) as (_, port), Client(port, token) as client:
        body, acknowledged = {"name": "😀" * 255}, 1
        assert client.call("POST", PROJECTS, body)[0] == 201
        fill(disk)
        for _ in range(1000):  # what SQLite has reserved is to be full as well
            status, headers, _ = client.ask("POST", PROJECTS, body)
            if status != 201:
                break
            acknowledged += 1
        assert (status, headers["Retry-After"]) == (503, "5")
        assert client.call("GET", "/health")[0] == 200
        revocation = run(
            BIN / "flask", "token", "revoke", "1", environment=environment_of(database), status=1
        )
        assert "database or disk is full" in revocation.stderr
        assert len(client.call("GET", PROJECTS)[1]) == acknowledged
        (disk / "filler").unlink()
        assert client.call("POST", PROJECTS, body)[0] == 201
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_start_on_a_full_disk_asks_whether_it_is_full(mount, tmp_path):
    disk = tmp_path / "disk"
    mount(disk, "1m")
    database = str(disk / "gardening.db")
    token_on(database)
    fill(disk)
    output = run_command(database, "open-db", status=1)
    assert output == f"Error: disk I/O error (is the disk full, or a quota used up?): {database}\n"


def test_sorting_needs_no_disk(store, database, file, mount, tmp_path):
    """As in a container whose only folder that can be written to is that of the database."""
    disk = tmp_path / "disk"
    mount(disk, "64k")
    fill(disk)
    with closing(sqlite3.connect(database)) as plain_sql, plain_sql:
        plain_sql.execute(
            """WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 60000)
            INSERT INTO account (name) SELECT 'a somewhat longer name, the account ' || i FROM n"""
        )
    environment = environment_of(database) | {"TMPDIR": str(disk)}
    listed = run(BIN / "flask", "account", "list", environment=environment).stdout
    assert listed.count("\n") == 60001
    run(BIN / "flask", "backup", file, environment=environment)
    environment["GARDENING_DATABASE"] = str(tmp_path / "restored.db")
    run(BIN / "flask", "restore", file, environment=environment)


def test_full_disk_leaves_no_half_backup_and_no_half_restore(
    source, database, filled, mount, tmp_path
):
    disk = tmp_path / "disk"
    mount(disk, "1m")
    for _ in range(50):  # more than SQLite's cache holds, so that it writes a journal
        source.create_project("ann", {"name": "x" * 100_000})
    for fills in (lambda _: None, fill):
        fills(disk)
        output = run_command(database, "backup", str(disk / "backup.db"), status=1)
        assert output.startswith(f"Error: the copy to {disk}/backup.db failed: ")
        assert output.count("\n") == 1
        assert f"no space left in {disk}\n" in output or database.startswith("postgresql://")
    output = run_command(str(disk / "restored.db"), "restore", filled, status=1)
    assert re.fullmatch(f"Error: no space left in {disk}/.*\n", output)
    assert os.listdir(disk) == ["filler"]


def test_disk_that_is_mounted_read_only_is_said_to_be_so(mount, tmp_path):
    disk = tmp_path / "disk"
    mount(disk, "1m")
    database = str(disk / "gardening.db")
    token_on(database)
    run("mount", "-o", "remount,ro", disk)
    for command in (["open-db"], ["token", "list"], ["token", "create", "ann"]):
        output = run_command(database, *command, status=1)
        assert output == f"Error: its folder cannot be written to: {database}\n"


def test_backup_is_on_the_disk_before_it_has_its_name(store, database, file, tmp_path):
    """By an fsync of our own, whatever SQLite does."""
    calls = "trace=fsync,link,linkat"
    command = ["strace", "-f", "-qq", "-y", "-o", tmp_path / "calls", "-e", calls]
    run(*command, BIN / "flask", "backup", file, environment=environment_of(database))
    # Before the names, linkat has the folder that a relative one would start from.
    names = r"(fsync|link).*?(?:\"|\(\d+<)[^\">]*/([^\">]+)"
    made = re.findall(names, (tmp_path / "calls").read_text())
    made = [(call, re.sub("gardening-.*partial", "partial", name)) for call, name in made]
    assert made == [("fsync", "partial"), ("link", "partial"), ("fsync", tmp_path.name)]


def test_file_system_without_links_will_do(database, file, target):
    """Such as exFAT, SMB, some of FUSE, and Termux, in this order."""

    def flask(error, *arguments, database=database):
        command = [*STRACE, f"inject=link,linkat:error={error}", BIN / "flask", *arguments]
        return run(*command, environment=environment_of(database))

    flask("EPERM", "init-db")
    os.remove(f"{database}-lock")
    flask("EOPNOTSUPP", "token", "create", "ann")
    flask("ENOSYS", "backup", file)
    restored = flask("EACCES", "restore", file, database=target)
    assert restored.stdout == "Restored: accounts 1, Projects 0, tokens 1.\n"
    assert list(Path(file).parent.glob("gardening-*")) == []


def test_new_database_replaces_none_that_another_process_has_filled(database):
    """On a file system without links, an empty file takes the name, and nothing is renamed."""
    faults = "inject=link,linkat:error=EPERM", "-e", "inject=rename:error=EIO"
    command = [*STRACE, *faults, BIN / "flask", "init-db"]
    run(*command, environment=environment_of(database))


def test_backup_that_cannot_get_its_name_leaves_no_file(store, database, file):
    """On a file system without links, where an empty file takes the name first."""
    faults = "inject=link,linkat:error=EPERM", "-e", "inject=rename:error=EIO"
    command = [*STRACE, *faults, BIN / "flask", "backup", file]
    failed = run(*command, environment=environment_of(database), status=1)
    assert failed.stderr == f"Error: Input/output error: {file}\n"
    assert [path for path in Path(file).parent.iterdir() if "gardening.db" not in path.name] == []


def test_folder_that_cannot_be_synced_fails_nothing(store, database, file, tmp_path):
    """As on some file systems: the second fsync is that of the folder."""
    fault = ["-e", "trace=fsync", "-e", "inject=fsync:error=EINVAL:when=2"]
    command = ["strace", "-f", "-qq", "-o", tmp_path / "calls", *fault]
    run(*command, BIN / "flask", "backup", file, environment=environment_of(database))
    assert (tmp_path / "calls").read_text().count("EINVAL") == 1
    assert os.path.exists(file)


def test_restore_that_has_committed_succeeds_whatever_cannot_be_removed(filled, target):
    """Or an operator would undo it."""
    fault = [*STRACE, "inject=rmdir,unlinkat:error=EIO"]
    environment = environment_of(target)
    ended = run(*fault, BIN / "flask", "restore", filled, environment=environment)
    assert ended.stdout == "Restored: accounts 2, Projects 61, tokens 2.\n"


# What happens at one call of a restore on the database or its -wal, or at all from there on.
FAULTS = [
    "fdatasync,fsync:error=EIO:when={}",
    "pwrite64:error=EIO:when={}",
    "pwrite64:error=ENOSPC:when={}+",
    "pwrite64:signal=TERM:when={}",
    "pwrite64,fdatasync,fsync,ftruncate:signal=KILL:when={}",
]


def names_of_ann(store):
    return [project["name"] for project in listed(store)]


@pytest.mark.parametrize("fault", FAULTS)
def test_restore_over_a_database_keeps_what_was_there_and_says_what_is_so(filled, tmp_path, fault):
    """For whoever has it open, and for whoever opens it afterwards."""
    for step in (1, 2, 3, 4, 8, 16, 32, 64, 128):
        folder = tmp_path / str(step)
        folder.mkdir()
        database, calls = str(folder / "gardening.db"), folder / "calls"
        strace = ["strace", "-f", "-qq", "-o", calls, "-P", database, "-P", f"{database}-wal"]
        command = [*strace, "-e", f"inject={fault.format(step)}", BIN / "flask", "restore", filled]
        with closing_store(database) as store:
            store.engine.open_database(creates=True)
            store.create_project("ann", {"name": "old"})
            ended = subprocess.run(
                command,
                cwd=ROOT,
                env=environment_of(database),
                capture_output=True,
                text=True,
                timeout=LIMIT,
                check=False,
            )
            [name] = names_of_ann(store)
        with closing_store(database) as reopened:
            [later] = names_of_ann(reopened)
            assert fetch(reopened, "PRAGMA integrity_check") == [("ok",)]
        if not re.search("INJECTED|SIG", calls.read_text()):
            break
        kept = [*folder.glob("before-*.db")]
        for path in kept:
            with closing_store(str(path)) as store:
                assert names_of_ann(store) == ["old"]
        is_unknown = "the change may have been made" in ended.stderr
        assert name == later or is_unknown
        assert kept or later == "old"
        if "KILL" not in fault:
            is_done = "Restored: " in ended.stdout
            assert is_done is (ended.returncode == 0) and is_done is (ended.stderr == "")
            assert is_unknown or (later == "Park") is is_done
            assert is_done or bool(kept) is ("what was there is kept in" in ended.stderr)
            assert is_done or "TERM" not in fault
    assert step > 3


def test_write_whose_lock_fails_after_the_commit_is_in_doubt(store, park, database):
    """The second flock of a write is the one that unlocks."""
    fault = [*STRACE, "inject=flock:error=EIO:when=2"]
    printed = attempt(database, "write(store)", *fault)
    assert printed == f"OutcomeUnknown Input/output error: {database}\n"
    assert len(listed(store)) == 2


def test_root_gives_away_only_what_it_has_opened(tmp_path):
    """By its name it could be a link by then, which the folder's owner has put in its place."""
    folder, calls = tmp_path / "theirs", tmp_path / "calls"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    environment = environment_of(str(folder / "new/gardening.db"))
    for command in (["init-db"], ["backup", folder / "backup.db"]):
        trace = ["strace", "-f", "-qq", "-o", calls, "-e", "/chown|mkdir"]
        run(*trace, BIN / "flask", *command, environment=environment)
        made = re.findall(r"\d+ +(\w*(?:chown|mkdir)\w*)\(.*", calls.read_text())
        assert set(made) == ({"fchown", "mkdirat"} if command == ["init-db"] else {"fchown"})


def test_copy_of_root_is_in_no_folder_of_somebody_else(tmp_path):
    """Who could put a link in its place."""
    theirs, own = tmp_path / "theirs", tmp_path / "own"
    theirs.mkdir()
    own.mkdir()
    os.chown(theirs, 65534, 65534)
    for folder, is_there in [(theirs, False), (own, True)]:
        with scratch(str(folder)) as copy:
            assert (os.path.dirname(copy) == str(folder)) is is_there


def test_files_that_root_cannot_give_away_are_written_all_the_same(tmp_path):
    """As on NFS, where root may be nobody."""
    folder = tmp_path / "data"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    environment = environment_of(str(folder / "gardening.db"))
    command = ["setpriv", "--bounding-set=-chown", BIN / "flask", "init-db"]
    run(*command, environment=environment)
    assert (folder / "gardening.db").stat().st_uid == 0


def test_what_root_creates_belongs_to_the_owner_of_the_folder_around_it(tmp_path):
    os.chown(tmp_path, 65534, 65534)
    database = str(tmp_path / "new/gardening.db")
    run_command(database, "init-db")
    run_command(database, "backup", str(tmp_path / "new/backup.db"))
    made = [tmp_path / "new", *tmp_path.glob("new/*")]
    assert len(made) >= 4
    assert {(each.stat().st_uid, each.stat().st_gid) for each in made} == {(65534, 65534)}
    assert made[0].stat().st_mode & 0o777 == 0o700
    os.chown(database, 0, 0)
    run_command(database, "init-db")
    assert os.stat(database).st_uid == 0  # what is there is left as it is


@pytest.mark.parametrize("options, folder", [("ro", "None"), ("rw", "/dev/shm")])
def test_heartbeats_touch_no_disk_where_there_is_memory(options, folder):
    """With --read-only, a container has none that gunicorn could write to."""
    script = f"mount -t tmpfs -o {options} none /dev/shm && {BIN}/gunicorn --print-config"
    printed = run("unshare", "--mount", "sh", "-c", script).stdout
    assert re.search(rf"(?m)^worker_tmp_dir += {folder}$", printed)
