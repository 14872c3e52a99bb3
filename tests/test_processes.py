"""The service as it is run: real servers, real processes, a real disk, and their faults."""

import http.client
import json
import os
import random
import signal
import socket
import sqlite3
import sys
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path

import pytest
from rigs.outside import copy_service
from rigs.running import (
    BIN,
    LIMIT,
    NEEDS_ROOT,
    PROJECTS,
    TWO_WORKERS,
    Client,
    at_once,
    fill,
    flask,
    flask_run,
    gunicorn,
    run,
    token_on,
    wait_for,
    workers,
)

PRELOAD = pytest.mark.parametrize("options", [[], ["--preload"]], ids=["", "preload"])
BROKEN = (OSError, http.client.HTTPException)


@pytest.fixture
def check_integrity(path):
    """Checks that the database is not damaged, after the test too."""

    def check_integrity():
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []

    yield check_integrity
    check_integrity()


@PRELOAD
def test_processes_that_start_on_a_missing_file_lose_no_update(
    environment, path, check_integrity, options
):
    with gunicorn(environment, "--workers=6", *options) as (process, port):
        with Client(port, "x") as client:
            assert client.call("GET", PROJECTS)[0] == 401
        token = token_on(path)
        with Client(port, token) as client:
            project_url = f"{PROJECTS}/{client.call('POST', PROJECTS, {})[1]['id']}"

            def write(_):
                with Client(port, token) as writer:
                    change = ("PUT", project_url, {"name": "x"})
                    made = [writer.call(*change)[1] for _ in range(10)]
                return [project["version"] for project in made]

            assert sorted(chain(*at_once(write))) == list(range(2, 82))
            assert client.call("GET", project_url)[1]["version"] == 81
        assert process.poll() is None


class Writer:
    """Changes a Project of its own, and knows what must be there and what may."""

    def __init__(self, client):
        self.acknowledged = client.call("POST", PROJECTS, {"name": "0"})[1]
        self.attempted = None

    @property
    def project_url(self):
        return f"{PROJECTS}/{self.acknowledged['id']}"

    def write(self, client):
        version = self.acknowledged["version"] + 1
        self.attempted = {"name": str(version), "postal_code": str(version)}
        status, project = client.call("PUT", self.project_url, self.attempted)
        if status == 200:
            self.acknowledged, self.attempted = project, None

    def check(self, client):
        """The Project is as acknowledged, or has the one write whose answer got lost."""
        found = client.call("GET", self.project_url)[1]
        if found != self.acknowledged:
            assert found["version"] == self.acknowledged["version"] + 1
            assert found == found | self.attempted
        self.acknowledged, self.attempted = found, None


def test_nothing_acknowledged_is_lost_by_kills_at_any_moment(
    environment, token, check_integrity
):
    writers, moments = [], random.Random(1)
    for _ in range(6):
        with gunicorn(environment, TWO_WORKERS) as (process, port):
            with Client(port, token) as client:
                for writer in writers:
                    writer.check(client)
                writers = writers or [Writer(client) for _ in range(8)]
            left = [moments.randrange(1, 300)]

            def work(number, process=process, port=port, left=left, writers=writers):
                with Client(port, token) as client, suppress(*BROKEN):
                    while True:
                        writers[number].write(client)
                        client.call("GET", PROJECTS)
                        left[0] -= 1
                        if left[0] <= 0:
                            os.killpg(process.pid, signal.SIGKILL)

            at_once(work)
        check_integrity()
    assert sum(writer.acknowledged["version"] for writer in writers) > 100


def test_killed_worker_leaves_the_others_going(environment, token, check_integrity):
    with gunicorn(environment, TWO_WORKERS) as (process, port):
        with Client(port, token) as client:
            writers = [Writer(client) for _ in range(8)]

        def work(number):
            rounds = 0
            while rounds < 60:
                with Client(port, token) as client, suppress(*BROKEN):
                    writers[number].check(client)
                    while rounds < 60:
                        writers[number].write(client)
                        rounds += 1
                        if (number, rounds) == (0, 30):
                            os.kill(workers(process.pid)[0], signal.SIGKILL)

        at_once(work)
        with Client(port, token) as client:
            for writer in writers:
                writer.check(client)
                assert writer.acknowledged["version"] >= 61
        assert process.poll() is None


@NEEDS_ROOT
def test_full_disk_stops_writes_until_there_is_room(environment, mount, tmp_path):
    disk = tmp_path / "disk"
    mount(disk, "1m")
    environment |= {"FLASK_DATABASE": str(disk / "gardening.db")}
    token = token_on(environment["FLASK_DATABASE"])
    with gunicorn(environment) as (_, port), Client(port, token) as client:
        writer = Writer(client)
        fill(disk)
        body, acknowledged = {"name": "x" * 1000}, 1
        for _ in range(1000):  # what SQLite has reserved is to be full as well
            status, headers, _ = client.ask("POST", PROJECTS, body)
            if status != 201:
                break
            acknowledged += 1
        assert (status, headers["Retry-After"]) == (503, "5")
        assert len(client.call("GET", PROJECTS)[1]) == acknowledged
        (disk / "filler").unlink()
        assert client.call("POST", PROJECTS, body)[0] == 201
        writer.write(client)
        assert writer.acknowledged["version"] == 2
    with closing(sqlite3.connect(environment["FLASK_DATABASE"])) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_token_revoked_by_command_is_invalid_in_every_worker(environment, token):
    with gunicorn(environment, TWO_WORKERS) as (_, port):

        def statuses():
            clients = [Client(port, token) for _ in range(20)]
            found = {client.call("GET", PROJECTS)[0] for client in clients}
            for client in clients:
                client.close()
            return found

        assert statuses() == {200}
        flask("token", "revoke", "1", environment=environment)
        assert statuses() == {401}


def test_accepted_request_is_answered_after_term(environment, token):
    with gunicorn(environment) as (process, port):
        body = json.dumps({"name": "Park"}).encode()
        head = f"POST {PROJECTS} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
        head += f"Authorization: Bearer {token}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port), LIMIT) as connection:
            connection.sendall(head.encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 100")
            process.terminate()
            connection.sendall(body)
            assert connection.recv(1000).startswith(b"HTTP/1.1 201")
        assert process.wait(LIMIT) == 0


@pytest.mark.parametrize(
    "command",
    [["flask", "run", "--port=0"], ["flask", "token", "list"], ["gunicorn"]],
    ids=lambda command: "-".join(command[:2]),
)
def test_unusable_database_is_refused_at_start(environment, path, command):
    Path(path).write_text("This is no database." * 100)
    program, *arguments = command
    refused = run(BIN / program, *arguments, environment=environment, status=1)
    assert refused.stderr.count(f"Error: file is not a database: {path}\n") == 1
    assert "Traceback" not in refused.stderr
    assert Path(path).read_text() == "This is no database." * 100


def test_newcomer_is_told_the_next_step(tmp_path):
    copy_service(tmp_path)
    with flask_run(None, folder=tmp_path) as (_, printed):
        assert printed[0].startswith("No access token yet.")
        command = printed[1].split()
    assert command[1:] == ["-m", "flask", "token", "create", "ACCOUNT"]
    assert (tmp_path / "instance/gardening.db").exists()

    run(*command, folder=tmp_path)
    with flask_run(None, folder=tmp_path) as (_, printed):
        assert not any("No access token" in line for line in printed)


SECOND_USE = """
import os, signal, subprocess, sys
from engines.sqlite import SQLite
from store import Store
path = sys.argv[1]
first = Store(SQLite(path))
first.create()
first.create_project("ann", {})
second = Store(SQLite(path))
second.check()
other = "import sys; from engines.sqlite import *; from store import *; Store(SQLite(sys.argv[1])).list_tokens()"
subprocess.run([sys.executable, "-c", other, path], check=True, timeout=60)
for _ in range(20):
    first.create_project("ann", {})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_second_use_in_a_process_loses_no_acknowledged_write(path, check_integrity):
    """A file that a process closes itself loses the locks that SQLite has on it."""
    run(sys.executable, "-c", SECOND_USE, path, status=-signal.SIGKILL)
    with closing(sqlite3.connect(path)) as connection:
        count = "SELECT count(*) FROM project"
        assert connection.execute(count).fetchall() == [(21,)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=["kill", "HUP"])
def test_worker_that_starts_without_the_file_says_so_and_creates_none(
    environment, token, path, number
):
    with gunicorn(environment) as (process, port):

        def status():
            with Client(port, token) as client, suppress(*BROKEN):
                return client.call("GET", PROJECTS)[0]

        assert status() == 200
        [worker] = workers(process.pid)
        away = f"{path}-away"
        for suffix in ("", "-wal"):  # beside which no file would be created
            os.rename(path + suffix, away + suffix)
        os.kill(worker if number == signal.SIGKILL else process.pid, number)
        wait_for(lambda: workers(process.pid) not in ([], [worker]))
        wait_for(lambda: status() == 503)
        assert not os.path.exists(path)
        for suffix in ("", "-wal"):
            os.rename(away + suffix, path + suffix)
        wait_for(lambda: status() == 200)
        assert process.poll() is None


@pytest.mark.parametrize("is_met", [False, True], ids=["idle", "asked"])
def test_service_that_is_stopped_leaves_nothing_beside_a_replaced_file(
    environment, token, path, tmp_path, is_met
):
    backup = tmp_path / "backup.db"
    with gunicorn(environment, TWO_WORKERS) as (process, port):
        with Client(port, token) as client:
            client.call("POST", PROJECTS, {"name": "in the backup"})
            flask("backup", str(backup), environment=environment)
            for _ in range(20):
                client.call("POST", PROJECTS, {"name": "after the backup"})
        os.rename(backup, path)
        if is_met:
            with Client(port, token) as client:
                assert client.call("POST", PROJECTS, {})[0] == 503
        process.terminate()
        assert process.wait(LIMIT) == 0
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        names = connection.execute("SELECT name FROM project").fetchall()
        assert names == [("in the backup",)]


def test_worker_takes_no_file_that_has_replaced_the_one_it_started_with(
    environment, token, path
):
    """Nobody has called it before."""
    with gunicorn(environment) as (_, port):
        with Client(port, token) as client:
            client.call("GET", "/api/v1/hello-service")  # it has started
        with closing(sqlite3.connect(path)) as copied:
            copied.execute("VACUUM INTO ?", [f"{path}-copy"])
        os.rename(f"{path}-copy", path)
        with Client(port, token) as client:
            assert client.call("POST", PROJECTS, {})[0] == 503


def test_reload_serves_the_code_of_the_next_release(environment, tmp_path):
    """The master, which outlives the reload, has imported nothing of the last one."""
    copy_service(tmp_path)
    with gunicorn(environment, f"--chdir={tmp_path}") as (process, port):

        def greeting():
            with Client(port, "x") as client:
                return client.call("GET", "/api/v1/hello-service")[1]["greetings"]

        assert greeting() == "Hello from the Gardening Project Service!"
        for file, old, new in [
            ("app.py", "Hello from", "{commands.NEXT} from"),
            ("commands.py", "MAX_DAYS =", "NEXT = 'Welcome'\nMAX_DAYS ="),
        ]:
            text = (tmp_path / file).read_text()
            assert old in text
            (tmp_path / file).write_text(text.replace(old, new))
        os.kill(process.pid, signal.SIGHUP)
        wait_for(lambda: greeting().startswith("Welcome from "))
