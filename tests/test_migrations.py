"""Schema versions: an older database is migrated, others are refused and left alone."""

import re
import shutil
import sqlite3
import subprocess
from contextlib import closing
from functools import partial

import pytest

from engines.backup import COLUMNS, backup
from engines.errors import Unavailable
from engines.migrations import SCHEMA_VERSION
from helpers.later_release import SLOW_ON_POSTGRESQL, copy_later_release
from helpers.running import BIN, ROOT, at_once, environment_of, run, store_on, wait_for
from helpers.stores import is_sqlite, plain_sql_on
from helpers.testservice import copy_service


@pytest.fixture
def later(database, tmp_path):
    """Runs a command of the later release, with these arguments."""
    folder = copy_later_release(tmp_path / "later")

    def later(*arguments, database=database, status=0):
        command, environment = [BIN / "flask", *arguments], environment_of(database)
        return run(*command, folder=folder, environment=environment, status=status)

    return later


@pytest.fixture
def older(store, plain_sql):
    """The database of this release, with something in each table."""
    id = store.create_project("ann", {"name": "Park"}, "key").id
    store.delete_project("ann", store.create_project("ann", {}, "spent").id)
    store.create_project("bob é", {"name": "Grüße 😀"})
    store.add_token("ann", b"1", days=1)
    plain_sql.execute(f"INSERT INTO part VALUES ('p', '{id}', 'zone', 'ann')")
    store.engine.close()
    return plain_sql


def contents(plain_sql):
    """All rows, in the columns that this release knows."""
    selects = [f"SELECT {', '.join(COLUMNS[table])} FROM {table} ORDER BY 1" for table in COLUMNS]
    return [plain_sql.execute(select).fetchall() for select in selects]


SQLITE_STRUCTURE = """
SELECT 'table', name, strict, wr, NULL, NULL, NULL FROM pragma_table_list
    WHERE schema = 'main' AND type <> 'shadow'
UNION ALL SELECT 'column', t.name, c.name, c.type, c."notnull", c.dflt_value, c.pk
    FROM sqlite_schema AS t, pragma_table_info(t.name) AS c WHERE t.type = 'table'
UNION ALL SELECT 'reference', t.name, f."from", f."table", f."to", f.on_delete, NULL
    FROM sqlite_schema AS t, pragma_foreign_key_list(t.name) AS f
UNION ALL SELECT 'index', t.name, i.name, i."unique", i.origin, c.seqno, c.name || ' ' || c.coll
    FROM sqlite_schema AS t, pragma_index_list(t.name) AS i, pragma_index_xinfo(i.name) AS c
UNION ALL SELECT type, name, tbl_name, sql, NULL, NULL, NULL
    FROM sqlite_schema WHERE type IN ('index', 'trigger')
UNION ALL SELECT 'marks', application_id, user_version, NULL, NULL, NULL, NULL
    FROM pragma_application_id, pragma_user_version"""


def structure(plain_sql):
    """What the database has: tables, columns, constraints, indexes, triggers, marks."""
    if is_sqlite(plain_sql):
        rows = plain_sql.execute(SQLITE_STRUCTURE).fetchall()
        for table, sql in plain_sql.execute("SELECT name, sql FROM sqlite_schema"):
            checks = re.findall(r"CHECK \((?:[^()]|\([^()]*\))*\)", sql or "")
            rows += [(table, check) for check in checks]
        return {tuple(" ".join(str(each).split()) for each in row) for row in rows}
    select = """SELECT table_name, column_name, data_type, is_nullable, column_default,
            collation_name
        FROM information_schema.columns WHERE table_schema = 'public'
        UNION ALL SELECT tablename, indexname, indexdef, NULL, NULL, NULL
        FROM pg_indexes WHERE schemaname = 'public'
        UNION ALL SELECT obj_description('project'::regclass), conname,
            pg_get_constraintdef(oid), NULL, NULL, NULL
        FROM pg_constraint WHERE connamespace = 'public'::regnamespace
            AND contype <> 'n'  -- NOT NULL, which PostgreSQL names since 18
        UNION ALL SELECT proname, NULL, NULL, NULL, NULL, NULL
        FROM pg_proc WHERE pronamespace = 'public'::regnamespace
        UNION ALL SELECT tgname, NULL, NULL, NULL, NULL, NULL
        FROM pg_trigger WHERE NOT tgisinternal"""
    return set(plain_sql.execute(select).fetchall())


def test_older_database_is_migrated_by_the_first_use_and_keeps_what_it_has(older, later):
    before = contents(older)
    assert "ann" in later("account", "list").stdout
    assert contents(older) == before
    if is_sqlite(older):
        older.execute("PRAGMA foreign_keys = ON")
    older.execute("INSERT INTO plot (id, account, project) SELECT 'z', account, id FROM project")
    older.execute("DELETE FROM project")
    assert older.execute("SELECT * FROM plot").fetchall() == []


def test_migrated_database_is_like_a_new_one(older, later, another_database):
    later("init-db")
    later("init-db", database=another_database)
    with closing(plain_sql_on(another_database)) as new:
        assert structure(older) == structure(new)
        assert "plot_project" in str(structure(new))  # the index


# The folders with the SQL files of each schema version. Until there is a release, only this one's.
SQL = {SCHEMA_VERSION: ROOT / "engines"}
SQL |= {int(each.name): each for each in ROOT.glob("tests/helpers/released/[0-9]*")}


@pytest.mark.parametrize("version", SQL)
def test_database_of_a_release_gets_the_tables_of_today(
    database, another_database, plain_sql, tmp_path, version
):
    """Also that of a release with this schema version, whose tables must not change."""
    copy_service(tmp_path)
    for file in SQL[version].glob("*.sql"):
        shutil.copy(file, tmp_path / "engines")
    with open(tmp_path / "engines/migrations.py", "a") as file:
        file.write(f"SCHEMA_VERSION = {version}\n")
    run(BIN / "flask", "init-db", folder=tmp_path, environment=environment_of(database))
    for each in (database, another_database):
        run(BIN / "flask", "init-db", environment=environment_of(each))
    with closing(plain_sql_on(another_database)) as new:
        assert structure(plain_sql) == structure(new)


def test_tables_of_a_release_are_kept():
    """CONTRIBUTING.md says how, for the test above."""
    newest = re.search(r"(?m)^## .* - (.*)$", (ROOT / "CHANGELOG.md").read_text())
    assert newest[1] == "unreleased" or SQL[SCHEMA_VERSION] != ROOT / "engines"


def test_older_database_is_migrated_once_by_many(older, later):
    before = contents(older)
    at_once(lambda _: later("init-db"), 4)
    assert contents(older) == before


def test_migration_that_fails_changes_nothing(older, later):
    older.execute("CREATE TABLE plot_ (id text)")
    older.execute("CREATE INDEX plot_project ON plot_ (id)")
    before = structure(older), contents(older)
    for _ in range(2):
        assert "plot_project" in later("init-db", status=1).stderr
    assert (structure(older), contents(older)) == before


def test_migration_that_is_killed_changes_nothing_and_is_made_again(
    older, database, tmp_path, later
):
    backend = f"FROM pg_stat_activity WHERE query = '{SLOW_ON_POSTGRESQL}'"

    def is_under_way():
        if not is_sqlite(older):
            return older.execute(f"SELECT pid {backend}").fetchall()
        try:
            older.executescript("PRAGMA busy_timeout = 0; BEGIN IMMEDIATE; ROLLBACK")
        except sqlite3.OperationalError:
            return True

    before = structure(older), contents(older)
    slow = copy_later_release(tmp_path / "slow", is_slow=True)
    process = subprocess.Popen(
        [BIN / "flask", "init-db"],
        cwd=slow,
        env=environment_of(database),
        stderr=subprocess.DEVNULL,
    )
    with process:
        wait_for(is_under_way)
        process.kill()
    if not is_sqlite(older):  # the server goes on with the statement
        older.execute(f"SELECT pg_terminate_backend(pid, 60000) {backend}")
    assert (structure(older), contents(older)) == before
    later("init-db")
    assert "plot_project" in str(structure(older))


FOREIGN = "made by another program, or copied by one that dropped its mark"
REFUSED = [  # and the marks on SQLite and PostgreSQL
    (
        "made by a newer release",
        "user_version = {}",
        "gardening-project-service, schema version {}",
    ),
    (FOREIGN, "user_version = 0", "gardening-project-service, schema version 0"),
    (FOREIGN, "application_id = 1", "schema version {}"),
]


@pytest.mark.parametrize(("reason", "pragma", "comment"), REFUSED)
def test_database_that_this_release_cannot_use_is_refused_and_left_alone(
    open_store, database, plain_sql, tmp_path, reason, pragma, comment
):
    open_store().create_project("ann", {})
    newer = SCHEMA_VERSION + 1
    if is_sqlite(plain_sql):
        plain_sql.execute(f"PRAGMA {pragma.format(newer)}")
    else:
        plain_sql.execute(f"COMMENT ON TABLE project IS '{comment.format(newer)}'")
    before = structure(plain_sql), contents(plain_sql)
    store = store_on(database)
    change = partial(store.create_project, "ann", {})
    copy = partial(backup, store.engine, str(tmp_path / "backup.db"))
    for use in (copy, change, change):  # the last one as if a refusal had prepared the database
        with pytest.raises(Unavailable, match=f"the database was {reason}") as refusal:
            use()
        assert "\n" not in str(refusal.value)
    assert (structure(plain_sql), contents(plain_sql)) == before


def test_database_with_foreign_tables_is_left_alone(open_store, plain_sql):
    plain_sql.execute("CREATE TABLE theirs (id int)")
    if is_sqlite(plain_sql):
        plain_sql.execute("PRAGMA user_version = 1")  # that of many a program
        count = "SELECT count(*) FROM sqlite_schema"
    else:
        count = "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
    with pytest.raises(Unavailable, match="made by another program"):
        open_store()
    assert plain_sql.execute(count).fetchall() == [(1,)]
