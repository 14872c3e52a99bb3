"""Schema versions: an older database is brought up to date, others are refused and left alone."""

import json
import time
from contextlib import closing

import pytest

from engines.base import Unavailable
from engines.migrations import OLDEST, SCHEMA_VERSION
from helpers.old_schemas import create_old_schema, mark_as
from helpers.running import LIMIT, POINT, at_once, store_on
from helpers.stores import is_sqlite, plain_sql_on
from store import KeyReused


@pytest.fixture(params=range(OLDEST, SCHEMA_VERSION), ids="version-{}".format)
def older(request, plain_sql):
    """The database as a release with an older schema version left it."""
    create_old_schema(plain_sql, request.param)
    return plain_sql


def projects(plain_sql):
    columns = "id, account, seq, name, created_at, updated_at, version, postal_code, location"
    rows = plain_sql.execute(f"SELECT {columns} FROM project ORDER BY account, seq")
    return rows.fetchall()


SQLITE_STRUCTURE = """
SELECT 'table', name, strict, wr, NULL, NULL, NULL FROM pragma_table_list
    WHERE schema = 'main' AND type <> 'shadow'
UNION ALL SELECT 'column', t.name, c.name, c.type, c."notnull", c.dflt_value, c.pk
    FROM sqlite_schema AS t, pragma_table_info(t.name) AS c WHERE t.type = 'table'
UNION ALL SELECT 'reference', t.name, f."from", f."table", f."to", f.on_delete, NULL
    FROM sqlite_schema AS t, pragma_foreign_key_list(t.name) AS f
UNION ALL SELECT 'index', t.name, i.name, i."unique", i.origin, c.seqno, c.name
    FROM sqlite_schema AS t, pragma_index_list(t.name) AS i, pragma_index_xinfo(i.name) AS c
UNION ALL SELECT 'trigger', name, tbl_name, sql, NULL, NULL, NULL
    FROM sqlite_schema WHERE type = 'trigger'
UNION ALL SELECT 'marks', application_id, user_version, NULL, NULL, NULL, NULL
    FROM pragma_application_id, pragma_user_version"""


def structure(plain_sql):
    """What the database has: tables, columns, references, indexes, triggers, marks."""
    if is_sqlite(plain_sql):
        return {
            tuple(" ".join(str(each).split()) for each in row)
            for row in plain_sql.execute(SQLITE_STRUCTURE)
        }
    select = """SELECT table_name, column_name, data_type, is_nullable, column_default,
            NULL
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


def test_older_database_is_brought_up_to_date(older, open_store):
    before = projects(older)
    accounts = older.execute("SELECT * FROM account").fetchall()
    revisions = {name: revision for name, revision, *_ in accounts}
    store = open_store(clock=lambda: 1.5)
    assert projects(older) == before
    counters = """SELECT name, list_revision, last_seq, project_count
        FROM account ORDER BY name"""
    assert older.execute(counters).fetchall() == [
        ("ann", revisions["ann"], 5, 2),
        ("bob é", revisions["bob é"], 1, 1),
    ]
    assert [tuple(token) for token in store.list_tokens()] == [
        (3, 1000, None, "ann"),
        (9, 1000, 2000, "eve"),
    ]
    assert [store.find_caller(digest) for digest in (b"\1", b"\2")] == [("ann", 3), ("eve", 9)]
    part = ("p", "a" * 24, "zone", "ann")
    assert older.execute("SELECT * FROM part").fetchall() == [part]
    with pytest.raises(KeyReused):
        store.create_project("ann", {}, key="kept")
    [(created_at,)] = older.execute("SELECT created_at FROM idempotency_key").fetchall()
    assert abs(created_at / 1000 - time.time()) < LIMIT  # the time of the upgrade
    document = json.loads(store.get_project("ann", "a" * 24).document)
    fields = {"name": "Park", "postal_code": "94117", "location": POINT, "version": 7}
    assert document == document | fields
    made = store.create_project("ann", {}, key="k")
    last = older.execute("SELECT id FROM project WHERE account = 'ann' AND seq = 6")
    assert last.fetchall() == [(made.id,)]
    store.delete_project("ann", "a" * 24)
    assert older.execute("SELECT * FROM part").fetchall() == []


def test_database_that_was_brought_up_to_date_is_like_a_new_one(
    older, open_store, another_database
):
    open_store()
    open_store(another_database)
    with closing(plain_sql_on(another_database)) as new:
        assert structure(older) == structure(new), "change the tables and the migration"
        assert "part_project" in str(structure(new))  # the index


def test_older_database_is_brought_up_to_date_once_by_many(older, open_store):
    opened = at_once(lambda _: open_store())
    assert len({store.create_project("ann", {}).id for store in opened}) == 8
    seq = "SELECT max(seq), count(*) FROM project WHERE account = 'ann'"
    assert older.execute(seq).fetchall() == [(13, 10)]


def test_upgrade_that_fails_changes_nothing(plain_sql, open_store):
    create_old_schema(plain_sql, 3)
    plain_sql.execute("ALTER TABLE account ADD COLUMN last_seq text")
    before = structure(plain_sql)
    for _ in range(2):
        with pytest.raises(Exception, match="last_seq"):
            open_store()
    assert structure(plain_sql) == before


def test_upgrade_refuses_a_part_whose_project_is_missing(plain_sql, open_store):
    create_old_schema(plain_sql, 3)
    if is_sqlite(plain_sql):
        plain_sql.execute("PRAGMA foreign_keys = OFF")
    else:
        plain_sql.execute("ALTER TABLE part DROP CONSTRAINT part_project_fkey")
    plain_sql.execute("INSERT INTO part (id, project, kind) VALUES ('q', 'x', 'zone')")
    with pytest.raises(Exception, match="part.*(account|fkey)|account.*part"):
        open_store()
    parts = plain_sql.execute("SELECT id FROM part ORDER BY id").fetchall()
    assert parts == [("p",), ("q",)]


NEWER = SCHEMA_VERSION + 1
REFUSED = {
    2: "made before release 2.0.0; start release 2.1.0 on it first",
    NEWER: "made by a newer release",
    "theirs": "made by another program",
}


@pytest.mark.parametrize(("version", "reason"), REFUSED.items(), ids=str)
def test_database_that_this_release_cannot_use_is_refused_and_left_alone(
    open_store, database, plain_sql, version, reason
):
    open_store().create_project("ann", {})
    if version != "theirs":
        mark_as(plain_sql, version)
    elif is_sqlite(plain_sql):
        plain_sql.execute("PRAGMA application_id = 1")
    else:
        plain_sql.execute("COMMENT ON TABLE project IS 'layout 4'")
    before = structure(plain_sql), projects(plain_sql)
    store = store_on(database)
    for _ in range(2):  # as if the first refusal had prepared it
        with pytest.raises(Unavailable, match=f"^the database was {reason}") as refusal:
            store.create_project("ann", {})
        assert "\n" not in str(refusal.value)
    assert (structure(plain_sql), projects(plain_sql)) == before


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
