"""The service as it runs: real servers, processes and files, and their faults."""

import http.client
import os
import signal
import sqlite3
import sys
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from helpers.openapi import HELLO
from helpers.running import (
    BIN,
    LIMIT,
    PROJECTS,
    ROOT,
    TWO_WORKERS,
    Client,
    closing_store,
    environment_of,
    flask_run,
    gunicorn,
    replaced,
    run,
    wait_for,
    workers,
)
from helpers.testservice import copy_service

BROKEN = (OSError, http.client.HTTPException)


def test_token_revoked_by_command_is_invalid_in_every_worker(environment, token):
    with gunicorn(environment, TWO_WORKERS) as (_, port):

        def statuses():
            with ExitStack() as opened:
                clients = [opened.enter_context(Client(port, token)) for _ in range(20)]
                return {client.call("GET", PROJECTS)[0] for client in clients}

        assert statuses() == {200}
        run(BIN / "flask", "token", "revoke", "1", environment=environment)
        assert statuses() == {401}


@pytest.mark.parametrize(
    "command",
    [["flask", "run", "--port=0"], ["flask", "token", "list"], ["gunicorn"]],
    ids=lambda command: "-".join(command[:2]),
)
def test_unusable_database_is_refused_at_start(environment, database, command):
    Path(database).write_text("This is no database." * 100)
    program, *arguments = command
    refused = run(BIN / program, *arguments, environment=environment, status=1)
    assert refused.stderr.count(f"Error: file is not a database: {database}\n") == 1
    assert "Traceback" not in refused.stderr
    assert Path(database).read_text() == "This is no database." * 100


def test_newcomer_sees_the_next_step(tmp_path):
    copy_service(tmp_path)
    with flask_run(None, folder=tmp_path) as (_, printed):
        assert printed[0] == f"A new database: {tmp_path}/instance/gardening.db\n"
        assert printed[1].startswith("No access token yet.")
        command = printed[2].split()
    assert command[1:] == ["-m", "flask", "token", "create", "ACCOUNT"]

    run(*command, folder=tmp_path)
    with flask_run(None, folder=tmp_path) as (_, printed):
        assert not any("No access token" in line for line in printed)


def test_newcomers_command_leads_a_shell_to_the_same_database(tmp_path):
    folder = tmp_path / "My Gärten #1"
    folder.symlink_to(BIN.parent)
    flask = folder / "bin/python", "-m", "flask"
    database = os.path.relpath(tmp_path / "My database.db", ROOT)
    with flask_run(environment_of(database), flask=flask) as (_, printed):
        created, introduction, command, *_ = printed
        assert created == f"A new database: {tmp_path}/My database.db\n"
        assert introduction.endswith(" In another terminal, in this folder, run:\n")
        assert f" '{folder}/bin/python' -m flask token create" in command
        run("sh", "-c", command, environment=os.environ)
    with closing_store(str(tmp_path / "My database.db")) as store:
        assert [token.account for token in store.list_tokens()] == ["ACCOUNT"]


@pytest.mark.parametrize("program", ["gunicorn", "flask token create ann"])
@pytest.mark.parametrize("is_default", [False, True])
def test_program_that_creates_no_database_says_so(tmp_path, program, is_default):
    folder = tmp_path / "clone"
    folder.mkdir()
    copy_service(folder)
    database = str(folder / "instance/gardening.db" if is_default else tmp_path / "gardning.db")
    environment = os.environ if is_default else environment_of(database)
    name, *arguments = program.split()
    ended = run(BIN / name, *arguments, folder=folder, environment=environment, status=1)
    hint = "restore a backup, or run `init-db` for an empty database"
    assert ended.stderr.count(f"Error: no database at {database}: {hint}\n") == 1
    assert "Traceback" not in ended.stderr
    assert not os.path.exists(database) and not (folder / "instance").exists()


SECOND_USE = """
import os, signal, subprocess, sys
from engines.sqlite import SQLite
from store import Store
path = sys.argv[1]
first = Store(SQLite(path))
first.engine.open_database(creates=True)
first.create_project("ann", {})
second = Store(SQLite(path))
second.check()
other = "import sys; from engines.sqlite import SQLite; SQLite(sys.argv[1]).check()"
subprocess.run([sys.executable, "-c", other, path], check=True, timeout=60)
for _ in range(20):
    first.create_project("ann", {})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_second_use_in_a_process_loses_no_acknowledged_write(database):
    """A file that a process closes itself loses the locks that SQLite has on it."""
    run(sys.executable, "-c", SECOND_USE, database, status=-signal.SIGKILL)
    with closing(sqlite3.connect(database)) as connection:
        count = "SELECT count(*) FROM project"
        assert connection.execute(count).fetchall() == [(21,)]
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_worker_that_starts_without_the_file_says_so_and_creates_none(environment, token, database):
    with gunicorn(environment) as (process, port):

        def status():
            with Client(port, token) as client, suppress(*BROKEN):
                return client.call("GET", PROJECTS)[0]

        assert status() == 200
        [worker] = workers(process.pid)
        away = f"{database}-away"
        for suffix in ("", "-wal"):  # beside which no file would be created
            os.rename(database + suffix, away + suffix)
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: workers(process.pid) not in ([], [worker]))
        wait_for(lambda: status() == 503)
        assert not os.path.exists(database)
        for suffix in ("", "-wal"):
            os.rename(away + suffix, database + suffix)
        wait_for(lambda: status() == 200)
        assert process.poll() is None


@pytest.mark.parametrize("is_met", [False, True], ids=["idle", "asked"])
def test_service_that_is_stopped_leaves_nothing_beside_a_replaced_file(
    environment, token, database, tmp_path, is_met
):
    backup = tmp_path / "backup.db"
    with gunicorn(environment, TWO_WORKERS) as (process, port):
        with Client(port, token) as client:
            client.call("POST", PROJECTS, {"name": "in the backup"})
            run(BIN / "flask", "backup", backup, environment=environment)
            for _ in range(20):
                client.call("POST", PROJECTS, {"name": "after the backup"})
        os.rename(backup, database)
        if is_met:
            with Client(port, token) as client:
                assert client.call("POST", PROJECTS, {})[0] == 503
        process.terminate()
        assert process.wait(LIMIT) == 0
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        names = connection.execute("SELECT name FROM project").fetchall()
        assert names == [("in the backup",)]


def test_reload_serves_the_code_of_the_next_release(environment, tmp_path):
    """The master, which outlives the reload, has imported nothing of the last one but logged.py."""
    copy_service(tmp_path)
    with gunicorn(environment, f"--chdir={tmp_path}") as (process, port):

        def greeting():
            with Client(port, "x") as client:
                return client.call("GET", HELLO)[1]["greetings"]

        assert greeting() == "Hello from the Gardening Project Service!"
        for file, old, new in [
            ("app.py", "Hello from", "{commands.NEXT} from"),
            ("commands.py", "MAX_DAYS =", "NEXT = 'Welcome'\nMAX_DAYS ="),
        ]:
            text = (tmp_path / file).read_text()
            (tmp_path / file).write_text(replaced(text, {old: new}))
        os.kill(process.pid, signal.SIGHUP)
        wait_for(lambda: greeting().startswith("Welcome from "))
