import fcntl
import json
import math
import os
import random
import sqlite3
import threading

import pytest

import store as module
from store import NotFound, Stale, Store, Unavailable

POINT = {"type": "Point", "coordinates": [-122.4410896675, 37.768361565]}


@pytest.fixture
def raw(store, path):
    """The same file, seen with plain SQL."""
    connection = sqlite3.connect(path, isolation_level=None)
    yield connection
    connection.close()


def read(row):
    return json.loads(row["document"])


def test_created_project_holds_its_seven_members_in_order(store):
    created = read(store.create_project("ann", {"name": "Park", "location": POINT}))
    assert list(created) == [
        "id",
        "name",
        "created_at",
        "updated_at",
        "version",
        "postal_code",
        "location",
    ]
    assert (created["name"], created["postal_code"]) == ("Park", None)
    assert (created["location"], created["version"]) == (POINT, 1)
    assert created["created_at"] == created["updated_at"]
    assert len(created["id"]) == 24 and set(created["id"]) <= set("0123456789abcdef")


def test_ids_are_not_repeated(store):
    ids = {store.create_project("ann", {})["id"] for _ in range(50)}
    assert len(ids) == 50


def test_created_project_is_in_the_file(store, raw):
    created = read(
        store.create_project("ann", {"name": "Park", "postal_code": "94117"})
    )
    [row] = raw.execute("SELECT id, account, name, postal_code, version FROM project")
    assert row == (created["id"], "ann", "Park", "94117", 1)


def test_times_are_epoch_milliseconds_of_the_clock(path):
    store = Store(path, clock=lambda: 1_700_000_000.123)
    assert read(store.create_project("ann", {}))["created_at"] == 1_700_000_000_123


def test_project_comes_back_as_it_was_stored(store):
    created = store.create_project("ann", {"name": "Park", "location": POINT})
    assert tuple(store.get_project("ann", created["id"])) == tuple(created)


@pytest.mark.parametrize(
    "text",
    ["", "a\0b", '"\\/\b\f\n\r\t', "\x7f\u2028\ufeff\uffff", "Grüße 😀", "\x01" * 50],
)
def test_every_character_survives(store, text):
    created = store.create_project("ann", {"name": text})
    assert read(store.get_project("ann", created["id"]))["name"] == text


def test_every_double_survives(store):
    doubles = [random.Random(1).uniform(-90, 90) for _ in range(500)]
    doubles += [0.1, -0.0, 5e-324, 1e-7, 2.2250738585072014e-308, math.nextafter(90, 0)]
    for double in doubles:
        point = {"type": "Point", "coordinates": [double, double]}
        created = read(store.create_project("ann", {"location": point}))
        assert repr(created["location"]["coordinates"]) == repr([double, double])


@pytest.mark.parametrize("account, id", [("bob", None), ("ann", "0" * 24), ("ann", "")])
def test_project_of_another_account_is_not_found(store, account, id):
    id = id if id is not None else store.create_project("ann", {})["id"]
    with pytest.raises(NotFound):
        store.get_project(account, id)
    with pytest.raises(NotFound):
        store.update_project(account, id, {"name": "Mine"}, None)
    with pytest.raises(NotFound):
        store.delete_project(account, id, ["1"])


def test_update_changes_only_what_is_given(store):
    members = {"name": "Park", "postal_code": "94117", "location": POINT}
    before = read(store.create_project("ann", members))
    after = read(store.update_project("ann", before["id"], {"name": None}, None))
    assert after == before | {
        "name": None,
        "version": 2,
        "updated_at": after["updated_at"],
    }
    assert read(store.get_project("ann", before["id"])) == after


def test_update_of_nothing_is_an_update(store):
    id = store.create_project("ann", {})["id"]
    assert store.update_project("ann", id, {}, None)["etag"] == "2"


def test_updated_at_follows_the_clock_but_never_back(path):
    times = [1000.0, 2000.0, 1500.0]
    store = Store(path, clock=lambda: times[0])
    project = read(store.create_project("ann", {}))
    seen = [project["updated_at"]]
    while times[1:]:
        del times[0]
        updated = read(store.update_project("ann", project["id"], {}, None))
        seen.append(updated["updated_at"])
    assert seen == [1_000_000, 2_000_000, 2_000_000]


@pytest.mark.parametrize("etags", [["2"], [], ["01"], ["1 "], ["x", "0"]])
def test_unexpected_version_changes_nothing(store, etags):
    id = store.create_project("ann", {"name": "Park"})["id"]
    with pytest.raises(Stale):
        store.update_project("ann", id, {"name": "Wood"}, etags)
    with pytest.raises(Stale):
        store.delete_project("ann", id, etags)
    found = read(store.get_project("ann", id))
    assert (found["name"], found["version"]) == ("Park", 1)


def test_one_of_the_expected_versions_is_enough(store):
    id = store.create_project("ann", {})["id"]
    assert store.update_project("ann", id, {}, ["7", "1"])["etag"] == "2"
    store.delete_project("ann", id, ["2"])
    with pytest.raises(NotFound):
        store.get_project("ann", id)


def test_delete_takes_along_what_belongs_to_the_project(store, raw):
    ids = [store.create_project("ann", {})["id"] for _ in range(2)]
    raw.execute(
        "INSERT INTO part SELECT 'part of ' || id, id, 'region' FROM project",
    )
    store.delete_project("ann", ids[0], None)
    assert raw.execute("SELECT id FROM part").fetchall() == [(f"part of {ids[1]}",)]


def test_cascade_searches_by_index(store, raw):
    plan = raw.execute("EXPLAIN QUERY PLAN SELECT * FROM part WHERE project = 1")
    assert "USING INDEX part_project" in plan.fetchall()[0][3]


def test_list_is_in_order_of_creation_and_of_one_account(store):
    names = ["c", "a", "b"]
    for name in names:
        store.create_project("ann", {"name": name})
        store.create_project("bob", {"name": "other"})
    store.update_project("ann", listed(store)[0]["id"], {}, None)
    assert [project["name"] for project in listed(store)] == names
    assert read(store.list_projects("eve", [])) == []


def listed(store):
    return read(store.list_projects("ann", []))


def test_listed_projects_are_the_single_ones(store):
    ids = [store.create_project("ann", {"location": POINT})["id"] for _ in range(3)]
    assert listed(store) == [read(store.get_project("ann", id)) for id in ids]


def test_list_is_one_range_of_the_table(store, raw):
    plan = raw.execute(
        f"EXPLAIN QUERY PLAN {module.OWN}", {"account": "ann"}
    ).fetchall()
    assert [row[3] for row in plan] == ["SEARCH project USING PRIMARY KEY (account=?)"]


def test_pages_part_the_list(store):
    for number in range(5):
        store.create_project("ann", {"name": str(number)})
    pages = [read(store.list_projects("ann", [], page, 2)) for page in range(4)]
    names = [[project["name"] for project in page["projectList"]] for page in pages]
    assert names == [["0", "1"], ["2", "3"], ["4"], []]
    assert [(p["page"], p["size"], p["total"]) for p in pages] == [
        (page, 2, 5) for page in range(4)
    ]
    assert list(pages[0]) == ["projectList", "page", "size", "total"]


def test_page_far_beyond_the_end_is_empty(store):
    store.create_project("ann", {})
    page = read(store.list_projects("ann", [], 2**53 - 1, 1000))
    assert (page["projectList"], page["page"]) == ([], 2**53 - 1)


def test_list_etag_changes_with_each_change_and_never_returns(store):
    def etags():
        lists = [store.list_projects("ann", []), store.list_projects("ann", [], 0, 20)]
        return [row["etag"] for row in lists]

    seen = [etags()]
    id = store.create_project("ann", {"name": "Park"})["id"]
    seen.append(etags())
    for name in ("Wood", "Park"):
        store.update_project("ann", id, {"name": name}, None)
        seen.append(etags())
    store.delete_project("ann", id, None)
    seen.append(etags())
    assert etags() == seen[-1]
    assert len({etag for pair in seen for etag in pair}) == 2 * len(seen)


def test_list_etag_does_not_return_after_a_restored_backup(store, raw, path):
    id = store.create_project("ann", {"name": "Park"})["id"]
    with sqlite3.connect(":memory:") as backup:
        raw.backup(backup)
        store.update_project("ann", id, {"name": "Wood"}, None)
        lost = store.list_projects("ann", [])["etag"]
        backup.backup(raw)
    backup.close()
    store.update_project("ann", id, {"name": "Lake"}, None)
    assert store.list_projects("ann", [])["etag"] != lost


def test_list_etag_ignores_other_accounts_and_refused_changes(store):
    id = store.create_project("ann", {})["id"]
    etag = store.list_projects("ann", [])["etag"]
    other = store.create_project("bob", {})["id"]
    store.update_project("bob", other, {}, None)
    store.delete_project("bob", other, None)
    with pytest.raises(Stale):
        store.update_project("ann", id, {}, ["9"])
    assert store.list_projects("ann", [])["etag"] == etag


def test_known_list_is_not_rendered(store):
    for _ in range(3):
        store.create_project("ann", {})
    etag = store.list_projects("ann", [])["etag"]
    assert tuple(store.list_projects("ann", ["x", etag])) == (etag, None)
    page = store.list_projects("ann", [etag], 0, 20)
    assert page["document"] is not None
    assert store.list_projects("ann", [page["etag"]], 0, 20)["document"] is None


def test_token_acts_for_its_account_until_it_is_revoked(store):
    store.add_token("ann", b"1")
    store.add_token("bob", b"2")
    assert [store.find_account(digest) for digest in (b"1", b"2", b"3")] == [
        "ann",
        "bob",
        None,
    ]
    assert store.revoke_token(1)
    assert store.find_account(b"1") is None
    assert store.find_account(b"2") == "bob"
    assert not store.revoke_token(1)


def test_token_expires_to_the_millisecond(path):
    times = [1_000_000.0]
    store = Store(path, clock=lambda: times[0])
    store.add_token("ann", b"1", days=2)
    times[0] += 2 * 86400 - 0.001
    assert store.find_account(b"1") == "ann"
    times[0] += 0.001
    assert store.find_account(b"1") is None


def test_id_of_a_revoked_token_is_not_given_again(store):
    store.add_token("ann", b"1")
    store.revoke_token(1)
    store.add_token("ann", b"2")
    assert [row["id"] for row in store.list_tokens()] == [2]


def test_listed_tokens_show_times_as_text(path):
    store = Store(path, clock=lambda: 1_700_000_000)
    store.add_token("ann", b"1")
    store.add_token("bob", b"2", days=30)
    assert [tuple(row) for row in store.list_tokens()] == [
        (1, "2023-11-14 22:13", "never", "ann"),
        (2, "2023-11-14 22:13", "2023-12-14 22:13", "bob"),
    ]


def test_file_is_durable_and_private(store, path, raw):
    assert raw.execute("PRAGMA journal_mode").fetchall() == [("wal",)]
    [(synchronous,)] = store._read("PRAGMA synchronous", {})
    assert synchronous == 2  # FULL
    assert os.stat(path).st_mode & 0o077 == 0
    assert raw.execute("PRAGMA user_version").fetchall() == [(module.LAYOUT,)]


def test_data_outlive_the_store(path):
    id = Store(path).create_project("ann", {"name": "Park"})["id"]
    assert read(Store(path).get_project("ann", id))["name"] == "Park"


def test_restored_copy_without_wal_becomes_durable_again(store, raw, tmp_path):
    store.create_project("ann", {})
    copy = str(tmp_path / "copy.db")
    raw.execute("VACUUM INTO ?", [copy])
    assert len(listed(Store(copy))) == 1
    connection = sqlite3.connect(copy)
    assert connection.execute("PRAGMA journal_mode").fetchall() == [("wal",)]
    connection.close()


def test_no_file_is_open_before_the_first_use(path):
    before = open_files()
    store = Store(path)
    assert open_files() == before
    store.list_tokens()
    assert open_files() != before
    del store
    assert open_files() == before


def open_files():
    return sorted(os.listdir("/proc/self/fd"))


def test_path_is_fixed_when_it_is_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store("here.db")
    monkeypatch.chdir("/")
    store.create_project("ann", {})
    assert len(listed(store)) == 1


@pytest.mark.parametrize("name", ["odd ?%20#&.db", "grün.db", "file:x?mode=ro"])
def test_path_may_hold_any_character(tmp_path, name):
    Store(str(tmp_path / name)).create_project("ann", {})
    assert (tmp_path / name).stat().st_size > 0


def test_memory_is_shared_by_threads_and_by_nobody_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store, other = Store(":memory:"), Store(":memory:")
    in_threads(lambda: [store.create_project("ann", {}) for _ in range(20)], 8)
    assert len(listed(store)) == 160
    assert listed(other) == []
    assert list(tmp_path.iterdir()) == []


def in_threads(work, count):
    """Run `work` in so many threads at once; what it returns, or the error it raises."""
    results, barrier = [], threading.Barrier(count)

    def run():
        barrier.wait()
        try:
            results.append(work())
        except (Stale, Unavailable) as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_lose_no_update(store):
    id = store.create_project("ann", {})["id"]
    results = in_threads(lambda: store.update_project("ann", id, {}, None)["etag"], 16)
    assert sorted(map(int, results)) == list(range(2, 18))


def test_one_of_many_conditional_updates_wins(store):
    id = store.create_project("ann", {})["id"]
    results = in_threads(lambda: store.update_project("ann", id, {}, ["1"])["etag"], 16)
    assert results.count("2") == 1
    assert sum(isinstance(result, Stale) for result in results) == 15


def test_threads_may_start_at_once_on_a_missing_file(path):
    results = in_threads(lambda: Store(path).create_project("ann", {})["etag"], 12)
    assert results == ["1"] * 12
    assert len(listed(Store(path))) == 12


def not_a_database(path):
    with open(path, "w") as file:
        file.write("This is no database. " * 100)


def foreign(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (id)")
    connection.close()


def newer(path):
    Store(path)
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {module.LAYOUT + 1}")
    connection.close()


@pytest.mark.parametrize("make", [not_a_database, foreign, newer])
def test_unusable_file_is_refused_and_left_as_it_is(path, make):
    make(path)
    with open(path, "rb") as file:
        before = file.read()
    with pytest.raises(OSError, match=path):
        Store(path)
    with open(path, "rb") as file:
        assert file.read() == before


@pytest.mark.parametrize("path", ["/", "/no/such/folder/x.db", "/dev/null/x.db"])
def test_impossible_path_is_refused(path):
    with pytest.raises(OSError, match=path):
        Store(path)


@pytest.fixture
def locked(store, raw):
    """A database on which another program holds the write lock."""
    store.create_project("ann", {"name": "Park"})
    raw.execute("BEGIN IMMEDIATE")
    return raw


def test_foreign_lock_stops_writers_and_no_reader(store, locked):
    results = in_threads(lambda: store.create_project("ann", {}), 3)
    assert all(isinstance(result, Unavailable) for result in results)
    assert len(listed(store)) == 1
    locked.execute("ROLLBACK")
    store.create_project("ann", {})
    assert len(listed(store)) == 2


def test_writers_queue_in_the_lock_file(store, path):
    store.create_project("ann", {})
    writer = threading.Thread(target=store.create_project, args=("ann", {}))
    with open(f"{path}-lock") as queue:
        fcntl.flock(queue, fcntl.LOCK_EX)
        writer.start()
        while writer.is_alive() and not is_waited_for(queue):
            pass
        assert writer.is_alive()
    writer.join()
    assert len(listed(store)) == 2
    [(timeout,)] = store._read("PRAGMA busy_timeout", {})
    assert timeout == module.BUSY_TIMEOUT * 1000


def is_waited_for(file):
    inode = f":{os.fstat(file.fileno()).st_ino} "
    with open("/proc/locks") as locks:
        return any("->" in line and inode in line for line in locks)


def test_writer_waits_for_a_short_foreign_lock(store, locked):
    waiting = threading.Thread(target=store.create_project, args=("ann", {}))
    waiting.start()
    locked.execute("COMMIT")
    waiting.join()
    assert len(listed(store)) == 2


def test_lost_file_is_unavailable_and_not_replaced(store, path):
    store.create_project("ann", {})
    store = Store(path)
    os.rename(path, path + ".away")
    with pytest.raises(Unavailable):
        store.list_projects("ann", [])
    assert not os.path.exists(path)
    os.rename(path + ".away", path)
    assert len(listed(store)) == 1


def test_damaged_file_is_unavailable_until_it_is_mended(store, path):
    store.create_project("ann", {"name": "Park"})
    store = Store(path)
    with open(path, "rb") as file:
        good = file.read()
    with open(path, "r+b") as file:
        file.write(b"x" * len(good))
    with pytest.raises(Unavailable):
        store.list_projects("ann", [])
    with open(path, "r+b") as file:
        file.write(good)
    assert len(listed(store)) == 1
