"""What happens to the service when PostgreSQL is killed, restarted, replaced or silent."""

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import NamedTuple

import psycopg
import pytest
import requests

from deployment.servers.patroni import Node, all_is_well, database_url, start_nodes
from deployment.servers.pgserver import backends, execute, silence, start_pgserver
from engines.errors import OutcomeUnknown, Unavailable
from helpers.history import check, record
from helpers.openapi import HELLO
from helpers.running import (
    LIMIT,
    PROJECTS,
    TWO_WORKERS,
    Client,
    at_once,
    environment_of,
    gunicorn,
    token_on,
    wait_for,
)
from helpers.stores import REFUSED_BY_BREAKER, fails, fetch, lasts, refusal
from store import Page


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_restart_is_noticed_before_a_request_fails(postgresql_to_break, mode):
    database = postgresql_to_break.database_url("postgres")
    token = token_on(database)
    # A worker that starts meanwhile would give up, and gunicorn with it.
    with gunicorn(environment_of(database), TWO_WORKERS, "--preload") as (_, port):

        def work(number):
            with Client(port, token) as client:
                for _ in range(10):
                    method = ["POST", "GET"][number % 2]
                    assert client.call(method, PROJECTS, {})[0] in (200, 201)

        with ThreadPoolExecutor(8) as clients:
            list(clients.map(work, range(8)))
            assert backends(database)
            postgresql_to_break.invoke("pg_ctl", "restart", "-m", mode)
            list(clients.map(work, range(8)))


def test_lost_connection_takes_the_idle_ones_along(postgresql_to_break, open_store):
    """Else each of them would be tried for 5 s, and leave a write in doubt."""
    database = postgresql_to_break.database_url("postgres")
    store = open_store(database)
    at_once(lambda _: fetch(store, "SELECT pg_sleep(0.5)"), 4)
    assert len(backends(database)) > 1
    with silence(postgresql_to_break, database):
        with fails(OutcomeUnknown):
            store.create_project("ann", {})
        with lasts(0, 4):
            wait_for(lambda: refusal(store).reason != REFUSED_BY_BREAKER)


@pytest.mark.parametrize(("default", "key"), [("off", None), ("local", "key")])
def test_commit_without_its_standby_is_in_doubt(open_store, default, key):
    """Even where the server's default is not to wait for it."""
    with (
        ThreadPoolExecutor() as pool,
        start_pgserver(fsync="off", synchronous_commit=default) as primary,
    ):
        database = primary.database_url("postgres")
        store = open_store(database)
        with primary.standby() as standby:
            store.create_project("ann", {})
            standby.kill()
            with lasts(4), fails(OutcomeUnknown):
                write = pool.submit(store.create_project, "ann", {}, key)
                while not write.done():  # the server is not silent
                    store.list_tokens()
                    time.sleep(0.1)
                write.result(LIMIT)
            with lasts(0, 1), fails(Unavailable, REFUSED_BY_BREAKER):
                store.create_project("bob", {})
        etag, document, *_ = store.list_projects("ann", Page(0, 1))
        assert json.loads(document)["total"] == 1
        primary.configure(synchronous_standby_names="")
        primary.invoke("pg_ctl", "reload")
        wait_for(lambda: store.list_projects("ann", Page(0, 1)).etag != etag)
        assert execute(database, "SELECT last_seq FROM account") == [(2,)]


class TimedResponse(NamedTuple):
    start: float  # of the call, on the clock of time.monotonic()
    seconds: float
    status: int
    path: str


def test_silent_server_does_not_make_everybody_wait_in_turn(postgresql_to_break):
    """60 clients of 2 processes with 4 threads each."""
    database = postgresql_to_break.database_url("postgres")
    token = token_on(database)
    responses, ended = [], threading.Event()

    def work(number):
        path = HELLO if number % 10 == 0 else PROJECTS
        while not ended.is_set():
            start = time.monotonic()
            with Client(port, token) as client:
                status, *_ = client.fetch("GET", path)
            responses.append(TimedResponse(start, time.monotonic() - start, status, path))
            ended.wait(0.5)

    def called_after(moment):
        return [response for response in responses if response.start > moment]

    options = [TWO_WORKERS, "--log-level=critical"]
    with (
        gunicorn(environment_of(database), *options) as (_, port),
        ThreadPoolExecutor(60) as clients,
    ):
        works = [clients.submit(work, number) for number in range(60)]
        try:
            wait_for(lambda: len(responses) > 200)
            with silence(postgresql_to_break, database):
                begin = time.monotonic()
                wait_for(lambda: len(called_after(begin + 6)) > 300)
                silent, late = called_after(begin), called_after(begin + 6)
            back = time.monotonic()
            wait_for(lambda: len(called_after(back + 3)) > 100)
        finally:
            ended.set()
        for each in works:
            each.result(LIMIT)
    assert {response.status for response in silent if response.path == HELLO} == {200}
    assert 503 in {response.status for response in silent if response.path == PROJECTS}
    assert max(response.seconds for response in silent) < 7
    # Two try at a time. A stall of the whole machine makes many others as slow, once.
    assert median(response.seconds for response in late) < 1
    assert {response.status for response in called_after(back + 3)} == {200}


@pytest.fixture(scope="module")
def nodes():
    if not shutil.which("etcd"):
        pytest.skip("needs etcd, from Debian's package etcd-server")
    with start_nodes() as nodes:
        yield nodes


def test_no_other_user_of_this_machine_gets_into_the_servers(nodes, pgserver):
    """Who would be root, since a superuser of PostgreSQL can run programs."""
    wait_for(lambda: all_is_well(nodes))
    for url in (database_url(nodes, "postgres"), pgserver.database_url("postgres")):
        with pytest.raises(psycopg.OperationalError, match="no password supplied"):
            execute(f"{url}?passfile=/dev/null", "SELECT")
    for port in (nodes[0].etcd, nodes[0].api):
        with pytest.raises(requests.ConnectionError):
            requests.get(f"https://127.0.0.1:{port}/", verify=nodes[0].certificate.path)


@pytest.mark.parametrize("fault", [Node.killed, Node.silent, Node.switched_over])
def test_failover_loses_no_acknowledged_write(nodes, fault):
    wait_for(lambda: all_is_well(nodes))
    database = database_url(nodes, "postgres")
    token, other_token = (token_on(database, f"{fault.__name__} {n}") for n in range(2))
    moments = []

    def writes_are_acknowledged():
        with Client(port, other_token) as client:
            return client.call("POST", PROJECTS, {})[0] == 201

    def fail_over():
        time.sleep(1)  # without a fault
        [primary] = [node for node in nodes if node.has_role("primary")]
        others = [node for node in nodes if node is not primary]
        with fault(primary):
            wait_for(lambda: any(node.has_role("primary") for node in others))
            wait_for(writes_are_acknowledged)
            time.sleep(1)
            moments.append(time.monotonic())
        wait_for(lambda: all_is_well(nodes))
        moments.append(time.monotonic())
        time.sleep(1)

    with gunicorn(environment_of(database), "--log-level=critical") as (_, port):
        wait_for(writes_are_acknowledged)
        calls = record([port], [token], fail_over, seconds=0)
    back, well = moments

    def is_checked(call):
        """Not what a primary reads that was silent, until Patroni stops it."""
        may_be_stale = fault is Node.silent and call.start < well and call.end > back
        return not may_be_stale or call.status in (None, 503) or is_acknowledged_write(call)

    assert any(map(is_acknowledged_write, calls))
    check(list(filter(is_checked, calls)))


def is_acknowledged_write(call):
    return (call.method, call.status) in [("POST", 201), ("PUT", 200), ("DELETE", 204)]
