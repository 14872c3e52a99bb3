"""The service as it is run: a real server, real processes, a real disk."""

import http.client
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from conftest import PROJECTS

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
WRITERS = 8


@pytest.fixture
def environment(path):
    return os.environ | {"FLASK_DATABASE": path}


@pytest.fixture
def token(environment):
    command = [BIN / "flask", "token", "create", "ann"]
    return subprocess.check_output(
        command, cwd=ROOT, env=environment, text=True
    ).strip()


@contextmanager
def gunicorn(environment, *options):
    """A running gunicorn, as its process and its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [BIN / "gunicorn", "app:create_app()", "--no-control-socket"]
        command += ["--bind", f"fd://{listener.fileno()}", "--worker-class", "gthread"]
        process = subprocess.Popen(
            [*command, "--workers=2", "--threads=4", "--log-level=warning", *options],
            cwd=ROOT,
            env=environment,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        port = listener.getsockname()[1]
    try:
        yield process, port
    finally:
        process.terminate()
        process.wait()


def call(port, token, method, path, body=None, connection=None):
    """Status and JSON of a call, on a connection of its own if none is given."""
    own = connection or http.client.HTTPConnection("127.0.0.1", port)
    headers = {"Authorization": f"Bearer {token}"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    own.request(method, path, None if body is None else json.dumps(body), headers)
    response = own.getresponse()
    content = response.read()
    if not connection:
        own.close()
    return response.status, json.loads(content) if content else None


def at_once(work, count=WRITERS):
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("options", [[], ["--preload"]], ids=["", "preload"])
def test_workers_start_at_once_on_a_missing_file(environment, path, options):
    with gunicorn(environment, "--workers=6", *options) as (process, port):
        assert call(port, "x", "GET", PROJECTS)[0] == 401
        assert process.poll() is None
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.parametrize("options", [[], ["--preload"]], ids=["", "preload"])
def test_processes_lose_no_update(environment, token, options):
    with gunicorn(environment, *options) as (_, port):
        url = f"{PROJECTS}/{call(port, token, 'POST', PROJECTS, {})[1]['id']}"
        versions = []

        def write(_):
            for _ in range(10):
                status, project = call(port, token, "PUT", url, {"name": "x"})
                assert status == 200
                versions.append(project["version"])

        at_once(write)
        assert sorted(versions) == list(range(2, 2 + 10 * WRITERS))
        assert call(port, token, "GET", url)[1]["version"] == max(versions)


def test_nothing_acknowledged_is_lost_when_all_is_killed(environment, token, path):
    acknowledged = []
    with gunicorn(environment) as (process, port):

        def write(number):
            with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
                try:
                    while True:
                        body = {"name": f"Writer {number}"}
                        answer = call(port, token, "POST", PROJECTS, body, connection)
                        acknowledged.append(answer[1])
                        if len(acknowledged) == 200:
                            os.killpg(process.pid, signal.SIGKILL)
                except (OSError, http.client.HTTPException):
                    return

        at_once(write)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    with gunicorn(environment) as (_, port):
        listed = call(port, token, "GET", PROJECTS)[1]
    kept = {project["id"]: project for project in listed}
    assert len(acknowledged) >= 200
    assert all(kept[project["id"]] == project for project in acknowledged)


def test_token_revoked_by_command_is_invalid_in_every_worker(environment, token):
    with gunicorn(environment) as (_, port):
        assert call(port, token, "GET", PROJECTS)[0] == 200
        command = [BIN / "flask", "token", "revoke", "1"]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        assert {call(port, token, "GET", PROJECTS)[0] for _ in range(20)} == {401}


def test_malformed_chunks_are_the_callers_fault(gardening):
    address = gardening.url.removeprefix("http://").split(":")
    with socket.create_connection(address) as connection:
        head = [
            f"POST {PROJECTS} HTTP/1.1",
            "Host: x",
            "Content-Type: application/json",
        ]
        head += [f"{name}: {value}" for name, value in gardening.headers.items()]
        head += ["Transfer-Encoding: chunked", "", ""]
        connection.sendall("\r\n".join(head).encode() + b"zz\r\n{}\r\n0\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "command",
    [
        ["flask", "run", "--port=0"],
        ["flask", "token", "list"],
        ["gunicorn", "app:create_app()"],
    ],
    ids=lambda command: command[0] + command[1],
)
def test_unusable_database_is_refused_at_start(environment, path, command):
    Path(path).write_text("This is no database." * 100)
    program, *arguments = command
    refused = subprocess.run(
        [BIN / program, *arguments],
        check=False,
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
    )
    assert refused.returncode != 0
    assert f"Error: file is not a database: {path}\n" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert Path(path).read_text() == "This is no database." * 100


def test_newcomer_is_told_the_next_step(tmp_path):
    for module in ("app.py", "auth.py", "schemas.py", "store.py"):
        shutil.copy(ROOT / module, tmp_path)
    run = [BIN / "flask", "run", "--port=0"]
    with subprocess.Popen(
        run, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as server:
        told = [server.stdout.readline() for _ in range(2)]
        server.terminate()
    assert told[0].startswith("No access token yet.")
    command = told[1].split()
    assert command == [str(BIN / "flask"), "token", "create", "ACCOUNT"]
    assert (tmp_path / "instance/gardening.db").exists()

    subprocess.run(command, cwd=tmp_path, check=True)
    with subprocess.Popen(
        run, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as server:
        first = server.stdout.readline()
        server.terminate()
    assert "No access token" not in first
