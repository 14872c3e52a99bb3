"""What happens to the service when PostgreSQL is killed, restarted, replaced or silent."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import pytest
from rigs.pgserver import (
    backends,
    execute,
    silence,
    start_pgserver,
)
from rigs.running import (
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
from rigs.stores import fails, lasts

from engines.base import OutcomeUnknown, Unavailable
from store import Page

HELLO = "/api/v1/hello-service"


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_restart_is_noticed_before_a_request_fails(fragile, mode):
    database = fragile.database_url("postgres")
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
            fragile.invoke("pg_ctl", "restart", "-m", mode)
            list(clients.map(work, range(8)))


def test_lost_connection_takes_the_idle_ones_along(fragile, create_store_on):
    """Else each of them would be tried for 5 s, and leave a write in doubt."""
    database = fragile.database_url("postgres")
    store = create_store_on(database)
    at_once(lambda _: store.create_project("ann", {}), 4)
    assert len(backends(database)) > 1
    with silence(fragile, database):
        with fails(OutcomeUnknown):
            store.create_project("ann", {})
        time.sleep(store.engine.PAUSE)
        with lasts(0, 4), fails(Unavailable):
            store.create_project("ann", {})


@pytest.mark.parametrize(("default", "key"), [("off", None), ("local", "key")])
def test_commit_without_its_standby_is_in_doubt(create_store_on, default, key):
    """Even where the server's default is not to wait for it."""
    with (
        ThreadPoolExecutor() as pool,
        start_pgserver(fsync="off", synchronous_commit=default) as primary,
    ):
        database = primary.database_url("postgres")
        store = create_store_on(database)
        with primary.standby() as standby:
            store.create_project("ann", {})
            standby.kill()
            with lasts(4), fails(OutcomeUnknown):
                write = pool.submit(store.create_project, "ann", {}, key)
                while not write.done():  # the server is not silent
                    store.list_tokens()
                    time.sleep(0.1)
                write.result(LIMIT)
            with (
                lasts(0, 1),
                fails(Unavailable, "another caller has just waited in vain"),
            ):
                store.create_project("bob", {})
        etag, document, *_ = store.list_projects("ann", Page(0, 1))
        assert json.loads(document)["total"] == 1
        primary.configure(synchronous_standby_names="")
        primary.invoke("pg_ctl", "reload")
        wait_for(lambda: store.list_projects("ann", Page(0, 1)).etag != etag)
        assert execute(database, "SELECT created FROM account") == [(2,)]


def test_silent_server_does_not_make_everybody_wait_in_turn(fragile):
    """60 clients of 2 processes with 2 threads each."""
    database, times = fragile.database_url("postgres"), []
    token = token_on(database)
    ended = threading.Event()

    def work(number):
        path = HELLO if number % 10 == 0 else PROJECTS
        while not ended.is_set():
            started = time.monotonic()
            with Client(port, token) as client:
                status, *_ = client.fetch("GET", path)
            times.append((started, time.monotonic() - started, status, path))
            ended.wait(0.5)

    options = [TWO_WORKERS, "--log-level=critical"]
    with (
        gunicorn(environment_of(database), *options) as (_, port),
        ThreadPoolExecutor(60) as clients,
    ):
        works = [clients.submit(work, number) for number in range(60)]
        try:
            wait_for(lambda: len(times) > 200)
            with silence(fragile, database):
                begin = time.monotonic()
                time.sleep(16)  # so that hundreds of requests come late
            back = time.monotonic()
            time.sleep(5)
        finally:
            ended.set()
        for each in works:
            each.result(LIMIT)
    silent = [each for each in times if begin < each[0] < back - 3]
    assert {status for *_, status, path in silent if path == HELLO} == {200}
    assert 503 in {status for *_, status, path in silent if path == PROJECTS}
    assert max(seconds for _, seconds, *_ in silent) < 7
    late = [seconds for start, seconds, *_ in silent if start > begin + 10]
    # Two try at a time. A stall of the whole machine makes many others as slow, once.
    assert len(late) > 100
    assert median(late) < 1
    assert {status for start, _, status, _ in times if start > back + 3} == {200}
