"""The test service: installed by pip in another team's project, and beside nginx."""

import os
import re
import shlex
import shutil
import signal
import socket
import sys

import pytest

from deployment.servers.nginx import STRICT, proxy
from helpers.openapi import assert_problem
from helpers.running import BIN, LIMIT, PROJECTS, ROOT, TLSClient, blocks, run
from test_embedding import their_environment
from test_failures import failing, own_parts
from test_testservice import assert_printed, start

PAGE = "docs/testing.md"
OUR_NAMES = ("app", "auth", "commands", "schemas", "store", "testservice", "tests")

THEIR_TESTS = """
import json, sys, urllib.request
import app, auth, commands, schemas, store, testservice
import pytest

PROJECTS = "/api/v1/gardening/projects"

def call(url, headers, data=None):
    headers = headers | {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + PROJECTS, data, headers)) as response:
        return response.status, json.load(response)

@pytest.mark.parametrize("turn", range(4))
def test_every_test_starts_empty(gardening, turn):
    assert call(gardening.url, gardening.headers) == (200, [])
    assert call(gardening.url, gardening.headers, b"{}")[0] == 201
    assert len(call(gardening.url, gardening.headers)[1]) == 1

def test_modules_are_their_own():
    modules = (app, auth, commands, schemas, store, testservice)
    assert {module.OWNER for module in modules} == {"them"}
    assert not {"click", "flask"} & {*sys.modules}
"""
UNITTEST = """
import unittest
import gardening_service

class SyncTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        {}

    def test_sync(self):
        gardening = self.service.with_new_account()
        self.assertEqual(gardening.requests, [])
"""
# Where SIGINT was ignored at the start, Python has not set its handler.
ENDING_TEST = """
import os, pathlib, signal
import pytest

@pytest.fixture
def service(gardening_service):
    yield
    pathlib.Path("token").write_text(gardening_service.issue_token())

def test_ends_early(service):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.killpg(0, signal.{})
"""


@pytest.fixture(scope="session")
def clone(tmp_path_factory):
    """A copy of this folder."""
    clone = tmp_path_factory.mktemp("clone") / "gardening"
    unwanted = (".*", "__pycache__", "instance")
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(*unwanted))
    return clone


@pytest.fixture(scope="session")
def python(clone, tmp_path_factory):
    """A Python that has installed what the page says, and what a test here adds."""
    [command] = blocks(PAGE, "pytest")
    *pip, package, requests = command.replace('"', "").split()
    assert [*pip, package] == ["pip", "install", "../gardening[testing]"]
    package = package.replace("../gardening", str(clone))
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin/python"
    packages = [package, requests, "pytest-xdist", "jsonschema-rs"]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run(*pip, "--no-compile", *packages, folder="/", limit=10 * LIMIT)
    return python


@pytest.fixture
def project(tmp_path):
    """Another team's project; its modules and settings have the names of ours."""
    for name in (*OUR_NAMES[:-1], "click", "flask"):
        (tmp_path / f"{name}.py").write_text("OWNER = 'them'\n")
    (tmp_path / "gunicorn.conf.py").write_text("raise RuntimeError('theirs')\n")
    (tmp_path / "test_theirs.py").write_text(THEIR_TESTS)
    return tmp_path


def run_their_tests(python, project, their_environment, *options, output="5 passed", status=0):
    command = [python, "-m", "pytest", "-Werror", *options, project / "test_theirs.py"]
    theirs = their_environment | {"PYTHONPATH": str(project)}
    ended = run(*command, folder="/", environment=theirs, status=status)
    assert output in ended.stdout


def test_installation_leaves_nothing_in_the_clone(python, clone):
    """Such as an egg-info, with which pytest loads the fixtures wherever the clone is on a path."""
    left = {path.relative_to(clone) for path in clone.rglob("*") if "__pycache__" not in path.parts}
    assert [path for path in left if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("options", [[], ["-n2"], ["-p", "no:cacheprovider"]], ids=str)
def test_fixtures_work_when_installed_with_pip(python, project, their_environment, options):
    run_their_tests(python, project, their_environment, *options)


def test_uv_builds_each_commit_anew_as_pip_does(clone, tmp_path):
    repository, theirs = tmp_path / "gardening", tmp_path / "theirs"
    shutil.copytree(clone, repository)
    theirs.mkdir()
    commit = "git add . && git -c user.name=x -c user.email=x@example.org commit --quiet -m x"
    run("git", "init", "--quiet", folder=repository)
    environment = os.environ | {"HTTPS_PROXY": os.environ.get("PIP_PROXY", "")}

    def uv(*words):
        run(BIN / "uv", *words, folder=theirs, environment=environment, limit=10 * LIMIT)

    uv("init", "--bare")
    uv("add", "--dev", "--no-sync", "../gardening")
    for text in ("# first\n", "# second\n"):
        (repository / "swagger.py").write_text(text)
        run("sh", "-ec", commit, folder=repository)
        uv("sync")
        [installed] = theirs.glob(".venv/**/swagger.py")
        assert installed.read_text() == text


def test_service_may_come_from_an_environment_of_its_own(
    clone, tmp_path, project, their_environment
):
    """Beside another team's Flask, of which it takes nothing."""
    folder = tmp_path / "tests"
    for name in ("tests/.venv", "service"):
        run(sys.executable, "-m", "venv", "--without-pip", tmp_path / name)
    theirs = folder / ".venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--quiet"]
    run(*pip, "--python", theirs, "install", "pytest", limit=10 * LIMIT)
    [script] = blocks(PAGE, "An environment of its own")
    script = script.replace("../gardening", str(clone))
    its = f"{shlex.join(pip)} --python ../service/bin/python"
    script = script.replace("python3 -m venv ../service && ../service/bin/pip", its)
    script = script.replace("\npip ", f"\n{shlex.join(pip)} --python {theirs} ")
    script += 'printf %s "$GARDENING_TEST_SERVICE"'
    command = run("sh", "-ec", script, folder=folder, limit=10 * LIMIT).stdout
    message = "or set GARDENING_TEST_SERVICE to the command"
    run_their_tests(theirs, project, their_environment, output=message, status=1)
    their_environment["GARDENING_TEST_SERVICE"] = f"{command} --bind 127.0.0.1:0"
    run_their_tests(theirs, project, their_environment)
    run(theirs, "-c", "import werkzeug", status=1)


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_nothing_is_left_when_a_run_is_ended(python, tmp_path, their_environment, name):
    """As the fixture of their environment checks.

    SIGINT as from Ctrl-C: to every process of the run, which then clears up.
    """
    (tmp_path / "test_end.py").write_text(ENDING_TEST.format(name))
    command = [python, "-m", "pytest", "-q"]
    options = {"folder": tmp_path, "environment": their_environment}
    status = {"SIGINT": 2, "SIGKILL": -signal.SIGKILL}[name]
    run(*command, status=status, start_new_session=True, **options)
    assert (tmp_path / "token").exists() == (name == "SIGINT")


PATCHED = """
from gardening_service import client, run
from gevent import monkey
monkey.patch_all()
with run() as service:
    print(service.with_new_account().plan(["429"]))
"""


def test_service_can_be_started_after_gevent_has_patched_python(their_environment):
    """As in a conftest.py, before which pytest imports the fixtures."""
    theirs = their_environment | {"PYTHONPATH": str(ROOT / "testservice")}
    run(sys.executable, "-c", PATCHED, folder="/", environment=theirs)


def test_no_module_of_ours_but_the_package_can_be_imported(python):
    names = [*OUR_NAMES, "gardening_service.app", "gardening_service"]
    code = f"import importlib.util as u; print([u.find_spec(n) for n in {names}])"
    ended = run(python, "-c", code, folder="/")
    assert ended.stdout.startswith(f"[{'None, ' * (len(names) - 1)}ModuleSpec")


@pytest.fixture
def paths(python, their_environment):
    """The environment with our command on the PATH."""
    return their_environment | {"PATH": f"{python.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize("heading", ["pytest", "Failures"])
def test_pytest_example_passes_also_behind_a_proxy(tmp_path, paths, heading):
    [example] = blocks(PAGE, heading, "python")
    (tmp_path / "test_example.py").write_text(example)
    [no_proxy] = re.findall("`(NO_PROXY)=(.+?)`", (ROOT / PAGE).read_text())
    theirs = paths | {"HTTP_PROXY": "http://127.0.0.1:1", **dict([no_proxy])}
    ended = run("pytest", folder=tmp_path, environment=theirs)
    assert "1 passed" in ended.stdout


def test_example_in_the_same_process_passes(python, clone, tmp_path):
    [example] = blocks(PAGE, "In the same process", "python")
    (tmp_path / "test_example.py").write_text(example)
    theirs = os.environ | {"PYTHONPATH": str(clone)}
    command = [python, "-Werror", "-m", "pytest"]
    ended = run(*command, folder=tmp_path, environment=theirs)
    assert "1 passed" in ended.stdout


def test_line_for_unittest_runs_the_service(python, tmp_path, paths):
    [line] = re.findall("`(cls[.].+)`", (ROOT / PAGE).read_text())
    (tmp_path / "test_example.py").write_text(UNITTEST.format(line))
    command = [python, "-Werror", "-m", "unittest"]
    ended = run(*command, folder=tmp_path, environment=paths)
    assert ended.stderr.endswith("\nOK\n")


def test_example_in_node_prints_what_the_page_says(tmp_path, paths):
    [example] = blocks(PAGE, "Any other language", "js")
    [printed] = blocks(PAGE, "Any other language", "text")[1:]
    node = ["node", "--input-type=module"]
    ended = run(*node, folder=tmp_path, environment=paths, input=example)
    assert (ended.stdout, ended.stderr) == (printed, "")


@pytest.mark.parametrize("host", ["[::1]", "[::]"])
def test_printed_ipv6_address_can_be_called(start, host):
    assert_printed(start, host, "[::1]")


BRIEF = {"proxy_http_version 1.1;": "proxy_http_version 1.1; proxy_read_timeout 1;"}
NGINX = {"429": STRICT, "504": BRIEF}


@pytest.mark.parametrize("method", ["POST", "HEAD"])
@pytest.mark.parametrize("failure", ["429", "502", "504"])
def test_planned_refusal_is_the_one_that_nginx_sends(failing, tmp_path, failure, method):
    client, _ = failing(failure)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if failure == "504":
            silent.listen()
        with (
            proxy(tmp_path, silent.getsockname()[1], NGINX.get(failure)) as nginx,
            TLSClient(nginx.port, "x") as behind,
        ):
            responses = [behind.fetch(method, PROJECTS) for _ in range(3)]
    assert own_parts(client.fetch(method, PROJECTS)) == own_parts(responses[-1])
    assert responses[-1][0] == int(failure)
    if method == "POST":
        assert_problem(responses[-1], int(failure))
    assert responses[-1][1]["Retry-After"] == ("1" if failure == "429" else "5")
