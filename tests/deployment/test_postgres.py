"""The service on PostgreSQL: real servers, real processes, and their faults."""

import json
import os
import re
import secrets
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import psycopg
import pytest

from auth import digest
from deployment.servers.pgserver import BINARIES, WAITS, backends, execute, silence, start_pgserver
from engines.backup import backup, restore
from engines.errors import OutcomeUnknown, Unavailable
from engines.postgres import (
    LOST_SESSION,
    REQUEST_TIMEOUT,
    ClusterConnection,
    PostgreSQL,
    first_host_last,
)
from helpers.later_release import copy_later_release
from helpers.running import (
    BIN,
    LIMIT,
    at_once,
    closing_store,
    environment_of,
    retry_while_unavailable,
    run,
    store_on,
    wait_for,
)
from helpers.stores import (
    REFUSED_BY_BREAKER,
    fails,
    fetch,
    lasts,
    plain_sql_on,
    refusal,
    result_after_unlock,
)
from store import AccountFull, KeyReused, KeySpent, NotFound, Page, Precondition, Stale, Store


@pytest.fixture
def database(postgresql):
    return postgresql


def waiting(database):
    """The process, as soon as there is one, that waits for a lock."""
    [pid] = wait_for(lambda: backends(database, WAITS))
    return pid


# Its tables


def test_text_that_identifies_has_a_collation_that_no_update_changes(database, store):
    """Or rows would be missing from their lists, once the system sorts text anew."""
    select = """SELECT attrelid::regclass || '.' || attname,
            attcollation::regcollation = 'pg_catalog."C"'::regcollation
        FROM pg_attribute JOIN pg_class ON attrelid = pg_class.oid
        WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' AND attcollation <> 0
            AND (attname = 'account' OR EXISTS (SELECT FROM pg_index
                WHERE indrelid = attrelid AND attnum = ANY (indkey)))"""
    found = dict(execute(database, select))
    assert {"account.name", "project.key", "token.account"} <= found.keys()
    assert [name for name in found if not found[name]] == []


# What every server does alike


@pytest.mark.parametrize("binaries", BINARIES, ids=lambda path: path.parent.name)
def test_servers_give_the_documents_of_sqlite(binaries, another_database, open_store):
    """Often enough for psycopg to prepare each statement."""

    def use(store, now):
        """What is returned, without what is random."""
        created = store.create_project("ann", {"name": "é"}, f"key {now}")
        fields = {"location": {"type": "Point", "coordinates": [0.1, -0.0]}}
        precondition = Precondition([created.etag, "9"], ["8"])
        yield store.update_project("ann", created.id, fields, precondition)[1:]
        yield store.list_projects("ann", Page(0, 2, 1))[1:]
        store.add_token("ann", digest(str(now)))
        yield store.find_caller(digest(str(now))), store.list_tokens()
        if now % 2:
            store.delete_project("ann", created.id)

    with start_pgserver(binaries, fsync="off") as old_or_new:
        database = old_or_new.create_database()
        stores = [open_store(each, clock=lambda: now) for each in (database, another_database)]
        for now in range(1_800_000_000, 1_800_000_008):
            of_postgresql, of_sqlite = (
                [re.sub("[0-9a-f]{24}", "ID", str(each)) for each in use(store, now)]
                for store in stores
            )
            assert of_postgresql == of_sqlite


# Starting


def test_first_uses_at_once_need_no_default_of_the_server(database, open_store):
    alter = f"ALTER DATABASE {database.rpartition('/')[2]} SET"
    execute(database, f"{alter} default_transaction_isolation = 'serializable'")
    execute(database, f"{alter} client_encoding = 'LATIN1'")
    at_once(lambda _: open_store().create_project("ann", {"name": "😀"}))
    assert execute(database, "SELECT last_seq FROM account") == [(8,)]


def test_database_that_is_not_utf8_is_refused(database):
    encoding = "pg_char_to_encoding('SQL_ASCII')"
    where = "datname = current_database()"
    execute(database, f"UPDATE pg_database SET encoding = {encoding} WHERE {where}")
    with fails(Unavailable, "^the database is in SQL_ASCII, not in UTF8$"):
        PostgreSQL(database).open_database(creates=True)


# Each holds one or two of these, and no line may show three characters of one.
SECRETS = ["Qz7wXk", "Vb9mJt", "5731"]
MALFORMED = [
    "localhost:5731/Vb9mJt@127.0.0.1:1/db",  # an "@" too late
    "u:Qz7wXk@Vb9mJt@127.0.0.1:1/db",  # two of them
    "u:Qz7wXk%zzVb9mJt@127.0.0.1:1/db",  # what libpq cannot decode
    "u:Qz7wXk@127.0.0.1:Vb9mJt/db",  # no port
    "127.0.0.1:1/db?password=Qz7wXk&sslmode=bogus",  # what libpq refuses as it connects
]


def check_refusal(output):
    assert output.startswith("Error: ") and output.count("\n") == 1, output
    for secret in SECRETS:
        for start in range(len(secret) - 2):
            assert secret[start : start + 3] not in output


@pytest.mark.parametrize("rest", MALFORMED)
def test_refusal_is_one_line_without_the_password(rest):
    with pytest.raises((ValueError, Unavailable)) as refusal:
        Store(PostgreSQL(f"postgresql://{rest}")).list_tokens()
    check_refusal(f"Error: {refusal.value}\n")


@pytest.mark.parametrize("parameter", ["schema=public", "connect_timeout=soon"])
def test_parameter_that_libpq_does_not_know_is_refused(parameter):
    with pytest.raises(ValueError, match="^malformed URL .* use only libpq's parameters$"):
        PostgreSQL(f"postgresql://u@127.0.0.1:1/db?{parameter}")


def test_host_whose_name_cannot_be_encoded_is_refused():
    with fails(Unavailable, "idna"):
        Store(PostgreSQL("postgresql://u@a..b/db")).list_tokens()


def test_wrong_password_is_refused(database):
    """Of a role that does not exist, which the server says to nobody."""
    environment = environment_of(database.replace("postgres@", "u:Qz7wXk@"))
    refused = run(BIN / "flask", "token", "list", environment=environment, status=1)
    check_refusal(re.sub(r"port \d+", "port", refused.stdout + refused.stderr))


# What a cluster does, as far as one server can show it


@pytest.fixture
def cluster_store(store, database):
    """A store that talks to the server as to a cluster."""
    with closing_store(database) as cluster_store:
        cluster_store.engine._connection_class = ClusterConnection
        yield cluster_store


def test_statements_for_a_cluster_do_what_those_for_one_server_do(cluster_store, store):
    first = cluster_store.create_project("ann", {"name": "Park"}, "key")
    assert cluster_store.create_project("ann", {"name": "Park"}, "key") == first
    with pytest.raises(KeyReused):
        cluster_store.create_project("ann", {}, "key")
    small = Store(cluster_store.engine, max_projects=1)
    with pytest.raises(AccountFull):
        small.create_project("ann", {})
    assert small.create_project("ann", {"name": "Park"}, "key") == first
    changed = cluster_store.update_project("ann", first.id, {}, Precondition([first.etag]))
    with pytest.raises(Stale):
        cluster_store.delete_project("ann", first.id, Precondition([first.etag]))
    assert store.get_project("ann", first.id) == changed
    assert [account.projects for account in store.list_accounts()] == [1]
    cluster_store.delete_project("ann", first.id)
    assert [account.projects for account in store.list_accounts()] == [0]
    with pytest.raises(KeySpent):
        cluster_store.create_project("ann", {}, "key")


def test_ids_of_tokens_go_on_in_the_range_of_the_node(cluster_store, database, another_database):
    """A restore brings those of the next node as well, which begin with this one's maximum."""
    first, next_node = 2 << 48, 3 << 48
    file = f"{another_database}-backup"
    with closing_store(another_database) as source:
        source.engine.open_database(creates=True)
        for number, id in enumerate([7, first + 5, next_node]):
            source.add_token("ann", b"%d" % number)
            with closing(plain_sql_on(another_database)) as plain_sql:
                plain_sql.execute(f"UPDATE token SET id = {id} WHERE digest = x'{number + 30}'")
        backup(source.engine, file)
    bounds = f"MINVALUE {first} MAXVALUE {next_node} START {first} RESTART"
    execute(database, f"ALTER SEQUENCE token_id_seq {bounds}")
    restore(cluster_store.engine, file)
    assert cluster_store.add_token("ann", b"new") == first + 6


FAIL_AT_COMMIT = """
CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS
    $$BEGIN RAISE '{}'; END$$;
CREATE CONSTRAINT TRIGGER fail AFTER UPDATE ON project
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fail()
"""


@pytest.mark.parametrize("reason", ["could not commit on at least one node", LOST_SESSION])
def test_commit_on_a_cluster_that_fails_is_in_doubt_whatever_the_error(
    cluster_store, database, reason
):
    """Some nodes may have committed."""
    id = cluster_store.create_project("ann", {}).id
    execute(database, FAIL_AT_COMMIT.format(reason))
    with fails(OutcomeUnknown, reason):
        cluster_store.update_project("ann", id, {})


def test_command_that_only_reads_is_never_in_doubt(cluster_store, database):
    with fails(Unavailable, "terminating"), cluster_store.engine.snapshot() as connection:
        [(pid,)] = connection.fetch("SELECT pg_backend_pid()", {})
        execute(database, f"SELECT pg_terminate_backend({pid}, {1000 * LIMIT})")


# Faults


def test_write_whose_process_is_ended_was_not_made(database, store, foreign_lock):
    store.create_project("ann", {})
    with foreign_lock(), ThreadPoolExecutor() as pool:
        write = pool.submit(store.create_project, "ann", {})
        execute(database, f"SELECT pg_terminate_backend({waiting(database)})")
        with fails(Unavailable):
            write.result(LIMIT)
    assert json.loads(store.list_projects("ann", Page(0, 1)).document)["total"] == 1


def test_write_whose_process_is_killed_is_in_doubt_but_not_before_its_commit(
    postgresql_to_break, open_store
):
    database = postgresql_to_break.database_url("postgres")
    store = open_store(database)
    id = store.create_project("ann", {}).id
    with (
        suppress(psycopg.OperationalError),
        psycopg.connect(database) as other,
        ThreadPoolExecutor() as pool,
    ):
        other.execute("SELECT FROM account, project FOR UPDATE")
        write = pool.submit(store.update_project, "ann", id, {"name": "x"})
        keyed = pool.submit(store.create_project, "ann", {}, "key")  # a transaction
        wait_for(lambda: len(backends(database, WAITS)) == 2)
        os.kill(backends(database, WAITS).pop(), signal.SIGKILL)  # the server ends both
        with fails(OutcomeUnknown):
            write.result(LIMIT)
        with fails(Unavailable):
            keyed.result(LIMIT)
    # The server restarts by itself.
    project = retry_while_unavailable(store.get_project, "ann", id)
    assert json.loads(project.document)["name"] in (None, "x")


def test_stopped_server_holds_nobody_up(database, pgserver, open_store):
    reader, writer, newcomer = (open_store() for _ in range(3))
    id = reader.create_project("ann", {}).id
    writer.get_project("ann", id)

    def refuse(at_least, error, work, *arguments):
        with lasts(at_least), fails(error):
            work(*arguments)

    works = [
        (4, Unavailable, reader.get_project, "ann", id),
        (4, OutcomeUnknown, writer.update_project, "ann", id, {}),
        (1, Unavailable, newcomer.list_projects, "ann"),
    ]
    with ThreadPoolExecutor() as pool, silence(pgserver, database):
        for each in [pool.submit(refuse, *work) for work in works]:
            each.result(LIMIT)
    with lasts(0, 5):  # which is what a client waits who obeys Retry-After
        for store in reader, writer, newcomer:
            assert retry_while_unavailable(store.get_project, "ann", id).id == id


FIRST_USE = """
import sys
from engines.postgres import PostgreSQL
from store import Store
Store(PostgreSQL(sys.argv[1])).find_caller(b"")
"""


@pytest.mark.parametrize("table", ["pg_extension", "token"])
def test_first_use_of_a_server_that_falls_silent_is_given_up(
    database, pgserver, store, tmp_path, table
):
    """Before a migration, or after it, which may take longer than a request."""
    folder = copy_later_release(tmp_path / "later")
    command = [sys.executable, "-c", FIRST_USE, database]
    with psycopg.connect(database) as other, ThreadPoolExecutor() as pool:
        other.execute(f"LOCK TABLE {table}")
        with lasts(4, 10):  # a process has to start as well
            first_use = pool.submit(run, *command, folder=folder, status=1)
            waiting(database)
            with silence(pgserver, database):
                assert "Unavailable: no response" in first_use.result(LIMIT).stderr


def test_connection_may_be_used_long_after_it_was_opened(database, store):
    id = store.create_project("ann", {}).id
    time.sleep(REQUEST_TIMEOUT)
    store.update_project("ann", id, {})
    store.create_project("ann", {}, "key")
    assert len(backends(database)) == 1


def test_slow_statement_is_ended_by_the_server_so_that_its_outcome_is_known(store):
    """Also over the connection of a command, which may take longer."""
    store.delete_account("ann")
    with lasts(4), fails(Unavailable, "statement timeout"):
        fetch(store, "SELECT pg_sleep(10)")
    assert store.list_tokens() == []  # nobody is refused for it


def test_long_response_that_still_arrives_is_no_silent_server(store):
    store.list_tokens()
    rows = """SELECT repeat('x', 10000), pg_sleep(0.01)
        FROM generate_series(1, 1000)"""
    with (
        lasts(4),
        fails(Unavailable, "the response is too long"),
        store.engine.reader() as connection,
    ):
        connection.fetch("SET statement_timeout = '20s'", {})
        store.list_tokens()
        [idle] = store.engine.idle[os.getpid()]
        connection.fetch(rows, {})
    assert store.list_tokens() == []  # nobody is refused for it
    assert store.engine.idle[os.getpid()] == [idle]


OPTIONS = {
    # Or a firewall would forget idle connections, and a request would meet silence.
    "keepalives_idle": ("60", "7"),
    "keepalives_interval": ("10", "3"),
    "target_session_attrs": ("read-write", "primary"),
    "connect_timeout": ("2", "9"),
    "client_encoding": ("UTF8", "UTF8"),  # is the service's own
}


@pytest.mark.parametrize("name", OPTIONS)
def test_parameter_of_the_url_overrides_the_default(database, name):
    default, other = OPTIONS[name]
    given = {"client_encoding": "latin1"}.get(name, other)
    for query, expected in [("", default), (f"?{name}={given}", other)]:
        with closing_store(database + query) as store:
            store.engine.open_database(creates=True)
            with store.engine.reader() as connection:
                assert connection.info.get_parameters()[name] == expected


@contextmanager
def tables_locked(database):
    """By another program, for longer than a request waits."""
    with psycopg.connect(database) as other:
        other.execute("LOCK TABLE account, project, token")
        yield
        time.sleep(REQUEST_TIMEOUT)


def test_command_may_take_longer_than_a_request(database, store, tmp_path):
    for account in ("ann", "bob"):
        store.create_project(account, {})
    accounts, file = store.list_accounts(), str(tmp_path / "backup.db")
    for command in (
        store.list_accounts,
        store.list_tokens,
        lambda: store.find_account("ann"),
        lambda: backup(store.engine, file),
        lambda: [store.delete_account(account.name) for account in accounts],
        lambda: restore(store.engine, file),
    ):
        result_after_unlock(tables_locked(database), database, command)
    assert store.list_accounts() == accounts


def test_migration_may_take_longer_than_a_request(database, store, tmp_path):
    command = [BIN / "flask", "init-db"]
    folder = copy_later_release(tmp_path / "later")
    environment = environment_of(database)
    result_after_unlock(
        tables_locked(database),
        database,
        lambda: run(*command, folder=folder, environment=environment),
    )


def late(database, statements, work, *arguments):
    """What the work returns or raises that these statements have come before."""
    with psycopg.connect(database) as other, ThreadPoolExecutor() as pool:
        other.execute(statements)
        future = pool.submit(work, *arguments)
        waiting(database)
        other.commit()
        return future.result(LIMIT)


def test_change_that_comes_late_finds_what_is_there_by_then(database, store):
    id = store.create_project("ann", {}).id
    for change in (
        lambda same: store.update_project("ann", id, {}, same),
        lambda same: store.delete_project("ann", id, same),
    ):
        same = Precondition([store.get_project("ann", id).etag])
        with pytest.raises(Stale):
            late(database, "UPDATE project SET version = version + 1", change, same)
    for change in store.update_project, store.delete_project:
        # Nobody named an ETag, so it cannot be stale.
        arguments = ["ann", id, {}] if change == store.update_project else ["ann", id]
        late(database, "UPDATE project SET version = version + 1", change, *arguments)
    id = store.create_project("ann", {}).id
    with pytest.raises(NotFound):
        late(database, "DELETE FROM project", store.update_project, "ann", id, {})


@pytest.mark.parametrize("others", [0, 1])
def test_deletion_of_an_account_takes_along_what_is_being_made(database, store, others):
    """Also if that is the first Project of an account that only had tokens."""
    store.add_token("ann", b"digest")
    for _ in range(others):
        store.create_project("ann", {})
    with psycopg.connect(database) as other, ThreadPoolExecutor() as pool:
        other.execute("""INSERT INTO account VALUES ('ann', 2, 2)
            ON CONFLICT (name) DO UPDATE SET last_seq = 2;
            INSERT INTO project (id, account, seq, created_at, updated_at)
            VALUES ('new', 'ann', 2, 0, 0)""")
        deletion = pool.submit(store.delete_account, "ann")
        waiting(database)
        other.commit()
        deletion.result(LIMIT)
    assert store.list_accounts() == []
    assert execute(database, "SELECT id FROM project") == []


def test_only_one_of_two_restores_fills_the_database(database, another_database, open_store):
    """Both have seen that it is empty, and wait for the tables."""
    source, file = open_store(another_database), f"{another_database}-backup"
    source.create_project("ann", {"name": "Park"})
    source.add_token("ann", b"1")
    backup(source.engine, file)
    store = open_store()
    engines = [store_on(database).engine for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        with psycopg.connect(database) as other:
            other.execute("LOCK TABLE account IN ROW EXCLUSIVE MODE")
            restores = [pool.submit(restore, engine, file) for engine in engines]
            wait_for(lambda: len(backends(database, WAITS)) == 2)
        errors = [each.exception(LIMIT) for each in restores]
    assert re.match("None the database is not empty;", " ".join(sorted(map(str, errors))))
    assert (len(store.list_accounts()), len(store.list_tokens())) == (1, 1)
    assert store.list_projects("ann") == source.list_projects("ann")
    for engine in engines:
        engine.close()


def test_ids_of_tokens_go_on_after_those_that_are_there(database, another_database, open_store):
    """Each node of a cluster has a range of its own, and logical replication copies no sequence."""
    source, file = open_store(another_database), f"{another_database}-backup"
    source.add_token("ann", b"1")
    with closing(plain_sql_on(another_database)) as plain_sql:
        plain_sql.execute(f"UPDATE token SET id = {2**48 + 7}")
    backup(source.engine, file)
    store = open_store()
    restore(store.engine, file)
    assert store.add_token("ann", b"2") == 2**48 + 8
    execute(database, f"ALTER SEQUENCE token_id_seq RESTART WITH {2**48 + 7}")
    assert store.add_token("ann", b"3") == 2**48 + 9


def test_token_issued_at_once_with_others_after_a_logical_replication_is_there_or_refused(
    database, store
):
    def issue(_):
        return store.add_token("ann", secrets.token_bytes())

    outcomes = []
    for _ in range(8):
        execute(database, "ALTER SEQUENCE token_id_seq RESTART")
        outcomes += at_once(issue, errors=Unavailable)
    ids = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert sorted(ids) == [token.id for token in store.list_tokens()]


def test_restore_into_a_database_in_use_holds_up_nobody(database, another_database, open_store):
    """It is refused before it waits for the lock, which another writer has."""
    file = f"{another_database}-backup"
    backup(open_store(another_database).engine, file)
    store = open_store()
    store.create_project("ann", {})
    with psycopg.connect(database) as other:
        other.execute("LOCK TABLE account IN ROW EXCLUSIVE MODE")
        with fails(Unavailable, "not empty"):
            restore(store.engine, file)


def test_table_of_an_extension_is_none_of_another_program(database, open_store):
    """As that of PostGIS."""
    execute(database, "CREATE TABLE spatial_ref_sys (srid int)")
    execute(database, "ALTER EXTENSION plpgsql ADD TABLE spatial_ref_sys")
    open_store().create_project("ann", {})
    with closing_store(database) as store:
        store.check()


HOSTS = {
    "db1/gardening": "db1/gardening",
    "u:Qz7wXk@db1:5433/gardening": "db1:5433/gardening",
    "u@db1:5433,db2:5434/gardening": "db1:5433,db2:5434/gardening",
    "u@db1,db2/gardening?port=6000": "db1:6000,db2:6000/gardening",
}


@pytest.mark.parametrize("url", HOSTS)
def test_name_has_hosts_and_ports_but_no_user(url):
    assert PostgreSQL(f"postgresql://{url}").name == f"postgresql://{HOSTS[url]}"


def test_page_skips_projects_in_an_index_without_their_texts(store):
    values = {"account": "ann", "size": 20, "after": 0, "offset": 9000}
    with store.engine.reader() as connection:
        # For a table that is empty, the server would take them.
        connection.execute("SET enable_seqscan = off; SET enable_bitmapscan = off")
        plan = str(connection.fetch(f"EXPLAIN {connection.LIST}", values))
    assert re.search(r"Index Only Scan using project_pkey[^>]*\(seq > '0'", plan)


RAISE = """
CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS
    $$BEGIN RAISE 'planned' USING ERRCODE = '{}'; END$$;
CREATE TRIGGER fail BEFORE UPDATE ON project FOR EACH ROW EXECUTE FUNCTION fail()
"""


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ("40003", OutcomeUnknown),  # statement_completion_unknown
        ("08006", OutcomeUnknown),  # connection_failure
        ("XX001", Unavailable),  # data_corrupted
        ("XX002", Unavailable),  # index_corrupted
        ("53100", Unavailable),  # disk_full
        ("42501", Unavailable),  # insufficient_privilege
        ("25006", Unavailable),  # read_only_sql_transaction
        ("40P01", Unavailable),  # deadlock_detected
        ("2200H", Unavailable),  # sequence_generator_limit_exceeded
        ("3F000", Unavailable),  # invalid_schema_name
        ("42P01", Unavailable),  # undefined_table
        ("42P07", Unavailable),  # duplicate_table
        ("54000", Unavailable),  # program_limit_exceeded
        ("58030", Unavailable),  # io_error
    ],
)
def test_state_of_an_error_decides_whether_it_is_an_outage(database, store, state, error):
    id = store.create_project("ann", {}).id
    execute(database, RAISE.format(state))
    with fails(error, "planned"):
        store.update_project("ann", id, {})
    execute(database, "DROP TRIGGER fail ON project")
    store.update_project("ann", id, {})


LOCKS = {  # and whether a POST, a PUT and a GET of ann are made, and a PUT of bob
    "account": ("SELECT FROM account WHERE name = 'ann' FOR UPDATE", [False, True, True, True]),
    "project": ("SELECT FROM project WHERE account = 'ann' FOR UPDATE", [True, False, True, True]),
    "table": ("LOCK TABLE project", [False, False, False, False]),
}


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_is_waited_for_by_each_and_not_for_long(database, store, lock):
    """A writer may wait twice: for the tuple, then for the row. An update locks no account."""
    statement, expected = LOCKS[lock]
    ann, bob = (store.create_project(account, {}).id for account in ("ann", "bob"))

    works = [
        lambda: store.create_project("ann", {}),
        lambda: store.update_project("ann", ann, {}),
        lambda: store.get_project("ann", ann),
        lambda: store.update_project("bob", bob, {}),
    ]

    def try_out(number):
        return works[number]()

    with psycopg.connect(database) as other:
        other.execute(statement)
        with lasts(1, 3):
            found = at_once(try_out, 4, Unavailable)
    refusals = [each for each in found if isinstance(each, Unavailable)]
    made = [each not in refusals for each in found]
    assert made == expected
    for each in refusals:
        assert type(each) is Unavailable and "lock timeout" in str(each)
    assert at_once(try_out, 4)[0]  # nobody is refused for what others met


def test_silent_host_is_passed_over(database, store):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1"
        with closing_store(database.replace("127.0.0.1", hosts)) as passing:
            with lasts(1.5, 2.9):
                at_once(lambda _: passing.list_tokens(), 2)
            with lasts(0, 1):  # over a connection that is open now
                assert passing.list_tokens() == []
            passing.engine.close()
            with lasts(0, 1):  # over a new one, since the silent host now comes last
                assert passing.list_tokens() == []


def test_host_keeps_its_address_and_port_wherever_it_is_tried():
    parameters = {"host": "a,b,c", "hostaddr": "1,2,3", "port": "5432", "user": "ann"}
    expected = {"host": "b,c,a", "hostaddr": "2,3,1", "port": "5432"}
    assert first_host_last(parameters) == expected


def test_statements_have_time_however_many_hosts_are_silent(database, store):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{silent.getsockname()[1]}," * 3 + "127.0.0.1"
        with closing_store(database.replace("127.0.0.1", hosts)) as passing:
            assert passing.list_tokens() == []


def test_silent_host_before_one_that_refuses_holds_up_a_single_caller():
    """psycopg reports the last host, which has been heard."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:1"
        store = Store(PostgreSQL(f"postgresql://ann@{hosts}/gardening"))
        refusal(store)
        assert refusal(store).reason == REFUSED_BY_BREAKER


def test_host_that_refuses_late_is_not_silent_if_the_url_gives_it_time():
    def refuse(listener):
        with listener.accept()[0]:
            time.sleep(2.2)  # longer than the default allows

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        listener.settimeout(9)
        refusing = [pool.submit(refuse, listener) for _ in range(2)]
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        store = Store(PostgreSQL(f"postgresql://ann@{address}/gardening?connect_timeout=9"))
        refusal(store)
        assert refusal(store).reason != REFUSED_BY_BREAKER
        for each in refusing:
            each.result(LIMIT)
