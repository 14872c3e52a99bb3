"""`flask backup` and `flask restore`: from and to either engine, whole or not at all."""

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psycopg
import pytest
from conftest import on_sqlite, store_on
from running import BIN, LIMIT, POINT, ROOT, at_once, fill, run, wait_for

import store as module
from app import create_app
from store import KeyReused, KeySpent, Page, Unavailable

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
LINE = {"type": "Point", "coordinates": [-122.4410896675, 5e-324]}


def digest(text):
    return hashlib.sha256(text.encode()).digest()


@pytest.fixture
def source(store, raw):
    """Projects of two accounts, with gaps, changes and keys, and tokens, some revoked."""
    for text in TEXTS:
        store.create_project("ann", {"name": text, "postal_code": text})
        store.create_project("bob é", {"name": text, "location": LINE})
    for project in json.loads(store.list_projects("ann", ()).document)[1:3]:
        store.update_project("ann", project["id"], {"location": POINT})
    first, *_, last = json.loads(store.list_projects("bob é", ()).document)
    store.delete_project("bob é", first["id"])
    store.delete_project("bob é", last["id"])
    store.create_project("ann", {"name": "kept"}, "key")
    store.delete_project("ann", store.create_project("ann", {}, "spent").id)
    for name in ("one", "two", "three", "four"):
        store.add_token("ann", digest(name), 30 if name == "two" else None)
    for id in (2, 4):
        store.revoke_token(id)
    raw.execute(f"INSERT INTO part VALUES ('z1', '{first_id(store)}', 'zone')")
    return store


def first_id(store):
    return json.loads(store.list_projects("ann", ()).document)[0]["id"]


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def target(request, tmp_path):
    """The path or URL of another empty database, one of each engine."""
    if request.param == "SQLite":
        yield str(tmp_path / "target.db")
    else:
        server = request.getfixturevalue("server")
        url = server.create_database()
        yield url
        server.drop_database(url)


@pytest.fixture
def file(tmp_path):
    return str(tmp_path / "backup.db")


@pytest.fixture
def open_target(target):
    with ExitStack() as stores:
        yield lambda: stores.enter_context(closing(store_on(target)))


def flask(database, *arguments, status=0):
    """What the command prints, errors included."""
    app = create_app({"DATABASE": database})
    with closing(app.extensions["store"]), app.app_context():
        ended = app.test_cli_runner().invoke(args=arguments)
    assert ended.exit_code == status, ended.output
    return ended.output


def everything(store):
    """What the service can return: documents, ETags, tokens and accounts."""
    lists = [
        store.list_projects(account, (), page)
        for account in ["ann", "bob é", "eve"]
        for page in PAGES
    ]
    return lists, store.list_tokens(), store.list_accounts()


def test_all_is_the_same_and_goes_on(source, database, file, target, open_target):
    assert flask(database, "backup", file) == ""
    told = "Restored 2 accounts, 19 Projects and 2 tokens.\n"
    assert flask(target, "restore", file) == told
    restored = open_target()
    assert everything(restored) == everything(source)

    assert restored.find_account(digest("one")) == "ann"
    assert restored.find_account(digest("four")) is None
    assert restored.add_token("ann", digest("five")) == 5
    again = restored.create_project("ann", {"name": "kept"}, "key")
    assert again == source.create_project("ann", {"name": "kept"}, "key")
    with pytest.raises(KeyReused):
        restored.create_project("ann", {}, "key")
    with pytest.raises(KeySpent):
        restored.create_project("ann", {}, "spent")
    for account in "ann", "bob é":
        known = [source.list_projects(account, ()).etag]
        assert restored.list_projects(account, known).document is None
        created = restored.create_project(account, {})
        found = json.loads(restored.list_projects(account, known).document)
        assert found[-1] == json.loads(created.document)
    restored.delete_project("ann", first_id(restored))


def test_seq_of_a_deleted_project_is_not_given_again(
    store, database, file, open_target
):
    store.create_project("ann", {})
    store.delete_project("ann", store.create_project("ann", {}).id)
    store.backup(file)
    restored = open_target()
    restored.restore(file)
    for each in store, restored:
        each.create_project("ann", {})
        assert each.list_projects("ann", (), Page(0, 1)).next == 1
        page = each.list_projects("ann", (), Page(0, 1, 2))
        assert json.loads(page.document)["projectList"]


def test_backup_is_private_and_replaces_nothing(store, database, file):
    flask(database, "backup", file)
    assert os.stat(file).st_mode & 0o777 == 0o600
    before = Path(file).read_bytes()
    assert flask(database, "backup", file, status=1) == f"Error: File exists: {file}\n"
    assert Path(file).read_bytes() == before
    missing = "/no/such/folder/x.db"
    told = flask(database, "backup", missing, status=1)
    assert told.startswith(f"Error: No such file or directory: {missing}.")


def test_backup_replaces_no_link_that_leads_nowhere(store, file):
    os.symlink("nowhere", file)
    with pytest.raises(FileExistsError):
        store.backup(file)
    assert os.readlink(file) == "nowhere"
    assert not os.path.exists(f"{file}.partial")


def test_first_token_after_a_restore_without_one_has_the_id_1(store, file, open_target):
    store.backup(file)
    restored = open_target()
    restored.restore(file)
    assert restored.add_token("ann", digest("one")) == 1


def test_full_disk_leaves_no_half_backup(source, database, mount, tmp_path):
    disk = tmp_path / "disk"
    mount(disk, "64k")
    fill(disk)
    told = flask(database, "backup", str(disk / "backup.db"), status=1)
    assert told.startswith("Error: ") and told.count("\n") == 1
    assert os.listdir(disk) == ["filler"]


def test_backup_is_whole_and_leaves_nothing_else(source, file):
    before = set(os.listdir(os.path.dirname(file)))
    source.backup(file)
    assert set(os.listdir(os.path.dirname(file))) - before == {os.path.basename(file)}
    with closing(sqlite3.connect(file)) as copy:
        assert copy.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_backup_is_the_state_of_one_moment(store, file, tmp_path):
    """While an account's Projects are added, its counter is that of the last one."""
    ended = threading.Event()

    def write():
        while not ended.is_set():
            store.create_project("ann", {}, os.urandom(8).hex())

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(5):
            store.backup(f"{file}{number}")
    finally:
        ended.set()
        writer.join(LIMIT)
    select = """SELECT created, (SELECT max(seq) FROM project),
        (SELECT count(*) FROM project), (SELECT count(*) FROM idempotency_key)
        FROM account"""
    for number in range(5):
        with closing(sqlite3.connect(f"{file}{number}")) as copy:
            for row in copy.execute(select):
                assert len(set(row)) == 1


def test_one_of_many_backups_to_one_file_is_made(source, file):
    results = at_once(lambda _: source.backup(file), 4, errors=FileExistsError)
    assert sum(isinstance(each, FileExistsError) for each in results) == 3
    with closing(sqlite3.connect(file)) as copy:
        assert copy.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.parametrize("what", ["project", "token", "account"])
def test_database_that_holds_something_is_left_alone(
    source, database, file, open_target, what
):
    source.backup(file)
    taken = open_target()
    if what == "token":
        taken.add_token("eve", digest("eve's"))
    else:
        id = taken.create_project("eve", {}).id
        if what == "account":
            taken.delete_project("eve", id)
    before = everything(taken)
    with pytest.raises(Unavailable, match="^the database to fill is not empty$"):
        taken.restore(file)
    assert everything(taken) == before


def test_restore_does_not_wait_for_a_service_that_uses_the_database(
    source, file, target, open_target
):
    source.backup(file)
    empty = open_target()
    empty.list_tokens()
    with ExitStack() as stack:
        if target.startswith("postgresql://"):
            limit = f"-c idle_in_transaction_session_timeout={LIMIT}s"
            other = stack.enter_context(psycopg.connect(target, options=limit))
            other.execute("SELECT * FROM token FOR UPDATE")
        else:
            other = stack.enter_context(closing(sqlite3.connect(target)))
            other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Unavailable, match="lock"):
            empty.restore(file)
        other.rollback()
    assert empty.list_accounts() == []
    empty.restore(file)
    assert everything(empty) == everything(source)


@pytest.mark.parametrize("side", ["more", "less"])
def test_column_that_one_side_lacks_is_refused(source, file, target, open_target, side):
    source.backup(file)
    restored = open_target()
    restored.list_tokens()
    change = "ALTER TABLE token ADD COLUMN notes TEXT"
    if side == "more":
        with closing(sqlite3.connect(file)) as copy:
            copy.execute(change)
    elif target.startswith("postgresql://"):
        with psycopg.connect(target) as other:
            other.execute(change)
    else:
        with closing(sqlite3.connect(target)) as other:
            other.execute(change)
    with pytest.raises(Unavailable, match="^only one side has token.notes$"):
        restored.restore(file)
    assert restored.list_accounts() == []


def test_failure_in_the_middle_leaves_the_database_empty(
    source, file, target, open_target
):
    source.backup(file)
    with closing(sqlite3.connect(file)) as copy, copy:
        copy.execute("DROP TABLE part")
        copy.execute("CREATE TABLE part (id TEXT, project TEXT, kind TEXT)")
        copy.execute("INSERT INTO part VALUES ('z', 'no such Project', 'zone')")
    empty = open_target()
    with pytest.raises(Exception, match="(?i)foreign key"):
        empty.restore(file)
    assert everything(empty)[1:] == ([], [])


RESTORE = """
import sys
from store import SQLite, Store
from postgres import PostgreSQL
engine = PostgreSQL if "://" in sys.argv[1] else SQLite
engine.fill = lambda *_: print("filling", flush=True) or sys.stdin.read()
Store(engine(sys.argv[1])).restore(sys.argv[2])
"""


def test_kill_in_the_middle_leaves_the_database_empty(
    source, file, target, open_target
):
    source.backup(file)
    script = [sys.executable, "-c", RESTORE, target, file]
    pipe = subprocess.PIPE
    with subprocess.Popen(script, cwd=ROOT, stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == b"filling\n"
        process.kill()
    empty = open_target()

    def restored():
        with suppress(Unavailable):  # until the server knows that the process is gone
            return empty.restore(file)

    assert wait_for(restored)["project"] == 19


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "unable to open database file"),
        (b"This is no database. " * 100, "file is not a database"),
    ],
)
@on_sqlite
def test_file_that_is_no_backup_is_refused(store, database, file, content, reason):
    if content:
        Path(file).write_bytes(content)
    told = flask(database, "restore", file, status=1)
    assert told == f"Error: {reason}: {file}\n"
    assert os.path.exists(file) == bool(content)


@on_sqlite
def test_file_of_another_program_is_refused(store, database, file):
    with closing(sqlite3.connect(file)) as other:
        other.execute("CREATE TABLE t (x)")
    before = Path(file).read_bytes()
    told = flask(database, "restore", file, status=1)
    assert told == "Error: the database was made by another program\n"
    assert Path(file).read_bytes() == before


def test_backup_of_an_older_release_is_brought_up_to_date(source, file, open_target):
    source.backup(file)
    with closing(sqlite3.connect(file)) as copy, copy:
        copy.executescript("""
            DROP TABLE idempotency_key;
            ALTER TABLE account DROP COLUMN created;
            PRAGMA user_version = 1;
        """)
    before = Path(file).read_bytes()
    restored = open_target()
    restored.restore(file)
    assert restored.list_tokens() == source.list_tokens()
    assert Path(file).read_bytes() == before


@on_sqlite  # PostgreSQL never held it
def test_u0000_of_an_older_release_becomes_u_fffd_on_postgresql(store, file, target):
    id = store.create_project("ann", {}).id
    store.backup(file)
    with closing(sqlite3.connect(file)) as copy, copy:
        copy.execute("UPDATE project SET name = ?", ["a\0b\0"])
    environment = os.environ | {"FLASK_DATABASE": target}
    told = run(BIN / "flask", "restore", file, environment=environment).stderr
    if target.startswith("postgresql://"):
        assert f"Project {id}: U+0000 is now U+FFFD\n" in told
    else:
        assert "U+" not in told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_creates_belongs_to_the_owner_of_the_folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    database = str(folder / "gardening.db")
    flask(database, "token", "create", "ann")
    flask(database, "backup", str(folder / "backup.db"))
    files = list(folder.iterdir())
    assert len(files) >= 3
    assert {(f.stat().st_uid, f.stat().st_gid) for f in files} == {(65534, 65534)}
    os.chown(database, 0, 0)
    flask(database, "token", "create", "ann")
    assert os.stat(database).st_uid == 0  # what is there is left as it is


def test_tables_are_copied_whole(raw, open_store):
    """A table that is missing from COPIED would be lost in silence."""
    open_store()
    if isinstance(raw, sqlite3.Connection):
        select = "SELECT name FROM sqlite_schema WHERE type = 'table'"
    else:
        select = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
    tables = {name for (name,) in raw.execute(select)} - {"sqlite_sequence"}
    assert tables == set(module.COPIED)
