"""`flask backup` and `flask restore`: whole or not at all."""

import fcntl
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest

from app import create_app
from auth import digest
from engines.backup import COLUMNS, BadBackup, backup, restore, strip
from engines.migrations import APPLICATION_ID, SCHEMA_VERSION
from engines.new_files import new_file
from helpers.later_release import copy_later_release
from helpers.running import BIN, LIMIT, POINT, ROOT, closing_store, environment_of, run, wait_for
from helpers.stores import fetch, is_sqlite, put_journal_beside
from helpers.testservice import copy_service
from store import KeyReused, KeySpent, Page

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


@pytest.fixture
def source(store):
    """Projects of two accounts, with gaps, changes and keys, and tokens, some revoked."""
    for text in TEXTS:
        store.create_project("ann", {"name": text, "postal_code": text})
        store.create_project("bob é", {"name": text, "location": LINE})
    for project in json.loads(store.list_projects("ann").document)[1:3]:
        store.update_project("ann", project["id"], {"location": POINT})
    first, *_, last = json.loads(store.list_projects("bob é").document)
    store.delete_project("bob é", first["id"])
    store.delete_project("bob é", last["id"])
    store.create_project("ann", {"name": "kept"}, "key")
    store.delete_project("ann", store.create_project("ann", {}, "spent").id)
    for name in ("one", "two", "three", "four"):
        note = "\u0378"  # which no Python's Unicode knows
        store.add_token("ann", digest(name), 30 if name == "two" else None, note)
    for id in (2, 4):
        store.revoke_token(id)
    return store


@pytest.fixture
def target(tmp_path):
    """The path of a database to restore to, which is not there yet."""
    return str(tmp_path / "target.db")


@pytest.fixture
def file(tmp_path):
    return str(tmp_path / "backup.db")


@pytest.fixture
def target_store(target):
    """A store on the target, which has opened and created nothing yet."""
    with closing_store(target) as target_store:
        yield target_store


def run_command(database, *arguments, status=0):
    """What the command prints, errors included."""
    app = create_app({"DATABASE": database})
    with closing(app.extensions["store"].engine):
        ended = app.test_cli_runner().invoke(args=arguments)
    assert ended.exit_code == status, ended.output
    return ended.output


def everything(store):
    """What the service can return: documents with their ETags, tokens and accounts."""
    lists = [
        store.list_projects(account, page) for account in ["ann", "bob é", "eve"] for page in PAGES
    ]
    return lists, store.list_tokens(), store.list_accounts()


def test_restored_database_is_the_same_and_goes_on(source, database, file, target, target_store):
    assert run_command(database, "backup", file) == ""
    output = "Restored: accounts 2, Projects 19, tokens 2.\n"
    new = f"A new database: {target_store.engine.name}\n"
    assert run_command(target, "restore", file) == output + new
    assert everything(target_store) == everything(source)

    assert target_store.find_caller(digest("one")) == ("ann", 1)
    assert target_store.find_caller(digest("four")) is None
    assert target_store.add_token("ann", digest("five")) == 4
    again = target_store.create_project("ann", {"name": "kept"}, "key")
    assert again == source.create_project("ann", {"name": "kept"}, "key")
    with pytest.raises(KeyReused):
        target_store.create_project("ann", {}, "key")
    with pytest.raises(KeySpent):
        target_store.create_project("ann", {}, "spent")
    for account in "ann", "bob é":
        created = target_store.create_project(account, {})
        found = json.loads(target_store.list_projects(account).document)
        assert found[-1] == json.loads(created.document)
    target_store.delete_project("ann", again.id)
    counts = [account.projects for account in source.list_accounts()]
    assert [account.projects for account in target_store.list_accounts()] == [
        counts[0],
        counts[1] + 1,
    ]


def test_backup_is_private_and_replaces_nothing(store, database, file):
    run_command(database, "backup", file)
    assert os.stat(file).st_mode & 0o777 == 0o600
    before = Path(file).read_bytes()
    link, missing = f"{file}-link", "/no/such/folder/x.db"
    os.symlink("nowhere", link)
    for path in (file, link, missing):
        reason = "No such file or directory" if path == missing else "File exists"
        output = run_command(database, "backup", path, status=1)
        assert output == f"Error: {reason}: {path}\n"
    assert (Path(file).read_bytes(), os.readlink(link)) == (before, "nowhere")


def shown_on_a_terminal(database, *arguments, status=0):
    """What a command prints to standard error where that is a terminal."""
    terminal, other_end = os.openpty()
    with open(terminal, errors="replace") as screen:
        with open(other_end, "wb") as stderr:
            ended = subprocess.run(
                [BIN / "flask", *arguments],
                cwd=ROOT,
                env=environment_of(database),
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                timeout=LIMIT,
                check=False,
            )
        shown = []
        with suppress(OSError):  # the end of what was written
            shown.extend(iter(lambda: screen.read(1), ""))
    assert ended.returncode == status, shown
    return "".join(shown)


def test_terminal_shows_how_far_a_restore_is(filled, target, tmp_path):
    """Elsewhere nothing is shown, as the other tests see."""
    bad = shutil.copy(filled, tmp_path / "bad.db")
    spoil(bad, "LOOSE project; UPDATE project SET seq = NULL WHERE account = 'bob'")
    *_, message = shown_on_a_terminal(target, "restore", bad, status=1).splitlines()
    assert message.startswith("Error: ") and message.endswith(f": {bad}")
    assert "61/61" in shown_on_a_terminal(target, "restore", filled)


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
            backup(store.engine, f"{file}{number}")
    finally:
        ended.set()
        writer.join(LIMIT)
    select = """SELECT last_seq, (SELECT max(seq) FROM project),
        (SELECT count(*) FROM project), (SELECT count(key) FROM project)
        FROM account"""
    for number in range(5):
        with closing(sqlite3.connect(f"{file}{number}")) as copy:
            for row in copy.execute(select):
                assert len(set(row)) == 1


# What may be wrong with a backup, and what SQLite's refusal says, or that of PostgreSQL.
FAULTS = {
    "another program's": ("PRAGMA application_id = 1", "the backup was made by another program"),
    "version 0": ("PRAGMA user_version = 0", "the backup was made by another program"),
    "newer": ("PRAGMA user_version = 99", "the backup was made by a newer release"),
    "missing table": ("DROP TABLE token", "no such table: token"),
    "view": (
        "ALTER TABLE token RENAME TO tokens; CREATE VIEW token AS SELECT * FROM tokens",
        "no such table: token",
    ),
    "fewer columns": ("ALTER TABLE token DROP COLUMN expires_at", "no such column: expires_at"),
    "type": (
        "LOOSE token; UPDATE token SET created_at = 'soon'",
        "cannot store TEXT value in INTEGER column token.created_at|invalid input syntax",
    ),
    "null": (
        "LOOSE token; UPDATE token SET account = NULL",
        "NOT NULL constraint failed: token.account|null value in column",
    ),
    "equal tokens": (
        "LOOSE token; UPDATE token SET digest = x'01'",
        "UNIQUE constraint failed: token.digest|duplicate key value",
    ),
    "equal keys": (
        "LOOSE project; UPDATE project SET account = 'bob', key = 'key' WHERE seq < 3",
        "UNIQUE constraint failed: project.account, project.(key|seq)|duplicate key value",
    ),
    "location": (
        "LOOSE project; UPDATE project SET location = replace(location, ':', ';')",
        "CHECK constraint failed: location|invalid input syntax for type json",
    ),
    "orphan": (
        "LOOSE part; UPDATE part SET project = 'no such'",
        "FOREIGN KEY constraint failed|insert or update on table .part. violates foreign",
    ),
    "bytes": (
        "UPDATE project SET name = CAST(x'61ff' AS TEXT)",
        "Could not decode to UTF-8 column 'name'",
    ),
    "schema that is no text": (
        """PRAGMA writable_schema = ON;
        UPDATE sqlite_schema SET sql = CAST(sql || x'20ff' AS TEXT) WHERE name = 'token'""",
        "the backup is damaged",
    ),
    # What SQLite would compute as it is read.
    "view of another type": (
        """DROP TABLE part; CREATE VIEW part AS
            SELECT id, id AS project, note AS kind, account FROM token;
        PRAGMA writable_schema = ON; UPDATE sqlite_schema SET type = 'VIEW' WHERE name = 'part'""",
        "no such table: part",
    ),
    "virtual table": (
        """DROP TABLE part; PRAGMA writable_schema = ON; INSERT INTO sqlite_schema
        VALUES ('table', 'part', 'part', 0, 'CREATE VIRTUAL TABLE part USING fts5(id)')""",
        "no such table: part",
    ),
    "generated column": (
        "ALTER TABLE token ADD COLUMN large BLOB AS (zeroblob(1000000000))",
        "SQLite would compute the column token.large",
    ),
    "long statistics": (  # which SQLite reads with the schema
        """ANALYZE; WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 9999)
            INSERT INTO sqlite_stat1 SELECT i, i, i FROM n""",
        "interrupted",
    ),
    "long schema": (f"CREATE TABLE theirs (x DEFAULT '{'x' * 200_000}')", "string or blob too big"),
    "long default": (  # which SQLite puts into each row that lacks the column
        f"ALTER TABLE token ADD COLUMN large TEXT DEFAULT '{'x' * 50}'",
        "SQLite would compute the column token.large",
    ),
    "index of the schema": (  # in which nothing would be found to be removed
        """CREATE INDEX i ON token (note) WHERE note = 'none'; PRAGMA writable_schema = ON;
        UPDATE sqlite_schema SET tbl_name = 'sqlite_master', sql = 'CREATE INDEX i
            ON sqlite_master (sql) WHERE sql NOT LIKE ''CREATE TABLE %''' WHERE name = 'i'""",
        "the backup has an index of its schema",
    ),
    "table under another name": (
        """CREATE TABLE theirs (x AS (1), y); PRAGMA writable_schema = ON;
        UPDATE sqlite_schema SET name = 'token', tbl_name = 'token' WHERE name = 'theirs'""",
        r"malformed database schema \(token\)",
    ),
    # What `token create` refuses, since commands print it.
    "line break in a name": (
        "UPDATE project SET account = 'bob' || char(10) || 'eve' WHERE account = 'bob'",
        r"`token create` would refuse or change 'bob\\neve'",
    ),
    "space after a name": (
        "UPDATE token SET account = 'ann '",
        "`token create` would refuse or change 'ann '",
    ),
    "space after a name that a collation overlooks": (
        """DROP TABLE account; CREATE TABLE account (name TEXT COLLATE RTRIM, last_seq INTEGER);
        INSERT INTO account VALUES ('ann', 9), ('bob', 99); UPDATE token SET account = 'ann '""",
        "`token create` would refuse or change 'ann '",
    ),
    "name that is not in NFC": (
        "UPDATE project SET account = 'e\u0301' WHERE account = 'bob'",
        "`token create` would refuse or change 'e\u0301'",
    ),
    "name without Projects and tokens": (
        "INSERT INTO account (name) VALUES ('\x1b[2J')",
        r"`token create` would refuse or change '\\x1b\[2J'",
    ),
    "line break in a note": (
        "UPDATE token SET note = 'x' || char(10) WHERE id = 2",
        r"`token create` would refuse or change 'x\\n'",
    ),
}


def spoil(file, script):
    """Change a backup; `LOOSE table` first puts one without any rule in its place."""
    with closing(sqlite3.connect(file)) as copy:
        for table in re.findall(r"LOOSE (\w+);", script):
            copy.execute(f"CREATE TABLE loose AS SELECT * FROM {table}")
            copy.execute(f"DROP TABLE {table}")
            copy.execute(f"ALTER TABLE loose RENAME TO {table}")
        copy.executescript(re.sub(r"LOOSE \w+;", "", script))


@pytest.mark.parametrize(("script", "reason"), FAULTS.values(), ids=FAULTS)
def test_bad_backup_is_refused_in_one_line(filled, target, target_store, tmp_path, script, reason):
    file = shutil.copy(filled, tmp_path)
    spoil(file, script)
    before = Path(file).read_bytes()
    output = run_command(target, "restore", file, status=1)
    assert re.fullmatch(f"Error: ({reason})[^\n]*: {file}\n", output)
    assert not os.path.exists(target)  # or the service would start on an empty database
    target_store.engine.open_database(creates=True)
    assert everything(target_store)[1:] == ([], [])
    assert Path(file).read_bytes() == before


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A backup with something in each table."""
    folder = tmp_path_factory.mktemp("filled")
    with closing_store(str(folder / "gardening.db")) as store:
        store.engine.open_database(creates=True)
        id = store.create_project("ann", {"name": "Park", "location": POINT}, "key").id
        for _ in range(60):
            store.create_project("bob", {"name": "x" * 500, "location": POINT})
        for name in ("one", "two"):
            store.add_token("ann", digest(name))
        with closing(sqlite3.connect(folder / "gardening.db")) as plain_sql, plain_sql:
            plain_sql.execute("INSERT INTO part VALUES ('z', ?, 'zone', 'ann')", [id])
        backup(store.engine, str(folder / "backup.db"))
    return str(folder / "backup.db")


def test_damaged_backup_is_refused_or_can_be_read(filled, tmp_path):
    """What has changed within a name cannot be noticed, and does no harm."""
    good = Path(filled).read_bytes()
    choose = random.Random(1).randrange
    refused = 0
    for number in range(40):
        file = tmp_path / f"{number}.db"
        start, length = choose(len(good)), choose(1, 200)
        damage = bytes(choose(256) for _ in range(length))
        file.write_bytes((good[:start] + damage + good[start + length :])[: len(good)])
        with closing_store(str(tmp_path / f"{number}-restored.db")) as store:
            try:
                restore(store.engine, str(file))
            except BadBackup:
                refused += 1
                continue
            for account in store.list_accounts():
                projects = json.loads(store.list_projects(account.name).document)
                assert len(projects) == account.projects
    assert 10 < refused < 40


REASONS = {
    "pipe": "not a regular file",
    "folder": "not a regular file",
    "empty": "the file is empty",
    "no tables": "the file is empty",
    "missing": "No such file or directory",
}


def test_file_that_is_no_backup_is_refused_in_one_line(database, tmp_path):
    """The pipe in a process of its own, which has a limit: it would be read for ever."""
    folder = tmp_path / "folder"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "empty").touch()
    (folder / "text").write_text("This is no database. " * 100)
    with closing(sqlite3.connect(folder / "utf-16.db")) as other:
        other.execute("PRAGMA encoding = 'UTF-16'")
        other.execute("CREATE TABLE t (x)")
    with closing(sqlite3.connect(folder / "no tables")) as marked:
        marked.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        marked.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    before = set(folder.iterdir())
    for file in (*before, folder / "missing", folder):
        if file.name == "pipe":
            command = [BIN / "flask", "restore", file]
            refused = run(*command, environment=environment_of(database), status=1).stderr
        else:
            refused = run_command(database, "restore", str(file), status=1)
        reason = REASONS.get(file.name, "[^\n]+")
        assert re.fullmatch(f"Error: {reason}: {file}\n", refused)
    assert set(folder.iterdir()) == before
    assert not os.path.exists(database)


def test_restore_only_reads_the_file(target, tmp_path):
    """Even a plain copy, whose -wal holds what is new."""
    file, copy = str(tmp_path / "source.db"), tmp_path / "copy"
    copy.mkdir()
    with closing_store(file) as store:
        store.engine.open_database(creates=True)
        store.create_project("ann", {"name": "Park"})
        for suffix in ("", "-wal"):
            shutil.copy(file + suffix, copy / f"gardening.db{suffix}")
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    run_command(target, "restore", str(copy / "gardening.db"))
    after = {file.name: file.read_bytes() for file in copy.iterdir()}
    assert {name: after[name] for name in before} == before


ACTIONS = [(signal.SIG_DFL, "Aborted!"), (signal.SIG_IGN, "Error: still locked: ")]


@pytest.mark.parametrize("before, message", ACTIONS)
def test_signal_ends_a_restore_like_ctrl_c_unless_it_is_ignored(filled, tmp_path, before, message):
    target = str(tmp_path / "empty.db")
    run_command(target, "init-db")
    ignored = signal.signal(signal.SIGHUP, before)  # which the process inherits
    with open(f"{target}-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        process = subprocess.Popen(
            [BIN / "flask", "restore", filled],
            cwd=ROOT,
            env=environment_of(target),
            stderr=subprocess.PIPE,
            text=True,
        )
        signal.signal(signal.SIGHUP, ignored)
        with process:
            wait_for(lambda: list(tmp_path.glob("gardening-*.partial/copy-lock")))
            process.send_signal(signal.SIGHUP)
            errors = process.communicate(timeout=LIMIT)[1]
    assert process.returncode == 1 and errors.strip().startswith(message)
    assert list(tmp_path.glob("gardening-*.partial*")) == []


def test_signal_ends_a_backup_like_ctrl_c(store, database, file):
    for _ in range(500):
        store.create_project("ann", {"name": "x" * 1000})
    process = subprocess.Popen(
        [BIN / "flask", "backup", file], cwd=ROOT, env=environment_of(database)
    )
    folder = Path(file).parent
    with process:
        wait_for(lambda: process.poll() is not None or list(folder.glob("gardening-*.partial")))
        process.terminate()
    assert list(folder.glob("gardening-*.partial*")) == []


def test_file_that_appears_during_a_backup_is_not_replaced(file):
    with pytest.raises(FileExistsError), new_file(file) as unnamed:
        Path(unnamed).write_text("a backup")
        Path(file).write_text("theirs")
    assert Path(file).read_text() == "theirs"


def test_file_with_a_journal_is_refused(filled, target, tmp_path):
    file, victim = shutil.copy(filled, tmp_path), tmp_path / "another.db"
    put_journal_beside(file, victim)
    link = tmp_path / "link.db"
    link.symlink_to(file)
    for path in (file, link):
        printed = run_command(target, "restore", str(path), status=1)
        assert printed == f"Error: there is a -journal beside it: move that away: {path}\n"
        assert victim.exists()


def test_backup_knows_every_column(plain_sql, open_store):
    """One that is missing from COLUMNS would be lost in silence, unless a restore counts it."""
    open_store()
    if is_sqlite(plain_sql):
        select = """SELECT t.name, c.name
            FROM sqlite_schema AS t, pragma_table_info(t.name) AS c
            WHERE t.type = 'table' AND t.name <> 'sqlite_sequence'"""
    else:
        select = """SELECT table_name, column_name FROM information_schema.columns
            WHERE table_schema = 'public'"""
    known = {(table, name) for table, names in COLUMNS.items() for name in names}
    known.add(("account", "project_count"))
    assert set(plain_sql.execute(select)) == known


def test_restore_creates_the_folder_of_the_default_database(filled, tmp_path):
    copy_service(tmp_path)
    environment = {k: v for k, v in os.environ.items() if k != "GARDENING_DATABASE"}
    command = [BIN / "flask", "restore", filled]
    ended = run(*command, folder=tmp_path, environment=environment)
    assert ended.stdout == "Restored: accounts 2, Projects 61, tokens 2.\n"
    assert ended.stderr == f"A new database: {tmp_path}/instance/gardening.db\n"


@pytest.mark.parametrize("name", ["a#1.db", "odd ?%20&.db", "file:x?mode=rw", "grün"])
def test_backup_may_have_any_name(source, database, target, tmp_path, monkeypatch, name):
    """Also one that is relative to the present folder."""
    monkeypatch.chdir(tmp_path)
    assert run_command(database, "backup", name) == ""
    output = "Restored: accounts 2, Projects 19, tokens 2.\n"
    assert run_command(target, "restore", name).startswith(output)


def test_backup_can_be_served_directly(store, file):
    store.create_project("ann", {})
    backup(store.engine, file)
    with closing_store(file) as copy:
        before = copy.list_projects("ann").etag
        assert fetch(copy, "PRAGMA journal_mode") == [("wal",)]
        id = copy.create_project("ann", {}).id
        assert copy.list_projects("ann").etag != before
        copy.delete_project("ann", id)
        assert [account.projects for account in copy.list_accounts()] == [1]


# What only an operator's own SQL can do.
COUNTED_WRONG = """
DELETE FROM account WHERE name = 'ann';
DELETE FROM project WHERE account = 'bob' AND seq = 60;
UPDATE account SET project_count = 7
"""


def test_restore_counts_projects_anew_and_gives_no_seq_again(filled, target_store, tmp_path):
    file = shutil.copy(filled, tmp_path)
    spoil(file, COUNTED_WRONG)
    restore(target_store.engine, file)
    accounts = [(a.name, a.projects) for a in target_store.list_accounts()]
    assert accounts == [("ann", 1), ("bob", 59)]
    for account, count, next_seq in [("ann", 1, 2), ("bob", 59, 61)]:
        for _ in range(2):
            target_store.create_project(account, {})
        page = target_store.list_projects(account, Page(0, count + 1))
        assert page.next_after == next_seq


# What operators and their tools add, and what somebody may have made up. A CHECK overflows if it is
# run.
ADDED = """
CREATE TABLE _litestream_seq (id INTEGER PRIMARY KEY, seq INTEGER);
INSERT INTO _litestream_seq VALUES (1, 1);
CREATE INDEX names ON project (account, lower(name)) WHERE name IS NOT NULL;
CREATE VIEW largest AS SELECT account, count(*) FROM project GROUP BY account;
ANALYZE;
CREATE VIEW pragma_user_version AS SELECT 99 AS user_version;
CREATE TABLE pragma_table_xinfo (hidden);
CREATE TABLE theirs (x CHECK (abs(x)));
PRAGMA ignore_check_constraints = ON;
INSERT INTO theirs VALUES (-9223372036854775808);
CREATE INDEX unknown ON token (length(account));
PRAGMA writable_schema = ON;
UPDATE sqlite_schema SET sql = replace(sql, 'length', 'no_such') WHERE name = 'unknown';
UPDATE sqlite_schema SET sql = replace(sql, 'UNIQUE', 'UNIQUE CHECK (abs(-9223372036854775808))')
    WHERE name = 'token';
"""


def test_what_was_added_to_a_backup_is_neither_restored_nor_run(filled, target, tmp_path):
    file = shutil.copy(filled, tmp_path)
    spoil(file, ADDED)
    strip(shutil.copy(file, tmp_path / "copy.db"))
    with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        named = copy.execute("SELECT name FROM sqlite_schema WHERE sql IS NOT NULL").fetchall()
    assert {name for (name,) in named} == {*COLUMNS, "sqlite_sequence"}
    output = "Restored: accounts 2, Projects 61, tokens 2.\n"
    assert run_command(target, "restore", file).startswith(output)


HOSTILE = """
CREATE TABLE theirs (x);
CREATE TRIGGER "no ""name" AFTER UPDATE ON account BEGIN DELETE FROM token; END;
CREATE VIEW "a ""view" AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n)
    SELECT i FROM n;
CREATE TRIGGER endless AFTER UPDATE ON account
    BEGIN INSERT INTO theirs SELECT i FROM "a ""view"; END;
CREATE TRIGGER instead INSTEAD OF INSERT ON "a ""view" BEGIN SELECT 1; END;
"""


def test_older_backup_is_migrated_and_its_triggers_never_run(filled, target, tmp_path):
    folder = copy_later_release(tmp_path / "later")
    file = shutil.copy(filled, tmp_path)
    spoil(file, HOSTILE)
    before = Path(file).read_bytes()
    # As a command, which has a limit, since one of the triggers never ends.
    command = [BIN / "flask", "restore", file]
    restored = run(*command, folder=folder, environment=environment_of(target))
    assert restored.stdout == "Restored: accounts 2, Projects 61, tokens 2.\n"
    assert Path(file).read_bytes() == before
