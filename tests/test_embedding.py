"""The fixtures as another team has them: installed, in a project that is not ours."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OUR_NAMES = ("app", "auth", "schemas", "store", "testing", "tests")

THEIR_TESTS = """
import json, os, signal, sys, urllib.request
import app, auth, schemas, store, testing
import pytest

PROJECTS = "/api/v1/gardening/projects"

def call(url, headers, data=None):
    headers = headers | {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + PROJECTS, data, headers)) as answer:
        return answer.status, json.load(answer)

@pytest.mark.parametrize("turn", range(4))
def test_every_test_starts_empty(gardening, turn):
    assert call(gardening.url, gardening.headers) == (200, [])
    assert call(gardening.url, gardening.headers, b"{}")[0] == 201
    assert len(call(gardening.url, gardening.headers)[1]) == 1

def test_two_devices_of_one_account(gardening_service):
    tokens = [gardening_service.issue_token(name) for name in ("ann", "ann", None)]
    headers = [{"Authorization": f"Bearer {token}"} for token in tokens]
    call(gardening_service.url, headers[0], b"{}")
    lists = [call(gardening_service.url, each)[1] for each in headers]
    assert [len(each) for each in lists] == [1, 1, 0]

def test_modules_are_their_own():
    assert {m.OWNER for m in (app, auth, schemas, store, testing)} == {"them"}
    assert "flask" not in sys.modules
"""
ENDING_TEST = """
import os, signal

def test_ends_early(gardening):
    with open("url", "w") as file:
        file.write(gardening.url)
    os.kill(os.getpid(), signal.{})
"""


@pytest.fixture(scope="session", params=["", "--editable"], ids=["copied", "editable"])
def python(request, tmp_path_factory):
    """A Python that has the service installed, and pytest with xdist."""
    place = tmp_path_factory.mktemp("installed")
    source = place / "source"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "instance", "tests")
    )
    subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
    python = place / "venv/bin/python"
    install = [python, "-m", "pip", "install", "--quiet", *request.param.split()]
    subprocess.run([*install, source, "pytest-xdist"], check=True)
    return python


@pytest.fixture
def project(tmp_path):
    """Another team's project; its modules and settings have the names of ours."""
    for name in OUR_NAMES[:-1]:
        (tmp_path / f"{name}.py").write_text("OWNER = 'them'\n")
    (tmp_path / "gunicorn.conf.py").write_text("raise RuntimeError('theirs')\n")
    (tmp_path / "test_theirs.py").write_text(THEIR_TESTS)
    return tmp_path


@pytest.fixture
def environment(tmp_path_factory):
    """Settings that are theirs; fails if, after the test, a folder of ours is left."""
    place = tmp_path_factory.mktemp("place")
    yield os.environ | {
        "FLASK_DATABASE": "/no/such/folder/theirs.db",
        "FLASK_MAX_CONTENT_LENGTH": "1",
        "GUNICORN_CMD_ARGS": "--bind=theirs",
        "TMPDIR": str(place),
        "WEB_CONCURRENCY": "99",
    }
    assert list(place.glob("gardening-*")) == []


@pytest.mark.parametrize("options", [[], ["-n2"], ["-p", "no:cacheprovider"]], ids=str)
def test_their_tests_pass(python, project, environment, options):
    command = [python, "-m", "pytest", "-Werror", *options, project / "test_theirs.py"]
    environment["PYTHONPATH"] = str(project)
    run = subprocess.run(
        command, cwd="/", env=environment, text=True, capture_output=True, check=False
    )
    assert "6 passed" in run.stdout, run.stdout + run.stderr


def test_two_runs_at_once_pass(python, project, environment):
    command = [python, "-m", "pytest", project]
    runs = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert ["6 passed" in run.communicate()[0] for run in runs] == [True, True]


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_nothing_is_left_when_a_run_is_ended(python, tmp_path, environment, name):
    (tmp_path / "test_end.py").write_text(ENDING_TEST.format(name))
    command = [python, "-m", "pytest", "-q"]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    assert run.returncode == {"SIGINT": 2, "SIGKILL": -signal.SIGKILL}[name]
    host, port = (tmp_path / "url").read_text().removeprefix("http://").split(":")
    with suppress(ConnectionRefusedError):
        while True:  # each turn ends when whoever still listens does
            with (
                socket.create_connection((host, port)) as connection,
                suppress(ConnectionResetError),
            ):
                connection.recv(1)


def test_nothing_of_ours_is_at_the_top_of_their_packages(python):
    code = f"import importlib.util as u; print([u.find_spec(n) for n in {OUR_NAMES}])"
    run = subprocess.run(
        [python, "-c", code], cwd="/", capture_output=True, text=True, check=True
    )
    assert run.stdout == f"{[None] * len(OUR_NAMES)}\n"


def test_service_that_does_not_start_says_why(tmp_path, environment):
    shutil.copy(ROOT / "testing.py", tmp_path)
    (tmp_path / "app.py").write_text("raise RuntimeError('no soil')")
    (tmp_path / "test_it.py").write_text("def test_it(gardening): pass")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "testing"],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert run.returncode == 1
    assert "The service did not start:" in run.stdout
    assert "RuntimeError: no soil" in run.stdout
