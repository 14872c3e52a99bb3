"""Moving from the SQLite file to PostgreSQL with migrate.py."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from postgresql import server
from running import ROOT

from auth import digest
from postgres import PostgreSQL
from store import Page, Store

LIMIT = 30  # seconds for a process to end
PAGES = [None, Page(0, 2), Page(1, 20)]
TEXTS = [
    None,
    "",
    " ",
    "\\N",
    "\\.",
    "NULL",
    "'\"\\/,;\t\n\r\r\n\b\f\x0b",
    "\ufeffé\u2028\u2029\ufffd\uffff\U0010ffff",
    "".join(map(chr, range(1, 0x3000))),
    json.dumps({"name": "é"}),
]
POINT = {"type": "Point", "coordinates": [-122.4410896675, 5e-324]}


@pytest.fixture
def database(path):
    return path


@pytest.fixture(scope="module")
def primary():
    with server(fsync="off") as primary:
        yield primary


@pytest.fixture
def target(primary):
    url = primary.create_database()
    yield url
    primary.drop_database(url)


@pytest.fixture
def source(store):
    """Projects of two accounts, with gaps and changes, and tokens, one of them revoked."""
    for text in TEXTS:
        store.create_project("ann", {"name": text, "postal_code": text})
        store.create_project("bob é", {"name": text, "location": POINT})
    for project in json.loads(store.list_projects("ann", ()).document)[1:3]:
        store.update_project("ann", project["id"], {"location": POINT}, None)
    first, *_, last = json.loads(store.list_projects("bob é", ()).document)
    store.delete_project("bob é", first["id"], None)
    store.delete_project("bob é", last["id"], None)
    for days in None, 30, None:
        store.add_token("ann", os.urandom(32), days)
    store.add_token("bob é", digest("bob's"))
    store.revoke_token(4)
    return store


def migrate(path, target, status=0):
    command = [sys.executable, ROOT / "migrate.py", path]
    environment = os.environ | {"FLASK_DATABASE": target}
    end = subprocess.run(
        command,
        check=False,
        env=environment,
        text=True,
        capture_output=True,
        timeout=LIMIT,
    )
    assert end.returncode == status, end.stderr
    return end.stderr if status else end.stdout


def everything(store):
    """What the service can answer: documents, ETags and tokens."""
    lists = [
        store.list_projects(account, (), page)
        for account in ["ann", "bob é", "eve"]
        for page in PAGES
    ]
    projects = [
        store.get_project(account, project["id"])
        for account in ["ann", "bob é"]
        for project in json.loads(store.list_projects(account, ()).document)
    ]
    return lists, projects, store.list_tokens()


def read(url, statement):
    with psycopg.connect(url) as connection:
        return connection.execute(statement).fetchall()


def is_empty(url):
    tables = ["account", "token", "project", "part"]
    return [read(url, f"TABLE {table}") for table in tables] == [[], [], [], []]


def test_everything_is_the_same_and_goes_on(source, path, target):
    counts = "Copied 2 accounts, 3 tokens, 18 Projects and 0 parts.\n"
    assert migrate(path, target) == counts
    moved = Store(PostgreSQL(target))
    assert everything(moved) == everything(source)

    for account in "ann", "bob é":
        known = [source.list_projects(account, ()).etag]
        assert moved.list_projects(account, known).document is None
        created = json.loads(moved.create_project(account, {}).document)
        assert json.loads(moved.list_projects(account, known).document)[-1] == created
    moved.add_token("bob é", digest("new"))
    assert [id for id, *_ in moved.list_tokens()] == [1, 2, 3, 5]
    moved.close()


def test_keys_are_remembered_and_tokens_act(store, path, target):
    project = store.create_project("ann", {}, "key")
    store.add_token("ann", digest("a"))
    store.add_token("ann", digest("b"), 1)
    migrate(path, target)
    moved = Store(PostgreSQL(target))
    assert moved.create_project("ann", {"name": "again"}, "key") == project
    assert [moved.find_account(digest(t)) for t in "abc"] == ["ann", "ann", None]
    moved.close()


def test_parts_are_deleted_with_their_moved_project(store, path, target):
    project = store.create_project("ann", {})
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("INSERT INTO part VALUES ('z1', ?, 'zone')", [project.id])
    assert "1 parts" in migrate(path, target)
    assert read(target, "TABLE part") == [("z1", project.id, "zone")]
    moved = Store(PostgreSQL(target))
    moved.delete_project("ann", project.id, None)
    assert read(target, "TABLE part") == []
    moved.close()


def test_what_older_releases_took_is_carried_over(store, path, target):
    spaced = '{"type": "Point", "coordinates": [1e2, 1.50]}'
    old, new = (store.create_project("ann", {}).id for _ in range(2))
    with closing(sqlite3.connect(path)) as file, file:
        sql = "UPDATE project SET name = ?, postal_code = ?, location = ? WHERE id = ?"
        file.execute(sql, ["a\0b\0", "\0", spaced, old])
    command = [sys.executable, ROOT / "migrate.py", path]
    environment = os.environ | {"FLASK_DATABASE": target}
    end = subprocess.run(
        command, check=True, env=environment, text=True, capture_output=True
    )
    assert end.stderr == f"Project {old}: U+0000 is now U+FFFD\n"
    moved = Store(PostgreSQL(target))
    document = moved.get_project("ann", old).document
    assert document.endswith(
        ',"postal_code":"\ufffd",'
        '"location":{"type":"Point","coordinates":[1e2,1.50]}}'.encode()
    )
    assert json.loads(document)["name"] == "a\ufffdb\ufffd"
    assert moved.get_project("ann", new) == store.get_project("ann", new)
    moved.close()


def test_empty_file_of_the_service_moves(store, path, target):
    migrate(path, target)
    moved = Store(PostgreSQL(target))
    moved.add_token("ann", digest("a"))
    assert moved.list_tokens()[0][0] == 1
    moved.close()


@pytest.mark.parametrize("what", ["project", "token"])
def test_target_that_holds_something_is_left_alone(source, path, target, what):
    taken = Store(PostgreSQL(target))
    if what == "project":
        taken.create_project("eve", {})
    else:
        taken.add_token("eve", digest("eve's"))
    before = everything(taken)
    refused = migrate(path, target, 1)
    assert refused == "Error: the target is not empty\n"
    assert everything(taken) == before
    taken.close()


FOREIGN = ["CREATE TABLE t (x)", "PRAGMA application_id = 1"]
NEWER = ["PRAGMA application_id = 0x67617264", "PRAGMA user_version = 2"]


@pytest.mark.parametrize("statements", [FOREIGN, NEWER, []])
def test_source_that_is_not_ours_is_left_alone(path, target, statements):
    with closing(sqlite3.connect(path)) as file:
        for statement in statements:
            file.execute(statement)
    before = Path(path).read_bytes()
    refused = migrate(path, target, 1)
    assert refused == "Error: the file was made by another program or a newer release\n"
    assert Path(path).read_bytes() == before
    assert read(target, "SELECT FROM pg_tables WHERE schemaname = 'public'") == []


def test_missing_source_is_refused_and_not_created(path, target):
    assert migrate(path, target, 1) == "Error: unable to open database file\n"
    assert not os.path.exists(path)
    assert read(target, "SELECT FROM pg_tables WHERE schemaname = 'public'") == []


def test_database_of_another_program_is_refused(primary, source, path, target):
    with psycopg.connect(target) as connection:
        connection.execute("CREATE TABLE theirs ()")
    assert migrate(path, target, 1).count("\n") == 1
    assert read(target, "SELECT FROM pg_tables WHERE schemaname = 'public'") == [()]


def test_url_is_no_argument(target):
    url = "postgresql://u:tops3cret@h/d"
    assert migrate(url, target, 1) == "Error: unable to open database file\n"
    assert "FLASK_DATABASE=postgresql://…" in migrate(url, "", 1)


def test_failure_in_the_middle_leaves_the_target_empty(source, path, target):
    with closing(sqlite3.connect(path)) as file, file:
        sql = "UPDATE project SET location = '{' WHERE account = 'ann' AND seq = 9"
        file.execute(sql)
    assert migrate(path, target, 1) == "Error: malformed JSON\n"
    assert is_empty(target)
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE project SET location = NULL WHERE location = '{'")
    migrate(path, target)


WAIT_AT_PARTS = """
CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN new; END';
CREATE TRIGGER wait BEFORE INSERT ON part FOR EACH ROW EXECUTE FUNCTION wait()
"""


def test_kill_in_the_middle_leaves_the_target_empty(source, path, target):
    """The tables are copied in an order of which that of the parts is the last."""
    id = json.loads(source.list_projects("ann", ()).document)[0]["id"]
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("INSERT INTO part VALUES ('z1', ?, 'zone')", [id])
    with closing(Store(PostgreSQL(target))) as empty:
        assert empty.list_tokens() == []
    with psycopg.connect(target, autocommit=True) as lock:
        lock.execute(WAIT_AT_PARTS)
        lock.execute("SELECT pg_advisory_lock(1)")
        command = [sys.executable, ROOT / "migrate.py", path]
        environment = os.environ | {"FLASK_DATABASE": target}
        with subprocess.Popen(command, env=environment) as process:
            waiting = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            deadline = time.monotonic() + LIMIT
            while not lock.execute(waiting).rowcount:
                assert time.monotonic() < deadline
            process.send_signal(signal.SIGKILL)
    assert is_empty(target)
    migrate(path, target)
