"""Tables that change: databases of older releases are brought up to date, newer ones left."""

import json
from contextlib import closing

import pytest

from engines.base import Unavailable
from engines.tables import LAYOUT
from helpers.layouts import lay_out
from helpers.running import ON_POSTGRESQL, POINT, at_once, store_on
from helpers.stores import is_sqlite, plain_sql_on
from store import KeyReused

OLDER = range(1, LAYOUT)
ADVICE = (
    "Raise LAYOUT, and add the migration to MIGRATIONS and to tests/helpers/layouts.py."
)


@pytest.fixture(params=OLDER, ids="layout-{}".format)
def layout(request):
    return request.param


@pytest.fixture
def older(layout, plain_sql):
    """The database as a release with an older layout left it."""
    lay_out(plain_sql, layout)
    return plain_sql


def projects(plain_sql):
    columns = (
        "id, account, seq, name, created_at, updated_at, version, postal_code, location"
    )
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
    """What the database has: tables, columns, references, indexes, marks.

    And SQLite's triggers. Those of PostgreSQL are for processes of an older release.
    """
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
        FROM pg_constraint WHERE connamespace = 'public'::regnamespace"""
    return set(plain_sql.execute(select).fetchall())


def test_older_database_is_brought_up_to_date(older, open_store, layout):
    before = projects(older)
    revisions = older.execute("SELECT name, revision FROM account ORDER BY name")
    revisions = revisions.fetchall()
    store = open_store(clock=lambda: 1.5)
    assert projects(older) == before
    counters = "SELECT name, revision, created, projects FROM account ORDER BY name"
    ann, bob = revisions
    assert older.execute(counters).fetchall() == [(*ann, 5, 2), (*bob, 1, 1)]
    assert [tuple(token) for token in store.list_tokens()] == [
        (3, 1000, None, "ann"),
        (9, 1000, 2000, "eve"),
    ]
    assert [store.find_caller(digest) for digest in (b"\1", b"\2")] == [
        ("ann", 3),
        ("eve", 9),
    ]
    part = ("p", "a" * 24, "zone", "ann")
    assert older.execute("SELECT * FROM part").fetchall() == [part]
    if layout > 1:
        with pytest.raises(KeyReused):
            store.create_project("ann", {}, key="kept")
    document = json.loads(store.get_project("ann", "a" * 24).document)
    fields = {"name": "Park", "postal_code": "94117", "location": POINT, "version": 7}
    assert document == document | fields
    made = store.create_project("ann", {}, key="k")
    last = older.execute("SELECT id FROM project WHERE account = 'ann' AND seq = 6")
    assert last.fetchall() == [(made.id,)]
    store.delete_project("ann", "a" * 24)
    assert older.execute("SELECT * FROM part").fetchall() == []


def test_account_that_lost_its_last_project_is_brought_up_to_date(older, open_store):
    older.execute("DELETE FROM project WHERE account = 'bob é'")
    store = open_store()
    assert [account.name for account in store.list_accounts()] == [
        "ann",
        "bob é",
        "eve",
    ]
    created = store.create_project("bob é", {})
    assert store.list_projects("bob é").document == b"[" + created.document + b"]"


@pytest.mark.parametrize("layout", [*OLDER, LAYOUT])
def test_database_that_was_brought_up_to_date_is_like_a_new_one(
    plain_sql, layout, open_store, another_database
):
    lay_out(plain_sql, layout)
    open_store()
    open_store(another_database)
    with closing(plain_sql_on(another_database)) as new:
        assert structure(plain_sql) == structure(new), ADVICE
        assert "part_project" in str(structure(new))  # the index


def test_older_database_is_brought_up_to_date_once_by_many(older, open_store):
    opened = at_once(lambda _: open_store())
    assert len({store.create_project("ann", {}).id for store in opened}) == 8
    seq = "SELECT max(seq), count(*) FROM project WHERE account = 'ann'"
    assert older.execute(seq).fetchall() == [(13, 10)]


@pytest.mark.parametrize("layout", [1, 2], indirect=True)
def test_upgrade_that_fails_changes_nothing(older, open_store):
    older.execute("ALTER TABLE account ADD COLUMN projects text")
    before = structure(older)
    for _ in range(2):
        with pytest.raises(Exception, match="projects"):
            open_store()
    assert structure(older) == before


# What marks a database in SQLite and in PostgreSQL, and why it is refused.
MARKS = {
    "made by a newer release": (
        f"PRAGMA user_version = {LAYOUT + 1}",
        f"COMMENT ON TABLE project IS 'Gardening Project Service, layout {LAYOUT + 1}'",
    ),
    "made by another program": (
        "PRAGMA application_id = 1",
        "COMMENT ON TABLE project IS 'layout 1'",
    ),
}


@pytest.mark.parametrize(("reason", "marks"), MARKS.items(), ids=MARKS)
def test_database_of_another_program_or_a_newer_release_is_refused(
    open_store, database, plain_sql, reason, marks
):
    open_store().create_project("ann", {})
    plain_sql.execute(marks[not is_sqlite(plain_sql)])
    before = structure(plain_sql), projects(plain_sql)
    store = store_on(database)
    for _ in range(2):  # as if the first refusal had prepared it
        with pytest.raises(Unavailable, match=reason):
            store.create_project("ann", {})
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


# How releases 1.2.0 to 2.1.0 create and delete on PostgreSQL.
OLD_CREATE = """
    WITH counted AS (
        INSERT INTO account AS known (name, created, revision)
        VALUES (%(account)s, 1, 'r')
        ON CONFLICT (name) DO UPDATE
        SET created = known.created + 1, revision = excluded.revision
        RETURNING created)
    INSERT INTO project (id, account, seq, created_at, updated_at)
    SELECT md5(random()::text), %(account)s, created, 1, 1 FROM counted RETURNING id"""
OLD_DELETE = """
    WITH revised AS (UPDATE account SET revision = 'r' WHERE name = %(account)s
        AND EXISTS (SELECT FROM project WHERE id = %(id)s) RETURNING revision)
    DELETE FROM project USING revised WHERE id = %(id)s RETURNING id"""


@ON_POSTGRESQL
def test_processes_of_an_older_release_go_on_counting(older, open_store):
    """And the new ones count by themselves, so that nothing is counted twice."""
    store = open_store()
    for account in ("ann", "new"):
        for _ in range(3):
            [(id,)] = older.execute(OLD_CREATE, {"account": account}).fetchall()
        older.execute(OLD_DELETE, {"account": account, "id": id})
        store.delete_project(account, store.create_project(account, {}).id)
        store.create_project(account, {})
    counts = {account.name: account.projects for account in store.list_accounts()}
    assert counts == {"ann": 5, "bob é": 1, "eve": 0, "new": 3}
