"""`flask restore` over a database that is there: while it is in use, and however it ends."""

import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from app import create_app
from auth import digest
from engines.backup import BadBackup, backup, restore
from engines.errors import Unavailable
from engines.sqlite import SQLite
from helpers.running import (
    BIN,
    PROJECTS,
    ROOT,
    TWO_WORKERS,
    Client,
    at_once,
    closing_store,
    environment_of,
    gunicorn,
    run,
    wait_for,
)
from helpers.stores import listed


@pytest.fixture
def file(tmp_path):
    """A backup, whose one Project is called `new`."""
    with closing_store(str(tmp_path / "source.db")) as source:
        source.engine.open_database(creates=True)
        source.create_project("ann", {"name": "new"})
        source.add_token("ann", digest("ann's"))
        backup(source.engine, str(tmp_path / "backup.db"))
    return str(tmp_path / "backup.db")


@pytest.fixture
def old(store):
    """The store, open, with a Project called `old`, which is in the -wal."""
    store.create_project("ann", {"name": "old"})
    return store


def names_in(path):
    """Of the Projects in a database."""
    with closing(sqlite3.connect(path)) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM project ORDER BY seq")]


def kept_beside(database):
    return sorted(Path(database).parent.glob("before-*.db"))


def restored_over(database, file):
    """The command that goes back, and the path in it, which a restore prints last."""
    app = create_app({"DATABASE": database})
    printed = app.test_cli_runner().invoke(args=["restore", file]).output
    restored, last = printed.splitlines()
    assert restored == "Restored: accounts 1, Projects 1, tokens 1."
    command = last.removeprefix("To go back: ")
    return command, re.fullmatch(r"GARDENING_DATABASE=\S+ \S+ -m flask restore (\S+)", command)[1]


def test_database_in_use_has_the_new_contents_at_once_and_the_restore_is_undone(
    old, database, file
):
    """In the same file, with all that was acknowledged before in the file that is kept."""
    inode = os.stat(database).st_ino
    command, kept = restored_over(database, file)
    show = (
        "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1], uri=True).execute(sys.argv[2]))"
    )
    in_file = [
        sys.executable,
        "-c",
        show,
        f"file:{database}?immutable=1",
        "SELECT name FROM project",
    ]
    assert run(*in_file).stdout == "('new',)\n"  # not in the -wal alone
    assert [project["name"] for project in listed(old)] == ["new"]
    assert old.find_caller(digest("ann's")) == ("ann", 1)
    assert old.revoke_token(1) and old.find_caller(digest("ann's")) is None
    old.create_project("ann", {"name": "later"})
    assert os.stat(database).st_ino == inode
    assert Path(kept).read_bytes()[18:20] == b"\1\1"  # in no WAL mode (file format, 1.3.3)
    assert names_in(kept) == ["old"]
    assert os.stat(kept).st_mode & 0o777 == 0o600
    run("sh", "-c", command)
    assert [project["name"] for project in listed(old)] == ["old"]
    assert [names_in(each) for each in kept_beside(database)] == [["old"], ["new", "later"]]


def test_database_that_the_service_never_opened_is_in_wal_mode_before_the_copy(
    old, database, file, plain_sql
):
    """Or a kill would leave a -journal, and nobody could read meanwhile."""
    old.engine.close()
    plain_sql.execute("PRAGMA journal_mode = DELETE")
    modes = []

    def look():
        assert plain_sql.execute("SELECT name FROM project").fetchall() == [("old",)]
        modes.extend(plain_sql.execute("PRAGMA journal_mode"))

    restore(SQLite(database), file, committing=look)
    assert modes == [("wal",)]


def test_restores_beside_clients_lose_nothing_and_refuse_nobody(environment, database, file):
    """Nor does anybody read the old contents once a restore is over."""
    app = create_app({"DATABASE": database})
    token = app.test_cli_runner().invoke(args=["token", "create", "ann"]).output.split()[-1]
    run(BIN / "flask", "backup", f"{file}-own", environment=environment)
    ended, created, restores = threading.Event(), [], []

    def has_created(count):
        return len(created) >= count

    def create(number):
        with Client(port, token) as client:
            while not ended.is_set():
                before = len(restores)
                name = f"{number}-{len(created)}"
                status, project = client.call("POST", PROJECTS, {"name": name})
                assert status == 201
                created.append(project["id"])
                status, projects = client.call("GET", PROJECTS)
                assert status == 200
                if len(restores) == before:
                    ids = {each["id"] for each in projects}
                    assert not ids & {id for known in restores for id in known}

    def restore_often():
        try:
            for number in range(1, 6):
                wait_for(partial(has_created, 10 * number))
                app.test_cli_runner().invoke(args=["restore", f"{file}-own"])
                [*_, kept] = kept_beside(database)
                restores.append(ids_in(kept))
        finally:
            ended.set()

    with gunicorn(environment, TWO_WORKERS) as (_, port):
        at_once(lambda number: create(number) if number else restore_often(), 4)
    assert len(restores) == 5
    assert {*created} == {*ids_in(database)}.union(*restores)
    assert len(created) == len(ids_in(database)) + sum(map(len, restores))


def ids_in(path):
    with closing(sqlite3.connect(path)) as connection:
        return [id for (id,) in connection.execute("SELECT id FROM project")]


DAMAGE = """PRAGMA writable_schema = ON;
UPDATE sqlite_schema SET sql = CAST(sql || x'20ff' AS TEXT) WHERE name = 'token'"""
UNUSABLE = {
    "newer": "PRAGMA user_version = 99",
    "damaged": DAMAGE,  # SQLite quotes a byte of it, which is not UTF-8
    "damaged, in no WAL mode": f"PRAGMA journal_mode = DELETE; {DAMAGE}",
}


@pytest.mark.parametrize("change", UNUSABLE.values(), ids=UNUSABLE)
def test_database_that_this_release_cannot_use_is_replaced_and_kept(old, database, file, change):
    old.engine.close()
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(change)
    before = Path(database).read_bytes()
    _, kept = restored_over(database, file)
    assert names_in(database) == ["new"]
    assert Path(kept).read_bytes()[100:] == before[100:]  # but for the head


def test_empty_file_is_replaced(database, file):
    Path(database).touch()
    restored_over(database, file)
    assert names_in(database) == ["new"]


REFUSED = {
    "another program's": (
        "the database was made by another program, or copied by one that dropped its mark: {}",
        f"PRAGMA application_id = 1; {DAMAGE}",
    ),
    "no database": (
        "file is not a database: {}; stop the service, and move it away with its -wal, -shm and",
        "This is no database. " * 1000,
    ),
    "truncated": ("database disk image is malformed: {}; stop the service, and move it away", 8192),
}


@pytest.mark.parametrize("reason, change", REFUSED.values(), ids=REFUSED)
def test_file_that_is_not_ours_or_cannot_be_read_at_all_is_refused(
    old, database, file, tmp_path, reason, change
):
    """Otherwise, a link would let a restore overwrite another program's file."""
    old.engine.close()
    if isinstance(change, int):
        os.truncate(database, change)
    elif "PRAGMA" in change:
        with closing(sqlite3.connect(database)) as connection:
            connection.executescript(change)
    else:
        Path(database).write_text(change)
    before = Path(database).read_bytes(), sorted(tmp_path.iterdir())
    with pytest.raises(Unavailable, match=f"^{reason.format(database)}"):
        restore(SQLite(database), file)
    assert (Path(database).read_bytes(), sorted(tmp_path.iterdir())) == before


@pytest.mark.parametrize("size", [1024, 65536])
def test_database_of_another_page_size_is_replaced(old, database, file, plain_sql, size):
    old.engine.close()
    plain_sql.executescript(f"PRAGMA journal_mode = DELETE; PRAGMA page_size = {size}; VACUUM")
    assert [project["name"] for project in listed(old)] == ["old"]
    _, kept = restored_over(database, file)
    assert [project["name"] for project in listed(old)] == ["new"]
    assert names_in(kept) == ["old"]
    assert plain_sql.execute("PRAGMA page_size").fetchall() == [(size,)]
    assert plain_sql.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_restore_gives_up_on_a_lock_of_another_program(old, database, file, foreign_lock):
    with foreign_lock(), pytest.raises(Unavailable, match="^locked or changed by another"):
        restore(SQLite(database), file)
    assert kept_beside(database) == []
    assert [project["name"] for project in listed(old)] == ["old"]


def test_link_to_another_folder_leads_to_the_database_that_is_replaced(
    old, database, file, tmp_path
):
    link = tmp_path / "folder/link.db"
    link.parent.mkdir()
    link.symlink_to(database)
    _, kept = restored_over(str(link), file)
    assert [Path(kept)] == kept_beside(database)
    assert [project["name"] for project in listed(old)] == ["new"]
    assert [*link.parent.iterdir()] == [link]


def test_name_of_a_database_prints_no_line_of_its_own(file, tmp_path):
    """Whoever pastes the way back would run it."""
    path = shutil.copy(file, tmp_path / "x\nTo go back: false #.db")
    app = create_app({"DATABASE": path})
    printed = app.test_cli_runner().invoke(args=["restore", file]).output
    assert len(printed.splitlines()) == 2


def test_database_itself_is_refused_by_any_name(old, database, tmp_path):
    os.link(database, tmp_path / "hard")
    (tmp_path / "symbolic").symlink_to(database)
    for name in ("gardening.db", "hard", "symbolic"):
        with pytest.raises(BadBackup, match=f"^it is the database itself: {tmp_path / name}$"):
            restore(SQLite(database), str(tmp_path / name))


def test_standard_input_is_restored(environment, database, file):
    for given, status in ((file, 0), (database, 1)):
        script = f"{BIN}/flask restore - <{shlex.quote(given)}"
        ended = run("sh", "-c", script, environment=environment, status=status)
    assert ended.stderr == "Error: it is the database itself: standard input\n"
    assert names_in(database) == ["new"]
    script = f"echo no database | {BIN}/flask restore --name theirs.db -"
    refused = run("sh", "-c", script, environment=environment, status=1).stderr
    assert refused == "Error: file is not a database: theirs.db\n"


def test_two_restores_at_once_are_both_done(old, database, file):
    """In threads, where no signal can be handled."""

    def restore_once(_):
        return create_app({"DATABASE": database}).test_cli_runner().invoke(args=["restore", file])

    assert [each.exit_code for each in at_once(restore_once, 2)] == [0, 0]
    assert sorted(map(names_in, kept_beside(database))) == [["new"], ["old"]]
    assert [project["name"] for project in listed(old)] == ["new"]


@pytest.mark.parametrize("state", ["missing", "filled"])
def test_restore_that_nobody_reads_has_succeeded(database, file, state):
    if state == "filled":
        shutil.copy(file, database)
    for output in ("| true", ">&-", ">/dev/full 2>/dev/full")[: 2 + os.path.exists("/dev/full")]:
        script = f"{BIN}/flask restore {shlex.quote(file)} {output}; [ ${{PIPESTATUS[0]}} = 0 ]"
        assert run("bash", "-c", script, environment=environment_of(database)).stdout == ""
    assert names_in(database) == ["new"]


def test_signals_of_a_process_that_calls_the_command_are_left_alone(database, file):
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    shutil.copy(file, database)
    restored_over(database, file)
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


@pytest.mark.parametrize("state", ["missing", "filled"])
def test_signal_after_the_first_line_is_too_late(environment, database, file, state):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if state == "missing":
            os.remove(database)
        with subprocess.Popen(
            [BIN / "flask", "restore", file], cwd=ROOT, env=environment, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout.readline().startswith(b"Restored: ")
            process.send_signal(number)
        assert process.returncode == 0


# Restores a file over a copy of the folder, in a process that ends, or that fails, at one of the
# calls by which it changes the folder: at the first one, at the second, and so on. Prints a line
# for each: the copy, the status of the process, or that it was killed, and its output.
ENDING = """
import itertools, json, os, shutil, signal, sys
from click.testing import CliRunner
from flask.cli import FlaskGroup
from app import create_app

template, file, how = sys.argv[1:]
CALLS = ["open", *(f"os.{name}" for name in ("mkdir", "link", "rename", "remove"))]

def end_at(step):
    def hook(event, arguments):
        # But for what is within a scratch folder.
        is_beside = f"{folder}/" in str(arguments) and ".partial/" not in str(arguments)
        if event in CALLS and is_beside and not fired and next(left, None) is None:
            fired.append(event)
            if how == "EIO":
                raise OSError(5, "Input/output error")
            os.kill(os.getpid(), signal.Signals[how])

    fired, left = [], iter(range(step))
    sys.addaudithook(hook)
    return fired

for step in itertools.count():
    folder = shutil.copytree(template, f"{template}-{step}")
    if not os.fork():
        fired = end_at(step)
        program = FlaskGroup(create_app=lambda: create_app({"DATABASE": f"{folder}/gardening.db"}))
        ended = CliRunner().invoke(program, ["restore", file])
        if not fired:
            os._exit(1)
        print(json.dumps([folder, ended.exit_code, ended.output]), flush=True)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.wait()[1])
    if status == 1:
        break
    if status:
        print(json.dumps([folder, "killed", ""]), flush=True)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "EIO"])
def test_restore_that_ends_at_any_call_leaves_the_old_database_or_the_new_one(
    old, database, file, tmp_path, how
):
    """Only what was killed leaves anything else, or the way back unsaid."""
    template = tmp_path / "template"
    template.mkdir()
    for part in ("", "-wal"):
        shutil.copy(f"{database}{part}", template)
    lines = run(sys.executable, "-c", ENDING, template, file, how).stdout.splitlines()
    steps = [json.loads(line) for line in lines]
    assert len(steps) > 8
    found = set()
    for folder, status, output in steps:
        kept = kept_beside(f"{folder}/gardening.db")
        [name] = names_in(f"{folder}/gardening.db")
        found.add(name)
        assert [*map(names_in, kept)] == [["old"]] * len(kept)
        assert kept or name == "old"
        if status != "killed":
            is_done = name == "new"
            assert (status == 0, "To go back: " in output, bool(kept)) == (is_done,) * 3, output
    assert found == {"old", "new"}
