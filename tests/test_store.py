"""What a store does on SQLite; tests/deployment runs the same tests on PostgreSQL."""

import hashlib
import json
import math
import os
import random
import struct
import sys
from contextlib import suppress

import pytest

from engines.errors import Unavailable
from engines.fields import SETTABLE
from helpers.running import POINT, ROOT, at_once, run
from helpers.stores import is_sqlite, listed, open_files, read, result_after_unlock
from schemas import MAX_PAGE
from store import (
    AccountFull,
    KeyReused,
    KeySpent,
    NotFound,
    Page,
    Precondition,
    Stale,
    Store,
    fingerprint_of,
)


def etag(project):
    """Made of two fields of the document."""
    return f"{project['version']}-{project['updated_at']}"


def etags(store, account="ann"):
    """Of the whole list and of a page."""
    queries = [None, Page(0, 20)]
    return [store.list_projects(account, query).etag for query in queries]


def test_created_project_has_its_fields_in_order(store):
    project = store.create_project("ann", {"name": "Park", "location": POINT})
    created = read(project)
    assert (created["name"], created["postal_code"]) == ("Park", None)
    assert (created["location"], created["version"]) == (POINT, 1)
    assert created["created_at"] == created["updated_at"]
    assert (created["id"], project.etag) == (project.id, etag(created))
    assert len(project.id) == 24 and set(project.id) <= set("0123456789abcdef")


def check_bytes(store, **fields):
    """Whatever returns the Project holds exactly these fields, as compact JSON."""
    created = store.create_project("ann", fields)
    project = read(created) | fields
    document = as_json(project)
    wrapped = {"projectList": [project], "page": 0, "size": 1, "total": 1}
    assert created.document == document
    assert store.get_project("ann", created.id).document == document
    assert store.list_projects("ann").document == as_json([project])
    assert store.list_projects("ann", Page(0, 1)).document == as_json(wrapped)
    updated = store.update_project("ann", created.id, fields)
    later = {"updated_at": read(updated)["updated_at"], "version": 2}
    assert updated.document == as_json(project | later)
    store.delete_project("ann", created.id)


def as_json(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def test_every_character_is_kept_to_the_byte(store):
    # PostgreSQL keeps no U+0000, and UTF-8 no surrogates.
    points = [*range(1, 0xD800), *range(0xE000, 0x110000)]
    check_bytes(store, name="".join(map(chr, points)), postal_code="")


def test_every_double_is_kept_to_the_byte(store):
    source = random.Random(1)
    doubles = [source.uniform(-180, 180) for _ in range(500)]
    doubles += struct.unpack("<500d", source.randbytes(4000))
    doubles += [0.1, -0.0, 5e-324, 1e-7, 2.2250738585072014e-308, 1e16, 1e22, 10.0, 10]
    doubles += [math.nextafter(90, 0), math.ulp(1), 2.0**53 + 2, 1.7976931348623157e308]
    finite = [double for double in doubles if math.isfinite(double)]
    check_bytes(store, location={"type": "Point", "coordinates": finite})


OTHERS = [(account, "{}") for account in ("ANN", "an_")]
OTHERS += [("ann", id) for id in ("_" * 24, "{} ", "0" * 24, "a\0b")]


@pytest.mark.parametrize("account, id", OTHERS)
def test_project_of_another_account_or_id_is_not_found(store, account, id):
    created = store.create_project("ann", {})
    store.create_project(account, {})
    id = id.format(created.id)
    with pytest.raises(NotFound):
        store.get_project(account, id)
    with pytest.raises(NotFound):
        store.update_project(account, id, {"name": "Mine"})
    with pytest.raises(NotFound):
        store.delete_project(account, id, Precondition([created.etag]))
    assert store.get_project("ann", created.id) == created


def test_update_changes_only_what_is_given(store):
    fields = {"name": "Park", "postal_code": "94117", "location": POINT}
    assert list(fields) == list(SETTABLE)
    other = store.create_project("ann", fields)
    before = read(store.create_project("ann", fields))
    cleared = {"name": None, "location": None}
    after = read(store.update_project("ann", before["id"], cleared))
    assert after == before | cleared | {"version": 2, "updated_at": after["updated_at"]}
    assert read(store.get_project("ann", before["id"])) == after
    assert store.get_project("ann", other.id) == other


def test_updated_at_follows_the_clock_but_never_back(open_store):
    times = [1000.0, 2000.0, 1500.0]
    store = open_store(clock=lambda: times[0])
    project = read(store.create_project("ann", {}))
    seen = [project["updated_at"]]
    while times[1:]:
        del times[0]
        updated = read(store.update_project("ann", project["id"], {}))
        seen.append(updated["updated_at"])
    assert seen == [1_000_000, 2_000_000, 2_000_000]


def condition_for(project, *etags):
    """If-Match and If-None-Match, with the Project's ETag in the place of {}."""
    return Precondition(*(each and [etag.format(project.etag) for etag in each] for each in etags))


REFUSED = [(etags, []) for etags in (["1"], [], ["0{}"], ["{} "], ["x", "0"])]
REFUSED += [(None, ["x", "{}"]), (["{}"], ["x", "{}"])]


@pytest.mark.parametrize("condition", REFUSED)
def test_change_whose_condition_fails_is_not_made(store, park, condition):
    refused = condition_for(park, *condition)
    with pytest.raises(Stale):
        store.update_project("ann", park.id, {"name": "Wood"}, refused)
    with pytest.raises(Stale):
        store.delete_project("ann", park.id, refused)
    assert store.get_project("ann", park.id) == park


@pytest.mark.parametrize("condition", [(["7", "{}"], []), (["{}"], ["x", "1"])])
def test_change_whose_condition_holds_is_made(store, park, condition):
    changed = store.update_project("ann", park.id, {}, condition_for(park, *condition))
    store.delete_project("ann", park.id, condition_for(changed, *condition))
    assert listed(store) == []


def test_same_key_makes_one_project(store):
    first = store.create_project("ann", {"name": "Park"}, key="k")
    before = etags(store)
    again = {"postal_code": None, "name": "Park"}
    assert store.create_project("ann", again, key="k") == first
    assert etags(store) == before
    changed = store.update_project("ann", first.id, {"name": "Lake"})
    assert store.create_project("ann", again, key="k") == changed
    assert len(listed(store)) == 1
    for account, key in [("bob", "k"), ("ann", "K")]:
        assert store.create_project(account, again, key).id != first.id


@pytest.mark.parametrize("fields", [{}, {"name": "Wood"}, {"location": POINT}])
def test_key_with_other_fields_is_refused(store, fields):
    first = store.create_project("ann", {"name": "Park"}, key="k")
    with pytest.raises(KeyReused):
        store.create_project("ann", fields, key="k")
    assert listed(store) == [read(first)]


def test_digest_of_a_key_is_the_same_in_every_release(store, plain_sql):
    fields = {"postal_code": "94117", "name": "Park", "location": POINT}
    store.create_project("ann", fields, key="k")
    store.create_project("ann", {})
    rows = plain_sql.execute("SELECT key, fingerprint FROM project ORDER BY seq").fetchall()
    assert rows[1] == (None, None)
    key, fingerprint = rows[0]
    location = rb'"{\"type\":\"Point\",\"coordinates\":[-122.4410896675,37.768361565]}"'
    text = b'{"location": %b, "name": "Park", "postal_code": "94117"}' % location
    assert (key, bytes(fingerprint)) == ("k", hashlib.sha256(text).digest())


def test_field_that_a_later_release_adds_changes_no_digest():
    today = {"postal_code": None, "name": "Park"}
    assert fingerprint_of(today | {"notes": None}) == fingerprint_of(today)
    assert fingerprint_of(today | {"notes": ""}) != fingerprint_of(today)


def spend(store, key, account="ann"):
    """Create a Project with this key, and delete it."""
    id = store.create_project(account, {"name": "Park"}, key).id
    store.delete_project(account, id)


@pytest.mark.parametrize("fields", [{"name": "Park"}, {"name": "Wood"}])
def test_key_of_a_deleted_project_creates_no_other(store, open_store, fields):
    """Or a request that was slow, or is repeated by another device, would bring it back."""
    spend(store, "k")
    before = etags(store)
    for each in (store, open_store()):
        with pytest.raises(KeySpent):
            each.create_project("ann", fields, "k")
    assert etags(store) == before
    store.create_project("ann", fields, "K")
    store.create_project("bob", fields, "k")
    store.delete_project("ann", store.create_project("ann", {}).id)


def test_key_is_forgotten_once_its_account_has_created_ten_thousand_more(store, plain_sql):
    def count_up(number):
        plain_sql.execute(f"UPDATE account SET last_seq = last_seq + {number} WHERE name = 'ann'")

    def remembered():
        rows = plain_sql.execute("SELECT account, key FROM spent_key ORDER BY account, key")
        return rows.fetchall()

    spend(store, "k", "bob")
    old = store.create_project("ann", {}, "old")
    count_up(20_000)
    store.delete_project("ann", old.id)  # which counts from here, not from its creation
    count_up(9_999)
    spend(store, "k1")
    assert remembered() == [("ann", "k1"), ("ann", "old"), ("bob", "k")]
    with pytest.raises(KeySpent):
        store.create_project("ann", {}, "old")
    spend(store, "k2")
    assert remembered() == [("ann", "k1"), ("ann", "k2"), ("bob", "k")]
    assert store.create_project("ann", {}, "old").id != old.id


def test_keys_of_a_deleted_account_are_free(store):
    spend(store, "spent")
    store.create_project("ann", {}, "used")
    store.delete_account("ann")
    for key in ("spent", "used"):
        store.create_project("ann", {"name": key}, key)


def test_account_with_room_is_never_called_full(store):
    """Eight clients share keys, and delete what they got."""
    small = Store(store.engine, max_projects=8)

    def work(number):
        for each in range(40):
            with suppress(NotFound, KeySpent):
                id = small.create_project("ann", {}, f"key {each}").id
                small.delete_project("ann", id)

    at_once(work, 8)
    assert listed(store) == []


def test_same_key_at_once_makes_one_project(store, park, foreign_lock, database):
    def create(number):
        return store.create_project("ann", {"name": "Lake"}, key="k")

    results = result_after_unlock(foreign_lock(), database, lambda: at_once(create, 16))
    assert results == [results[0]] * 16
    assert listed(store) == [read(park), read(results[0])]


def test_full_account_takes_no_more_and_all_else_goes_on(store):
    ids = [store.create_project("ann", {}).id for _ in range(5)]
    small = Store(store.engine, max_projects=3)
    for key in (None, "k"):
        with pytest.raises(AccountFull) as refusal:
            small.create_project("ann", {"name": "Park"}, key)
        assert refusal.value.args == (3,)
    assert [project["id"] for project in listed(store)] == ids
    small.update_project("ann", ids[0], {})
    small.create_project("bob", {}, "k")
    for id in ids[:3]:
        small.delete_project("ann", id)
    created = small.create_project("ann", {"name": "Park"}, "k")
    assert small.create_project("ann", {"name": "Park"}, "k") == created
    with pytest.raises(KeyReused):
        small.create_project("ann", {}, "k")
    with pytest.raises(AccountFull):
        small.create_project("ann", {})
    assert len(listed(store)) == 3


def test_refusal_keeps_its_connection_and_frees_the_key(store):
    """And counts for no breaker: the database has responded."""
    store.create_project("ann", {})
    full = Store(store.engine, max_projects=1)
    [kept] = store.engine.idle[os.getpid()]
    for number in range(20):
        with pytest.raises(AccountFull):
            full.create_project("ann", {}, f"key {number}")
    assert store.engine.idle[os.getpid()] == [kept]
    for number in range(20):
        store.create_project("ann", {"name": "other"}, f"key {number}")


IGNORE = {  # the next change of a Project, or all
    "SQLite": """
        CREATE TABLE ignored (x);
        CREATE TRIGGER ignore_{0} BEFORE {0} ON project
        WHEN (SELECT count(*) FROM ignored) < {1}
        BEGIN INSERT INTO ignored VALUES (1); SELECT RAISE(IGNORE); END""",
    "PostgreSQL": """
        CREATE SEQUENCE ignored;
        CREATE FUNCTION ignore() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF nextval('ignored') > {1} THEN RETURN coalesce(NEW, OLD); END IF;
            RETURN NULL; END $$;
        CREATE TRIGGER ignore BEFORE {0} ON project
            FOR EACH ROW EXECUTE FUNCTION ignore()""",
}


@pytest.mark.parametrize("change", ["UPDATE", "DELETE"])
@pytest.mark.parametrize("times", [1, 9])
@pytest.mark.parametrize("names_the_etag", [False, True])
def test_change_that_is_allowed_but_changes_nothing_is_tried_once_more(
    store, park, plain_sql, change, times, names_the_etag
):
    """As it may happen on a cluster while the account moves to another node."""
    condition = Precondition([park.etag] if names_the_etag else None, ["another"])
    if is_sqlite(plain_sql):
        plain_sql.executescript(IGNORE["SQLite"].format(change, times))
    else:
        plain_sql.execute(IGNORE["PostgreSQL"].format(change, times))

    def work():
        if change == "UPDATE":
            store.update_project("ann", park.id, {"name": "Wood"}, condition)
        else:
            store.delete_project("ann", park.id, condition)

    if times == 1:
        work()
        assert [p["name"] for p in listed(store)] == ["Wood"] * (change == "UPDATE")
    else:
        with pytest.raises(Unavailable, match="could not be (changed|deleted)"):
            work()
        assert listed(store) == [read(park)]


def test_full_account_holds_just_its_limit_after_concurrent_writes(store):
    small = Store(store.engine, max_projects=50)

    def fill(number):
        made = 0
        for each in range(8):
            with suppress(AccountFull):
                small.create_project("ann", {}, f"{number}-{each}" if each % 2 else None)
                made += 1
        return made

    assert sum(at_once(fill, 16)) == 50
    assert len(listed(store)) == 50
    [account] = store.list_accounts()
    assert account.projects == 50


def test_order_of_creation_outlives_changes_of_the_rows(store, plain_sql):
    """PostgreSQL moves a changed row, and reads a small table as it lies there."""
    ids = [store.create_project("ann", {"name": str(n)}).id for n in range(30)]
    for id in ids[::3]:
        store.update_project("ann", id, {"name": "x" * 500})
    plain_sql.execute("ANALYZE")
    assert [project["id"] for project in listed(store)] == ids
    page = read(store.list_projects("ann", Page(1, 7)))
    assert [project["id"] for project in page["projectList"]] == ids[7:14]
    page = read(store.list_projects("ann", Page(0, 7, 20)))
    assert [project["id"] for project in page["projectList"]] == ids[20:27]


def test_pages_part_the_list(store):
    for number in range(5):
        store.create_project("ann", {"name": str(number)})
    for _ in range(6):
        store.create_project("bob", {})
    numbers = [0, 1, 2, 3, MAX_PAGE]
    lists = [store.list_projects("ann", Page(page, 2)) for page in numbers]
    assert [each.next_after for each in lists] == [2, 4, None, None, None]
    pages = [read(each) for each in lists]
    names = [[project["name"] for project in page["projectList"]] for page in pages]
    assert names == [["0", "1"], ["2", "3"], ["4"], [], []]
    for number, page in zip(numbers, pages, strict=True):
        assert list(page) == ["projectList", "page", "size", "total"]
        assert (page["page"], page["size"], page["total"]) == (number, 2, 5)
    assert store.list_projects("ann", Page(0, 5)).next_after is None
    empty = {"projectList": [], "page": 0, "size": 20, "total": 0}
    assert read(store.list_projects("eve", Page(0, 20))) == empty


def test_total_is_exact_however_many_writers_there_are(store, park, plain_sql):
    def write(number):
        made = [store.create_project("ann", {}).id for _ in range(4)]
        with suppress(NotFound):
            store.delete_project("ann", park.id)
        with suppress(NotFound):
            store.update_project("ann", park.id, {})
        store.delete_project("ann", made[0])
        with pytest.raises(Stale):
            store.delete_project("ann", made[1], Precondition(["x"]))
        store.create_project(f"new {number % 2}", {}, key="k")

    at_once(write, 8)
    counted = "SELECT account, count(*) FROM project GROUP BY account ORDER BY account"
    kept = "SELECT name, project_count FROM account ORDER BY name"
    assert plain_sql.execute(kept).fetchall() == plain_sql.execute(counted).fetchall()


def test_list_has_a_new_etag_after_each_change(store):
    """Also where a creation and a deletion lead back to the same content."""
    seen = [etags(store)]
    first = store.create_project("ann", {"name": "Park"}).id
    seen.append(etags(store))
    second = store.create_project("ann", {"name": "Park"}).id
    seen.append(etags(store))
    store.update_project("ann", first, {"name": "Wood"})
    seen.append(etags(store))
    store.update_project("ann", first, {})
    seen.append(etags(store))
    store.delete_project("ann", second)
    seen.append(etags(store))
    third = store.create_project("ann", {}).id
    store.delete_project("ann", third)
    seen.append(etags(store))
    store.delete_project("ann", first)
    seen.append(etags(store))
    for number, (whole, page) in enumerate(seen):
        others = [each for pair in seen[:number] for each in pair]
        assert whole != page and not {whole, page} & {*others}
    assert etags(store) == seen[-1]


def test_etag_of_a_page_covers_where_the_next_one_begins(store, plain_sql):
    for number in range(3):
        store.create_project("ann", {"name": str(number)})
    before = store.list_projects("ann", Page(0, 1))
    # What only an operator's own SQL can do: the page stays, and the next one begins elsewhere.
    plain_sql.execute("UPDATE project SET seq = seq + 10")
    after = store.list_projects("ann", Page(0, 1))
    assert after.document == before.document
    assert after.etag != before.etag


def test_account_is_found_as_it_is_listed(store):
    store.add_token("eve", b"1")
    for account in ("ann", "bob"):
        made = store.create_project(account, {})
        store.add_token(account, account.encode())
    store.delete_project("bob", made.id)
    found = [store.find_account(name) for name in ("ann", "bob", "eve")]
    assert found == store.list_accounts()
    assert store.find_account("an") is None


def test_token_expires_to_the_millisecond_and_can_then_be_cleared_away(store, monkeypatch):
    """By the clock that another team's test puts in the place of time.time, as freezegun does."""
    times = [1_000_000.0]
    monkeypatch.setattr("time.time", lambda: times[0])
    store.add_token("ann", b"1", days=2)
    store.add_token("ann", b"2")
    for passed, left in [(2 * 86400 - 0.001, [1, 2]), (0.001, [2])]:
        times[0] += passed
        assert (store.find_caller(b"1") is not None) == (1 in left)
        store.revoke_expired_tokens()
        assert [token.id for token in store.list_tokens()] == left


def test_connection_is_opened_at_the_first_use_and_kept_until_close(open_store):
    before = open_files()
    store = open_store()
    assert open_files() == before
    store.list_tokens()
    opened = open_files()
    assert opened != before
    for _ in range(10):
        store.create_project("ann", {})
        store.list_projects("ann")
    assert open_files() == opened
    store.engine.close()
    assert open_files() == before


def test_defect_is_no_outage_and_its_connection_is_not_used_again(open_store):
    before = open_files()
    store = open_store()
    store.add_token("ann", b"1")
    with pytest.raises(Exception) as caught:
        store.add_token("ann", b"1")  # a digest is unique
    assert not isinstance(caught.value, (Unavailable, NotFound))
    assert open_files() == before
    assert store.find_caller(b"1") == ("ann", 1)


def test_one_of_many_conditional_updates_wins(store):
    park = store.create_project("ann", {})

    def update(_):
        return read(store.update_project("ann", park.id, {}, Precondition([park.etag])))["version"]

    results = at_once(update, 16, errors=Stale)
    assert results.count(2) == 1
    assert sum(isinstance(result, Stale) for result in results) == 15


WITH_RIGS = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
FORK = """
import os, sys
from engines.errors import Unavailable
from helpers.running import store_on
store = store_on(sys.argv[1])
store.create_project("ann", {})
[first] = store.engine.idle[os.getpid()]
if child := os.fork():
    assert os.wait()[1] == 0
    store.create_project("ann", {})
    assert store.engine.idle[os.getpid()] == [first]
else:
    for each in store, store_on(sys.argv[1]):
        try:
            each.create_project("ann", {})
        except Unavailable as error:
            print(error)
    assert first not in store.engine.idle[os.getpid()]
"""
CLOSED = """
import os, sys
from helpers.running import store_on
store = store_on(sys.argv[1])
store.create_project("ann", {})
store.engine.close()
if os.fork():
    assert os.wait()[1] == 0
store.create_project("ann", {})
"""


def test_memory_can_be_used_after_a_fork():
    """As by a fixture that serves an application from a process of its own."""
    script = FORK.replace("sys.argv[1]", "':memory:'").replace(
        "store, store_on", "store, store or store_on"
    )
    assert run(sys.executable, "-c", script, environment=WITH_RIGS).stdout == ""


def test_fork_takes_no_connection_along(store, database, plain_sql):
    """On SQLite not even the file: the child would hold none of the locks that it has."""
    output = run(sys.executable, "-c", FORK, database, environment=WITH_RIGS).stdout
    reason = f"opened before this process forked: {database}\n"
    assert output == (2 * reason if is_sqlite(plain_sql) else "")
    assert len(listed(store)) == (2 if is_sqlite(plain_sql) else 4)


def test_fork_after_the_last_connection_was_closed_may_use_the_database(store, database):
    run(sys.executable, "-c", CLOSED, database, environment=WITH_RIGS)
    assert len(listed(store)) == 3


def test_check_reads_the_database(store, plain_sql):
    store.check()
    plain_sql.execute("ALTER TABLE token RENAME TO lost")
    store.engine.close()  # PostgreSQL's prepared statements
    with pytest.raises(Exception, match="token"):
        store.check()
