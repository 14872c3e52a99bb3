"""The service in other teams' tests: installed, in a project that is not ours."""

import json
import os
import re
import shlex
import shutil
import signal
import sys
import uuid
from functools import partial

import pytest

from helpers.running import LIMIT, ROOT, blocks, needs, replaced, run
from helpers.testservice import (
    HOSTILE,
    call_projects,
    copy_service,
    processes_still_running,
    refuses,
)

PAGE = "docs/testing.md"
PLUGIN = "testservice.gardening_service.fixtures"
OUR_NAMES = ("app", "auth", "commands", "schemas", "store", "testservice", "tests")

THEIR_TESTS = """
import json, sys, urllib.request
import app, auth, commands, schemas, store, testservice
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

def test_modules_are_their_own():
    modules = (app, auth, commands, schemas, store, testservice)
    assert {module.OWNER for module in modules} == {"them"}
    assert not {"click", "flask"} & {*sys.modules}
"""
# Where SIGINT was ignored at the start, Python has not set its handler.
ENDING_TEST = """
import os, signal
import pytest

@pytest.fixture
def url(gardening_service):
    yield gardening_service.url
    with open("token", "w") as file:
        file.write(gardening_service.issue_token())

def test_ends_early(url):
    with open("url", "w") as file:
        file.write(url)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.killpg(0, signal.{})
"""
SIGNALLING_TESTS = """
import os, signal, urllib.request

def test_log(gardening):
    token = gardening.issue_token(fail=["500"])
    headers = {"Authorization": f"Bearer {token}"}
    url = gardening.url + "/api/v1/gardening/projects"
    urllib.request.urlopen(urllib.request.Request(url, headers=headers))

def test_signal(gardening_service):
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        [service] = file.read().split()
    os.kill(int(service), signal.SIGNAL)
    os.waitid(os.P_PID, int(service), os.WEXITED | os.WSTOPPED | os.WNOWAIT)

def test_after(gardening):
    raise RuntimeError("reached")

def test_at_last():
    pass
"""


@pytest.fixture
def their_environment(tmp_path_factory):
    """Settings that are theirs; fails if, after the test, anything of ours is left."""
    place, mark = tmp_path_factory.mktemp("place"), str(uuid.uuid4())
    theirs = os.environ | HOSTILE | {"TMPDIR": str(place), "MARK": mark}
    theirs.pop("PYTHONDONTWRITEBYTECODE", None)  # or each run compiles pytest anew
    yield theirs
    assert processes_still_running(mark) == []
    assert list(place.glob("gardening-*")) == []


def run_failing(tests, folder, environment):
    """What tests print that use the service in the folder, and wait less for it."""
    client = folder / "testservice/gardening_service/client.py"
    client.write_text(replaced(client.read_text(), {"LIMIT = 10 ": "LIMIT = 4 "}))
    (folder / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-Werror", "-p", PLUGIN, folder]
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return run(*command, status=1, folder=folder, environment=environment).stdout


STARTS = {
    "raise RuntimeError('no soil')": "no soil",
    "import time; time.sleep(600)": "",
}


@pytest.mark.parametrize("start, told", STARTS.items(), ids=["broken", "hanging"])
def test_fixture_of_a_service_that_does_not_start_says_why(
    tmp_path, their_environment, start, told
):
    copy_service(tmp_path)
    (tmp_path / "schemas.py").write_text(start)
    tests = "def test_it(gardening): pass"
    printed = run_failing(tests, tmp_path, their_environment)
    assert "The service did not start." in printed and told in printed


ENDS = {
    "SIGKILL": ("1 failed, 2 passed, 2 errors", "\nE .*The service has ended", 2),
    "SIGTERM": ("1 failed, 2 passed, 2 errors", "\nE .*The service has ended", 2),
    "SIGSTOP": ("1 failed, 2 passed, 2 errors", "\nE .*TimeoutExpired", 1),
}


@pytest.mark.parametrize("name, told", ENDS.items(), ids=ENDS)
def test_end_of_the_service_is_told_with_its_log(
    tmp_path, their_environment, name, told
):
    """At the next call, and at the end; one that does not end is killed."""
    copy_service(tmp_path)
    tests = SIGNALLING_TESTS.replace("SIGNAL", name)
    printed = run_failing(tests, tmp_path, their_environment)
    counts, reason, times = told
    assert counts in printed
    assert "RuntimeError: planned for this token" in printed
    assert "ERROR at teardown of test_at_last" in printed
    assert len(re.findall(reason, printed)) == times


def test_fixture_refuses_what_cannot_be_an_account(gardening_service):
    with pytest.raises(ValueError, match="1 to 255 printable"):
        gardening_service.issue_token("")
    assert gardening_service.issue_token(account="ann")


def test_fixture_refuses_a_plan_that_is_a_string(gardening, gardening_service):
    for service in (gardening, gardening_service):
        with pytest.raises(ValueError, match="'fail': .*Not a valid list"):
            service.issue_token(fail="lost")


def test_fixture_plans_failures_and_has_the_requests(gardening, gardening_service):
    gardening.plan(["502", "429"])
    gardening.plan(("429",))
    url, token = gardening.url, gardening.token
    assert gardening.left(token) == ["429"]
    assert [call_projects(url, token)[0] for _ in range(2)] == [429, 200]
    assert call_projects(url, token, "POST", {"name": "Park"})[0] == 201
    first, second, third = gardening.requests
    assert first["method"] == second["method"] == "GET"
    assert json.loads(third["body"]) == {"name": "Park"}
    other = gardening.issue_token()
    gardening_service.plan(other, ["504"])
    assert call_projects(url, other, "POST", {})[0] == 504
    [request] = gardening_service.requests(other)
    assert request["method"] == "POST"
    with pytest.raises(ValueError, match="'5O3' is not one of"):
        gardening.plan(["5O3"])


def test_fixture_revokes_tokens(gardening, gardening_service):
    token = gardening.issue_token(fail=["lost"])
    assert gardening.left(token) == gardening_service.left(token) == ["lost"]
    for service, revoked in (gardening, token), (gardening_service, gardening.token):
        service.revoke(revoked)
        assert call_projects(gardening.url, revoked)[0] == 401
    plan = partial(gardening_service.plan, fail=[])
    asks = gardening_service.left, gardening_service.requests, gardening_service.revoke
    for ask in (*asks, plan):
        for unknown in (gardening.token, "a b\n", "ü"):
            with pytest.raises(ValueError, match="There is no such token"):
                ask(unknown)


def test_fixture_of_a_test_issues_tokens_of_its_own_account(
    gardening, gardening_service
):
    tokens = [
        gardening.issue_token(),
        gardening.issue_token(fail=["429"]),
        gardening.issue_token(expired=True),
        gardening_service.issue_token(gardening.account),
        gardening_service.issue_token(),
    ]
    assert call_projects(gardening.url, gardening.token, "POST", {})[0] == 201
    answers = [call_projects(gardening.url, token) for token in tokens]
    assert [status for status, _ in answers] == [200, 429, 401, 200, 200]
    assert [len(answers[number][1]) for number in (0, 3, 4)] == [1, 1, 0]
    assert gardening.headers == {"Authorization": f"Bearer {gardening.token}"}


RUNNING = """
import sys, urllib.request
import gardening_service

with gardening_service.run() as service:
    gardening = service.with_new_account()
    url = gardening.url + "/api/v1/gardening/projects"
    request = urllib.request.Request(url, headers=gardening.headers)
    assert urllib.request.urlopen(request).read() == b"[]"
    assert [each["method"] for each in gardening.requests] == ["GET"]
    print(url)
    assert "pytest" not in sys.modules
    END
"""


@pytest.mark.parametrize("end, status", {"": 0, "raise KeyError": 1}.items())
def test_service_runs_without_pytest_for_the_time_of_a_with(
    their_environment, end, status
):
    theirs = their_environment | {"PYTHONPATH": str(ROOT / "testservice")}
    script = RUNNING.replace("END", end)
    command = [sys.executable, "-Werror", "-c", script]
    ended = run(*command, folder="/", environment=theirs, status=status)
    assert ("KeyError" in ended.stderr) == bool(end)
    assert refuses(ended.stdout.removesuffix("/api/v1/gardening/projects\n"))


# These need packages from PyPI.


@pytest.fixture(scope="session")
def clone(tmp_path_factory):
    """A copy of this folder."""
    clone = tmp_path_factory.mktemp("clone") / "gardening"
    unwanted = (".*", "*.egg-info", "__pycache__", "build", "instance")
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(*unwanted))
    return clone


@pytest.fixture(scope="session")
def python(clone, tmp_path_factory):
    """A Python that has installed what the page says, and what a test here adds."""
    [command] = blocks(PAGE, "pytest")
    *pip, package, requests = command.replace('"', "").split()
    assert [*pip, package] == ["pip", "install", "../CLONE[testing]"]
    package = package.replace("../CLONE", str(clone))
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


def run_their_tests(
    python, project, their_environment, *options, told="5 passed", status=0
):
    command = [python, "-m", "pytest", "-Werror", *options, project / "test_theirs.py"]
    theirs = their_environment | {"PYTHONPATH": str(project)}
    ended = run(*command, folder="/", environment=theirs, status=status)
    assert told in ended.stdout


@pytest.mark.parametrize("options", [[], ["-n2"], ["-p", "no:cacheprovider"]], ids=str)
def test_fixtures_work_when_installed_with_pip(
    python, project, their_environment, options
):
    run_their_tests(python, project, their_environment, *options)


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
    script = script.replace("../CLONE", str(clone))
    its = f"{shlex.join(pip)} --python ../service/bin/python"
    script = script.replace("python3 -m venv ../service && ../service/bin/pip", its)
    script = script.replace("\npip ", f"\n{shlex.join(pip)} --python {theirs} ")
    script += 'printf %s "$GARDENING_TEST_SERVICE"'
    command = run("sh", "-ec", script, folder=folder, limit=10 * LIMIT).stdout
    told = "or set GARDENING_TEST_SERVICE to the command"
    run_their_tests(theirs, project, their_environment, told=told, status=1)
    their_environment["GARDENING_TEST_SERVICE"] = f"{command} --bind 127.0.0.1:0"
    run_their_tests(theirs, project, their_environment)
    run(theirs, "-c", "import werkzeug", status=1)


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_nothing_is_left_when_a_run_is_ended(python, tmp_path, their_environment, name):
    """SIGINT as from Ctrl-C: to every process of the run, which then clears up."""
    (tmp_path / "test_end.py").write_text(ENDING_TEST.format(name))
    command = [python, "-m", "pytest", "-q"]
    options = {"folder": tmp_path, "environment": their_environment}
    status = {"SIGINT": 2, "SIGKILL": -signal.SIGKILL}[name]
    run(*command, status=status, start_new_session=True, **options)
    assert (tmp_path / "token").exists() == (name == "SIGINT")
    assert processes_still_running(their_environment["MARK"]) == []
    assert refuses((tmp_path / "url").read_text())


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
def test_pytest_example_passes(python, tmp_path, paths, heading):
    [example] = blocks(PAGE, heading, "python")
    (tmp_path / "test_example.py").write_text(example)
    ended = run("pytest", folder=tmp_path, environment=paths)
    assert "1 passed" in ended.stdout


def test_unittest_example_passes(python, tmp_path, paths):
    [example] = blocks(PAGE, "unittest", "python")
    (tmp_path / "test_example.py").write_text(example)
    command = [python, "-Werror", "-m", "unittest"]
    ended = run(*command, folder=tmp_path, environment=paths)
    assert ended.stderr.endswith("\nOK\n")


# This needs Node, too.


@needs("node")
def test_example_in_node_prints_what_the_page_says(tmp_path, paths):
    [example] = blocks(PAGE, "Any other language", "js")
    [printed] = blocks(PAGE, "Any other language", "text")[1:]
    node = ["node", "--input-type=module"]
    ended = run(*node, folder=tmp_path, environment=paths, input=example)
    assert (ended.stdout, ended.stderr) == (f"[]\n{printed}", "")
