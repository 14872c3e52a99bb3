"""The service on a Citus cluster, and deploy/citus.sql, which spreads its tables."""

import json
import random
import re
import secrets
import time
from collections import Counter
from contextlib import ExitStack, closing, suppress
from urllib.parse import urljoin

import psycopg
import pytest

from app import create_app
from auth import digest
from deployment.servers.pgserver import BACKENDS, CITUS, execute, start_cluster
from engines.backup import backup, restore
from engines.errors import Unavailable
from helpers.history import check, record
from helpers.later_release import copy_later_release
from helpers.openapi import API, CheckedClient, find_operation
from helpers.running import (
    BIN,
    POINT,
    PROJECTS,
    ROOT,
    TWO_WORKERS,
    Client,
    closing_store,
    environment_of,
    gunicorn,
    retry_while_unavailable,
    run,
    token_on,
    wait_for,
)
from helpers.stores import RESPONSE_TIME, fails, lasts
from store import Page

if not CITUS:
    pytest.skip("Citus is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def cluster():
    with start_cluster() as cluster:
        yield cluster


def spread(url, status=0):
    """What deploy/citus.sql prints, errors included, on the database at this node."""
    command = [CITUS[0] / "psql", "--no-psqlrc", url, f"--file={ROOT}/deploy/citus.sql"]
    ended = run(*command, status=status)
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def nodes(cluster):
    """The URLs of a database whose tables are spread, at each node."""
    urls = cluster.create_database("gardening")
    with closing_store(urls[0]) as store:
        store.engine.open_database(creates=True)
    spread(urls[0])
    return urls


@pytest.fixture
def client_at():
    """A test client of the service on this database, with a token of the account."""
    with ExitStack() as stores:

        def client_at(url, account="ann"):
            app = create_app({"DATABASE": url})
            app.test_client_class = CheckedClient
            store = app.extensions["store"]
            stores.enter_context(closing(store.engine)).open_database(creates=True)
            token = secrets.token_hex()
            store.add_token(account, digest(token))
            client = app.test_client()
            client.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {token}"
            return client

        yield client_at


def address_in(response, header):
    """As a client resolves it (RFC 9110 10.2.2, RFC 8288)."""
    return urljoin(PROJECTS, re.sub("^<|>.*", "", response.headers[header]))


def call_all(client):
    """The response of each call of the API."""
    keyed = {"Idempotency-Key": secrets.token_hex()}
    created = client.post(PROJECTS, json={"name": "Park", "location": POINT})
    yield created
    project_url, etag = address_in(created, "Location"), created.headers["ETag"]
    yield client.post(PROJECTS, json={}, headers=keyed)
    yield (kept := client.post(PROJECTS, json={}, headers=keyed))
    yield client.post(PROJECTS, json={"name": "x"}, headers=keyed)
    yield client.get(project_url)
    yield client.get(project_url, headers={"If-None-Match": etag})
    yield client.put(project_url, json={"name": "Wood"}, headers={"If-Match": etag})
    yield client.put(project_url, json={"name": "late"}, headers={"If-Match": etag})
    yield client.put(f"{project_url}0", json={})
    whole = client.get(PROJECTS)
    yield whole
    known = {"If-None-Match": whole.headers["ETag"]}
    yield client.get(PROJECTS, headers=known)
    page = client.get(f"{PROJECTS}?size=1")
    yield page
    yield client.get(address_in(page, "Link"))
    yield client.delete(project_url)
    yield client.delete(project_url)
    yield client.get(PROJECTS, headers=known)
    yield client.delete(address_in(kept, "Location"))
    yield client.post(PROJECTS, json={}, headers=keyed)  # whose key is spent


def responses(client):
    """Status and text of each, without what differs from call to call."""
    varying = r"[0-9a-f]{24}|\b1\d{12}\b|after=\d+"
    return [
        (response.status_code, re.sub(varying, "…", response.text)) for response in call_all(client)
    ]


def counted(url):
    """How many statements this node has sent to several, and how often it has called one."""
    [row] = execute(
        url,
        """SELECT query_execution_multi_shard,
            connection_establishment_succeeded + connection_reused
        FROM citus_stat_counters WHERE name = current_database()""",
    )
    return row


def test_responses_are_alike_at_every_node_and_calls_go_to_one(nodes, database, client_at):
    """Often enough for psycopg, and then PostgreSQL, to prepare each statement."""
    client = client_at(database)
    called = [find_operation(each.request.method, each.request.path) for each in call_all(client)]
    for path, item in API["paths"].items():
        if path.startswith(PROJECTS):
            assert all(item[name] in called for name in item if name != "parameters"), path
    expected = responses(client)
    for url in nodes:
        client, other = client_at(url), client_at(url, "bob")
        before, _ = counted(url)
        for _ in range(12):
            assert responses(client) == expected
        several, called = counted(url)
        assert several == before
        for _ in range(50):
            other.post(PROJECTS, json={})
        # One call of a node each; Citus makes a few of its own meanwhile.
        assert counted(url)[1] < called + 75


def port_of(url, account):
    """The port of the node that has the account."""
    [(port,)] = execute(
        url,
        f"""SELECT nodeport FROM citus_shards
        WHERE table_name = 'account'::regclass AND shardid =
            get_shard_id_for_distribution_column('account', '{account}')""",
    )
    return port


def test_node_that_is_down_takes_only_its_accounts_along(cluster, nodes, client_at):
    lost = cluster.nodes[2]
    names = [f"account {number}" for number in range(20)]
    away = next(each for each in names if port_of(nodes[0], each) == lost.port)
    here = next(each for each in names if port_of(nodes[0], each) != lost.port)
    clients = [client_at(nodes[0], account) for account in (away, here)]
    before = [client.post(PROJECTS, json={}).json for client in clients]
    lost.kill()
    try:
        for _ in range(3):
            for method in ("GET", "POST"):
                with lasts(0, RESPONSE_TIME):
                    response = clients[0].open(PROJECTS, method=method, json={})
                assert response.status_code == 503
                assert response.json["type"] == "about:blank"  # nothing was changed
            assert clients[1].get(PROJECTS).json[0] == before[1]
            assert clients[1].post(PROJECTS, json={}).status_code == 201
        with closing_store(nodes[0]) as store, fails(Unavailable):
            store.add_token("ann", b"new")
        assert "Run this again when all nodes are up" in spread(nodes[0], status=3)
    finally:
        lost.invoke("pg_ctl", "start")
    with closing_store(nodes[0]) as store:
        retry_while_unavailable(store.add_token, "ann", b"new")
    assert clients[0].get(PROJECTS).json == [before[0]]


def test_session_that_a_node_has_lost_is_an_outage(nodes):
    with closing_store(nodes[0]) as store:
        store.add_token("ann", b"before")
        for url in nodes[1:]:
            execute(url, f"SELECT pg_terminate_backend(pid) {BACKENDS}")
        with fails(Unavailable, "connection marked as essential"):
            store.add_token("ann", b"lost")
        assert store.find_caller(b"lost") is None
        store.add_token("ann", b"after")


@pytest.fixture
def services(nodes):
    """The ports of two services, which ask the coordinator and a node that stays."""
    with ExitStack() as running:
        ports = []
        for url in nodes[:2]:
            options = [TWO_WORKERS, "--log-level=critical"]
            service = gunicorn(environment_of(url), *options)
            ports.append(running.enter_context(service)[1])
            with Client(ports[-1], "x") as client:  # which waits until it has started
                wait_for(lambda client=client: client.fetch("GET", "/health")[0] == 200)
        yield ports


def test_history_while_a_node_crashes_and_accounts_move(cluster, nodes, services):
    accounts = [f"history {number}" for number in range(4)]
    tokens = [token_on(nodes[0], account) for account in accounts]
    _, stays, crashes = (node.port for node in cluster.nodes)
    happened, moves = Counter(), []

    def crash():
        cluster.nodes[2].kill()
        time.sleep(0.5)
        cluster.nodes[2].invoke("pg_ctl", "start")

    def move():
        """To the other node, while it is in use."""
        account = random.choice(accounts)
        from_port = port_of(nodes[0], account)
        to_port = stays if from_port == crashes else crashes
        statement = f"""SELECT citus_move_shard_placement(
            get_shard_id_for_distribution_column('account', '{account}'),
            '127.0.0.1', {from_port}, '127.0.0.1', {to_port})"""
        try:
            execute(nodes[0], statement)
        finally:
            moves.append(time.monotonic())

    def end_sessions():
        execute(nodes[2], f"SELECT pg_terminate_backend(pid) {BACKENDS}")

    def fault():
        for each in (move, end_sessions, crash):
            with suppress(psycopg.Error):  # a node that has just crashed
                each()
                happened[each.__name__] += 1
            time.sleep(0.5)

    calls = record(services, tokens, fault, seconds=15)
    check(calls, moves)
    figures = Counter((call.method, call.status) for call in calls)
    assert figures["PUT", 200] and figures["GET", 200] and figures["GET", 503]
    assert happened["move"] and happened["crash"] and happened["end_sessions"]


def issue_everywhere(urls):
    """The ids of tokens that were issued through each node."""
    ids = []
    for url in urls:
        with closing_store(url) as store:
            ids.append(store.add_token("bob é", secrets.token_bytes()))
    return ids


def test_filled_database_is_spread_and_moves_to_either_engine(cluster, tmp_path):
    urls = cluster.create_database("older")
    file, found = str(tmp_path / "backup.db"), []
    with closing_store(urls[0]) as store:
        store.engine.open_database(creates=True)
        for account, key in [("ann", "key"), ("ann", None), ("bob é", None)]:
            store.create_project(account, {"name": "Grüße 😀"}, key)
        spread(urls[0])
        issue_everywhere(urls[:2])
        store.add_token("ann", b"expired", days=0)
        store.revoke_expired_tokens()
        backup(store.engine, file)
    new = cluster.create_database("new")
    with closing_store(new[0]) as store:
        store.engine.open_database(creates=True)
    spread(new[0])
    for target in (str(tmp_path / "gardening.db"), new[2]):
        with closing_store(target) as store:
            restore(store.engine, file)
    issue_everywhere(new[2:])  # the node that the restore went through
    with closing_store(new[0]) as store:
        store.revoke_token(max(token.id for token in store.list_tokens()))
    for url in (urls[1], str(tmp_path / "gardening.db"), new[0], new[1]):
        with closing_store(url) as store:
            documents = [store.list_projects(each).document for each in ("ann", "bob é")]
            lists = [json.loads(document) for document in documents]
            found.append((lists, store.list_accounts(), store.list_tokens()))
            made = store.create_project("ann", {})
            assert store.list_projects("ann", Page(0, 1, 2)).document.count(b"id") == 1
            store.delete_project("ann", made.id)
    assert found[0][1][0][:3] == ("ann", 2, 0)
    assert found[1:] == found[:1] * 3
    ids = [token.id for token in found[0][2]]
    for _ in range(2):
        spread(new[0])
        issued = issue_everywhere(new)
        assert not set(ids) & set(issued)
        ids += issued
        # The highest of each node, which no other token must get.
        with closing_store(new[0]) as store:
            assert all(store.revoke_token(id) for id in issued)


def test_node_that_is_added_issues_tokens_before_accounts_move_to_it(cluster):
    urls = cluster.create_database("growing", nodes=2)
    with closing_store(urls[0]) as store:
        store.engine.open_database(creates=True)
    spread(urls[0])
    urls.append(cluster.add_to("growing", 2))
    spread(urls[0])
    ids = issue_everywhere(urls) + issue_everywhere(urls)
    assert len({*ids}) == 6 and len({id >> 48 for id in ids}) == 3


def test_tables_are_spread_once_and_only_on_a_cluster(cluster, nodes):
    alone = cluster.nodes[0].create_database()
    assert "There are no tables here" in spread(alone, status=3)
    with closing_store(alone) as store:
        store.engine.open_database(creates=True)
    assert "This database is not on a cluster" in spread(alone, status=3)
    shards = "SELECT * FROM citus_shards ORDER BY shardid"
    before = execute(nodes[0], shards)
    execute(nodes[1], "COMMENT ON TABLE project IS NULL")
    spread(nodes[0])
    assert execute(nodes[0], shards) == before
    with closing_store(nodes[1]) as store:
        store.check()


def test_next_schema_version_goes_through_the_coordinator(cluster, tmp_path):
    urls = cluster.create_database("next")
    with closing_store(urls[0]) as store:
        store.engine.open_database(creates=True)
        spread(urls[0])
        id = store.create_project("ann", {}).id
    folder = copy_later_release(tmp_path / "later")
    for number, status in [(1, 1), (0, 0), (1, 0), (2, 0)]:
        command = [BIN / "flask", "account", "list"]
        environment = environment_of(urls[number])
        ended = run(*command, folder=folder, environment=environment, status=status)
        reason = "Error: connect to the coordinator to change the tables; "
        assert ended.stderr.startswith(reason) if status else not ended.stderr
    row = f"INSERT INTO plot (id, account, project) VALUES ('z', 'ann', '{id}')"
    execute(urls[1], row)
    shards = "SELECT count(DISTINCT nodeport) FROM citus_shards WHERE table_name = 'plot'::regclass"
    assert execute(urls[0], shards) > [(1,)]
    execute(urls[0], "DELETE FROM project WHERE account = 'ann'")
    assert execute(urls[2], "SELECT * FROM plot") == []
    with closing_store(urls[1]) as store, fails(Unavailable, "newer release"):
        store.check()
