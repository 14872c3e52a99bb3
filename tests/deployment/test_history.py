"""What the clients of two services see, while everything around these two fails."""

import os
import random
import signal
import sqlite3
import time
from collections import Counter
from contextlib import ExitStack, closing, nullcontext

import pytest

from helpers.history import Call, check, record
from helpers.running import (
    TWO_WORKERS,
    Client,
    environment_of,
    gunicorn,
    token_on,
    wait_for,
    workers,
)
from helpers.stores import RESPONSE_TIME


def project(id, version):
    fields = {"name": f"{id}{version}", "postal_code": f"{id}1"}
    return {"id": id, "version": version, **fields}


P1, P2, P3, P4 = (project("p", version) for version in (1, 2, 3, 4))
Q1, Q2 = (project("q", version) for version in (1, 2))
FIRST = '"1-1"'
BEFORE = [
    Call("POST", "", 0, 1, 201, P1, name="p1", key="p1"),
    Call("POST", "", 0, 1, 201, Q1, name="q1"),
    Call("PUT", "/p", 2, 3, 200, P2, name="p2", condition=FIRST),
]
GOOD = [
    Call("PUT", "/p", 2, 3, 412, name="no", condition=FIRST),
    Call("GET", "", 2, 3, 200, [P1, Q1], '"a"'),
    Call("GET", "", 2, 3, 200, [P2, Q1], '"b"'),
    Call("GET", "", 2, 3, 304, condition='"a"'),
    Call("PUT", "/p", 4, name="p3"),
    Call("PUT", "/q", 4, name="q2"),
    Call("PUT", "/p", 4, 9, 200, P4, name="p4"),
    Call("GET", "/q", 4, 5, 200, Q2),
    Call("DELETE", "/p", 6, 8, 204),
    Call("GET", "", 6, 7, 200, [Q2], '"c"'),
    Call("POST", "", 7, 9, 201, P1 | {"id": "r"}, name="p1", key="p1"),
]
BAD = {
    "lost update": [
        Call("PUT", "/p", 2, 3, 200, P3, name="p3", condition=FIRST),
        "not what If-Match names",
    ],
    "gap": [Call("PUT", "/p", 4, 5, 200, P4, name="p4"), "a version is missing"],
    "two of one version": [
        Call("PUT", "/p", 2, 3, 200, P2 | {"name": "x"}, name="x"),
        "one version, two contents",
    ],
    "stale read": [Call("GET", "/p", 4, 5, 200, P1), "at no moment"],
    "effect of what was refused": [
        Call("PUT", "/p", 4, 5, 503, name="p3"),
        Call("GET", "/p", 6, 7, 200, P3),
        "refused",
    ],
    "return of the deleted": [
        Call("DELETE", "/p", 4, 5, 204),
        Call("GET", "/p", 6, 7, 200, P2),
        "at no moment",
    ],
    "two of one key": [
        Call("POST", "", 4, 5, 201, P1 | {"id": "r"}, name="p1", key="p1"),
        "one key, two Projects",
    ],
    "key that is free too early": [
        Call("POST", "", 4, 5, 201, P1 | {"id": "r"}, name="p1", key="p1"),
        Call("DELETE", "/p", 6, 7, 204),
        "one key, two Projects",
    ],
    "two of one POST": [
        Call("GET", "/r", 4, 5, 200, Q1 | {"id": "r"}),
        "one write, two versions",
    ],
    "two lists of one ETag": [
        Call("GET", "", 2, 3, 200, [P1, Q1], '"a"'),
        Call("GET", "", 2, 3, 200, [P2, Q1], '"a"'),
        "one ETag, two contents",
    ],
    "list of two moments": [
        Call("PUT", "/q", 4, 5, 200, Q2, name="q2"),
        Call("GET", "", 2, 6, 200, [P1, Q2], '"a"'),
        "at no moment",
    ],
}


def test_history_that_could_have_been_passes():
    check(BEFORE + GOOD)


@pytest.mark.parametrize("history", BAD.values(), ids=BAD)
def test_history_that_could_not_have_been_is_noticed(history):
    *calls, found = history
    with pytest.raises(AssertionError, match=found):
        check(BEFORE + calls)


@pytest.mark.parametrize("moved, is_right", [(3.9, False), (4, True), (5.2, False)])
def test_stale_read_passes_only_at_the_end_of_a_move(moved, is_right):
    *calls, found = BAD["stale read"]  # from 4 to 5
    with nullcontext() if is_right else pytest.raises(AssertionError, match=found):
        check(BEFORE + calls, [moved])


class Services:
    """Two gunicorns on one database, and what can happen to them."""

    def __init__(self, database):
        self.environment, self.running = environment_of(database), ExitStack()
        self.ports = []

    def __enter__(self):
        options = [TWO_WORKERS, "--log-level=critical"]
        started = [
            self.running.enter_context(gunicorn(self.environment, *options, *more))
            for more in ([], ["--preload"])
        ]
        self.processes, self.ports[:] = zip(*started, strict=True)
        for port in self.ports:
            with Client(port, "x") as client:  # which waits until it has started
                client.call("GET", "/api/v1/hello-service")
        return self

    def __exit__(self, *_):
        self.running.close()

    def start_again(self):
        """After all have been killed at once: none is left that has the database open."""
        for process in self.processes:
            os.killpg(process.pid, signal.SIGKILL)
        self.running.close()
        self.__enter__()

    def kill_a_worker(self):
        os.kill(self.worker(), signal.SIGKILL)

    def stop_a_worker(self):
        worker = self.worker()
        os.kill(worker, signal.SIGSTOP)
        time.sleep(1)
        os.kill(worker, signal.SIGCONT)

    def reload(self):
        os.kill(random.choice(self.processes).pid, signal.SIGHUP)

    def worker(self):
        service = random.choice(self.processes)
        return random.choice(wait_for(lambda: workers(service.pid)))

    def history(self, token, *faults):
        """What clients call while one of the faults happens after the other."""

        def cause():
            for fault in faults:
                fault()
                time.sleep(0.5)  # without a fault

        calls = record(self.ports, [token], cause)
        figures = Counter((call.method, call.status) for call in calls)
        assert figures["PUT", 200] and figures["GET", 200] and figures["POST", 201]
        assert all(process.poll() is None for process in self.processes)
        return calls


def test_history_on_sqlite(database):
    def lock():
        """As another program may do, for longer than a request waits."""
        with closing(sqlite3.connect(database, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            time.sleep(1.2)

    token = token_on(database)
    with Services(database) as two:
        faults = two.kill_a_worker, two.stop_a_worker, two.reload, two.start_again
        check(two.history(token, *faults, lock))
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


def test_history_on_postgresql(postgresql_to_break):
    """With a synchronous standby."""
    from deployment.servers.pgserver import BACKENDS

    def terminate():
        """While commits wait for the standby: they have been made, and nobody knows."""
        receiver = standby.execute("SELECT pid FROM pg_stat_wal_receiver")
        send(signal.SIGSTOP, receiver)
        time.sleep(0.2)
        postgresql_to_break.execute(f"SELECT pg_terminate_backend(pid) {BACKENDS}")
        send(signal.SIGCONT, receiver)

    def send(number, processes):
        for (pid,) in processes:
            os.kill(pid, number)

    def crash():
        postgresql_to_break.kill()
        postgresql_to_break.invoke("pg_ctl", "start")

    with postgresql_to_break.standby() as standby:
        standby.configure(wal_retrieve_retry_interval="50ms")  # after a crash; else 5 s
        standby.invoke("pg_ctl", "reload")
        database = postgresql_to_break.database_url("postgres")
        token = token_on(database)
        with Services(database) as two:
            faults = two.kill_a_worker, two.reload, terminate, crash
            calls = two.history(token, *faults)
        check(calls)
        # Each of a request's statements may wait, and the machine may be loaded.
        assert max(call.end - call.start for call in calls if call.status) < 3 * RESPONSE_TIME
