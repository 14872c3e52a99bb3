"""What README.md and OPERATIONS.md tell to paste does what they say."""

import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from running import BIN, PROJECTS, ROOT, Client, gunicorn

from auth import digest
from store import SQLite, Store

README, OPERATIONS = (ROOT / "README.md", ROOT / "OPERATIONS.md")
VARYING = {
    r"gardening_[\w-]{43}\b": "TOKEN",
    r"\b[0-9a-f]{24}\b": "ID",
    r"\b1\d{12}\b": "MILLISECONDS",
    r"\b20\d\d-\d\d-\d\d \d\d:\d\d\b": "TIME",
    r"(?m)^(Server|Date): .*$": r"\1",
    r"\r": "",
}


def needs(program: str) -> pytest.MarkDecorator:
    missing = not shutil.which(program)
    return pytest.mark.skipif(missing, reason=f"{program} is not installed")


def blocks(page: Path, heading: str, language: str = "sh") -> list[str]:
    """The blocks of this language under the heading."""
    [section] = re.findall(
        rf"^## {heading}\n(.*?)(?=^## |\Z)", page.read_text(), re.DOTALL | re.MULTILINE
    )
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def paste(block: str, folder: Path, **variables: str) -> str:
    """What a shell prints for the block, which must not complain."""
    shell = subprocess.run(
        ["sh"],
        input=block,
        cwd=folder,
        env=os.environ | variables,
        text=True,
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert shell.stderr == ""
    return shell.stdout


def settled(text: str) -> str:
    for pattern, name in VARYING.items():
        text = re.sub(pattern, name, text)
    return text


@contextmanager
def quick_start(folder: Path) -> Iterator[str]:
    """The service as it runs in a clone, with a virtual environment; its address."""
    for file in [*ROOT.glob("*.py"), ROOT / "openapi.json"]:
        shutil.copy(file, folder)
    (folder / ".venv").symlink_to(BIN.parent)
    command = [".venv/bin/flask", "run", "--port=0"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLASK_")}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        limit = threading.Timer(60, server.kill)
        limit.start()
        try:
            yield next(filter(None, map(announced, server.stderr)))
        finally:
            limit.cancel()
            server.kill()


def announced(line: str) -> str | None:
    found = re.search(r"Running on (\S+)", line)
    return found and found[1]


@needs("curl")
def test_first_calls_and_tokens_print_what_the_readme_says(tmp_path, monkeypatch):
    monkeypatch.delenv("FLASK_DATABASE", raising=False)
    [calls], [printed] = (blocks(README, "First calls", x) for x in ("sh", "text"))
    [tokens], [shown] = (blocks(README, "Tokens", x) for x in ("sh", "text"))
    assert calls.count("http://127.0.0.1:5000") == 1
    with quick_start(tmp_path) as address:
        found = paste(calls.replace("http://127.0.0.1:5000", address), tmp_path)
        assert settled(found) == settled(printed)
        assert settled(paste(tokens, tmp_path)) == settled(shown)
    store = Store(SQLite(str(tmp_path / "instance/gardening.db")))
    assert [account for _, _, _, account in store.list_tokens()] == ["ann"]


@pytest.fixture
def unit(tmp_path):
    """The unit of the service, with the folders of this test."""
    [unit] = blocks(OPERATIONS, "Install", "ini")
    return placed(unit, tmp_path)


def placed(block: str, folder: Path) -> str:
    for old, new in {
        "/opt/gardening/.venv": str(BIN.parent),
        "/opt/gardening": str(ROOT),
        "/var/lib/gardening": f"{folder}/lib",
        "/var/backups/gardening": f"{folder}/backups",
        "-o gardening -g gardening": f"-o {os.getuid()} -g {os.getgid()}",
    }.items():
        block = block.replace(old, new)
    return block


@needs("systemd-analyze")
def test_systemd_accepts_the_unit(unit, tmp_path):
    file = tmp_path / "gardening.service"
    file.write_text(unit)
    verify = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", file]
    verified = subprocess.run(
        verify, capture_output=True, text=True, timeout=60, check=False
    )
    assert (verified.returncode, verified.stderr) == (0, "")


@pytest.fixture
def operator(unit, tmp_path):
    """A function that pastes a block, where the service's user is the test's."""
    programs = tmp_path / "bin"
    programs.mkdir()
    commands = {
        "runuser": 'shift 3; exec "$@"',
        "systemctl": f'echo "$@" >> {tmp_path}/log',
    }
    for name, script in commands.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o700)
    (tmp_path / "lib").mkdir()
    path = f"{programs}:{os.environ['PATH']}"
    return lambda block: paste(placed(block, tmp_path), tmp_path, PATH=path)


@pytest.fixture
def served(unit, environment, tmp_path):
    """The environment of the service, as the unit has it."""
    [(name, database)] = re.findall(r"^Environment=(\w+)=(.*)$", unit, re.MULTILINE)
    return environment | {name: database}


@pytest.fixture
def first_token(operator, monkeypatch):
    monkeypatch.delenv("FLASK_DATABASE", raising=False)
    [block] = blocks(OPERATIONS, "First token")
    return operator(block).strip()


def test_first_token_is_one_of_the_service(first_token, served):
    store = Store(SQLite(served["FLASK_DATABASE"]))
    assert store.find_account(digest(first_token)) == "ann"


@needs("sqlite3")
def test_backup_is_made_while_the_service_runs_and_restored(
    operator, first_token, served, tmp_path
):
    backup, restore = blocks(OPERATIONS, "Backup and restore")
    with gunicorn(served) as (_, port), Client(port, first_token) as client:
        client.call("POST", PROJECTS, {"name": "first"})
        operator(backup)
        time.sleep(1)  # backups are named by the second
        client.call("POST", PROJECTS, {"name": "second"})
        operator(backup)
        kept = client.call("GET", PROJECTS)
        client.call("POST", PROJECTS, {"name": "lost"})
    backups = tmp_path / "backups"
    assert backups.stat().st_mode & 0o777 == 0o700  # which keeps the files in it too
    assert len(list(backups.iterdir())) == 2
    operator(restore)
    assert (tmp_path / "log").read_text() == "stop gardening\nstart gardening\n"
    database = Path(served["FLASK_DATABASE"])
    assert database.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in database.parent.glob("gardening.db*")] == [
        database.name
    ]
    with gunicorn(served) as (_, port), Client(port, first_token) as client:
        assert client.call("GET", PROJECTS) == kept
    [before] = tmp_path.glob("lib/before-*/gardening.db")
    lost = Store(SQLite(str(before)))
    assert "lost" in str(lost.list_projects("ann", []).document)


@needs("sqlite3")
def test_backup_of_a_missing_database_fails(operator, tmp_path):
    backup, _ = blocks(OPERATIONS, "Backup and restore")
    with pytest.raises(subprocess.CalledProcessError):
        operator(backup)
    assert list((tmp_path / "backups").iterdir()) == []


def test_restore_without_a_backup_changes_nothing(operator, first_token, tmp_path):
    _, restore = blocks(OPERATIONS, "Backup and restore")
    with pytest.raises(subprocess.CalledProcessError):
        operator(restore)
    assert not (tmp_path / "log").exists()
    store = Store(SQLite(str(tmp_path / "lib/gardening.db")))
    assert store.find_account(digest(first_token)) == "ann"
