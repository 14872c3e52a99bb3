"""`flask restore` over a database that is there: while it is in use, and however it ends."""

import json
import os
import re
import shlex
import shutil
import sqlite3
import sys
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from app import create_app
from auth import digest
from engines.backup import BadBackup, backup, restore
from engines.errors import Unavailable
from engines.sqlite import SQLite
from helpers.running import BIN, at_once, closing_store, environment_of, run
from helpers.stores import listed


@pytest.fixture
def file(tmp_path):
    """A backup, whose one Project is called `new`."""
    with closing_store(str(tmp_path / "source.db")) as source:
        source.engine.open_database(creates=True)
        source.create_project("ann", {"name": "new"})
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


def restored_over(database, file):
    """The command that goes back, and the path in it, which a restore prints last."""
    app = create_app({"DATABASE": database})
    printed = app.test_cli_runner().invoke(args=["restore", file]).output
    *lines, last = printed.splitlines()
    restored = "Restored: accounts 1, Projects 1, tokens 0."
    assert lines == [restored, "The service uses it once it has restarted."]
    command = last.removeprefix("To go back: ")
    return command, re.fullmatch(r"GARDENING_DATABASE=\S+ \S+ -m flask restore (\S+)", command)[1]


def test_database_in_use_is_replaced_and_kept_and_the_restore_undone(old, database, file):
    """Until the service has restarted, it refuses writes."""
    command, kept = restored_over(database, file)
    assert not os.path.exists(f"{database}-wal") and not os.path.exists(f"{database}-shm")
    assert [project["name"] for project in listed(old)] == ["old"]
    with pytest.raises(Unavailable, match="^the database file was replaced; restart the service"):
        old.create_project("ann", {})
    old.engine.close()
    assert names_in(database) == ["new"]
    back = run("sh", "-c", command).stdout
    assert names_in(database) == names_in(kept) == ["old"]
    _, _, again = back.rpartition(" ")
    restored_over(database, again.strip())
    assert names_in(database) == ["new"]


@pytest.mark.parametrize("mode", ["wal", "delete"])  # the latter if the service never opened it
def test_write_that_was_acknowledged_before_the_switch_is_in_the_file_that_is_kept(
    old, database, file, plain_sql, mode
):
    """Even if the last connection closed meanwhile, which would delete the -wal."""
    if mode == "delete":
        old.engine.close()
        plain_sql.execute("PRAGMA journal_mode = DELETE")
        plain_sql.close()
    kept, acknowledged = [], ["old"]

    @contextmanager
    def restarting(_numbers, path):
        kept.append(path)
        old.engine.close()
        with suppress(Unavailable):
            opened.enter_context(closing_store(database)).create_project("ann", {"name": "later"})
            acknowledged.append("later")
        yield
        raise KeyboardInterrupt  # too late

    with ExitStack() as opened:
        with pytest.raises(KeyboardInterrupt):
            restore(SQLite(database), file, restarting)
        assert names_in(kept[0]) == acknowledged
    assert names_in(database) == ["new"]


@pytest.mark.parametrize("row", ["none", "token", "spent key"])
def test_database_is_filled_where_it_is_only_if_it_has_no_rows(store, database, file, row):
    if row == "token":
        store.add_token("ann", digest("one"))
    elif row == "spent key":
        store.delete_project("ann", store.create_project("ann", {}, "key").id)
    restore(SQLite(database), file)
    assert os.path.islink(database) == (row != "none")
    if row == "none":
        store.create_project("ann", {"name": "goes on"})
        assert names_in(database) == ["new", "goes on"]


UNUSABLE = [
    "PRAGMA user_version = 99",
    "PRAGMA application_id = 1",
    # SQLite quotes a byte of it, which is not UTF-8.
    """PRAGMA writable_schema = ON;
    UPDATE sqlite_schema SET sql = CAST(sql || x'20ff' AS TEXT) WHERE name = 'token'""",
    None,
]


@pytest.mark.parametrize("change", UNUSABLE)
def test_database_that_this_release_cannot_use_is_replaced(old, database, file, change):
    old.engine.close()
    if change:
        with closing(sqlite3.connect(database)) as connection:
            connection.executescript(change)
    else:
        Path(database).write_text("This is no database. " * 100)
    before = Path(database).read_bytes()
    _, kept = restored_over(database, file)
    assert (names_in(database), Path(kept).read_bytes()) == (["new"], before)


def test_link_in_the_same_folder_is_replaced_and_no_other_one(old, database, file, tmp_path):
    old.engine.close()
    link, elsewhere = tmp_path / "link.db", tmp_path / "folder/link.db"
    elsewhere.parent.mkdir()
    for path in (link, elsewhere):
        path.symlink_to(database)  # which is absolute
    _, kept = restored_over(str(link), file)
    assert (kept, names_in(link)) == (database, ["new"])
    reason = f"^a link that leads to another folder: {elsewhere}$"
    with pytest.raises(Unavailable, match=reason):
        restore(SQLite(str(elsewhere)), file)
    os.remove(link.resolve())  # a lost file is no hindrance
    restore(SQLite(str(link)), file)
    assert names_in(link) == ["new"]


@pytest.mark.parametrize("name", ["link.db", "x\nTo go back: false #.db"])
def test_database_whose_name_would_be_another_line_is_refused(file, tmp_path, name):
    """Whoever pastes the way back would run it."""
    target = shutil.copy(file, tmp_path / "x\nTo go back: false #.db")
    (tmp_path / "link.db").symlink_to(target)
    reason = f"^the path has a character that cannot be printed: {tmp_path / name}$"
    with pytest.raises(Unavailable, match=reason):
        restore(SQLite(str(tmp_path / name)), file)


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
    """And neither way back leads to the database that is in use."""
    old.engine.close()
    ways = []

    @contextmanager
    def noting(_numbers, path):
        ways.append(path)
        yield

    at_once(lambda _: restore(SQLite(database), file, noting), 2)
    assert len({*ways, os.path.realpath(database)}) == 3
    assert names_in(ways[0]) == ["old"]
    assert names_in(database) == ["new"]


@pytest.mark.parametrize("state", ["missing", "empty", "filled"])
def test_nothing_changes_if_what_is_restored_cannot_be_said(database, file, tmp_path, state):
    if state != "missing":
        with closing_store(database) as store:
            store.engine.open_database(creates=True)
            if state == "filled":
                store.create_project("ann", {"name": "old"})
    before = {path for path in tmp_path.iterdir() if "gardening.db-" not in path.name}

    def refusing(*_):
        raise Unavailable("refused")

    with pytest.raises(Unavailable, match="^refused$"):
        restore(SQLite(database), file, refusing)
    assert {path for path in tmp_path.iterdir() if "gardening.db-" not in path.name} == before
    if state != "missing":
        assert names_in(database) == (["old"] if state == "filled" else [])


def test_restore_needs_somebody_who_reads_what_it_says(database, file):
    script = f"{BIN}/flask restore {shlex.quote(file)} | true"
    refused = run("sh", "-c", script, environment=environment_of(database)).stderr
    assert refused.startswith("Error: nothing was changed: Broken pipe: standard output\n")
    assert not os.path.exists(database)


# Restores a file over a copy of the folder, in a process that ends, or that fails, at one of the
# calls by which it changes the folder: at the first one, at the second, and so on. Prints a line
# for each: the copy, the status of the process, or that it was killed, and its output.
ENDING = """
import itertools, json, os, shutil, signal, sys
from app import create_app

template, file, how = sys.argv[1:]
CALLS = ["open", *(f"os.{name}" for name in ("mkdir", "symlink", "link", "rename", "remove"))]

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
        app = create_app({"DATABASE": f"{folder}/gardening.db"})
        ended = app.test_cli_runner().invoke(args=["restore", file])
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
    assert len(steps) > 10
    found = set()
    for folder, status, output in steps:
        left = {path.name for path in Path(folder).glob("*.db")} - {"gardening.db"}
        [name] = names_in(f"{folder}/gardening.db")
        found.add(name)
        if name == "new":
            [kept] = [each for each in left if each.startswith("before-")]
            assert names_in(f"{folder}/{kept}") == ["old"]
        if status != "killed":
            is_done = name == "new"
            assert (status == 0, "To go back: " in output, bool(left)) == (is_done,) * 3
    assert found == {"old", "new"}
    assert ("and restore again" in str(steps)) == (how == "EIO")  # where a link cannot be made
