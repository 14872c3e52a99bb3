"""The service in other teams' tests; tests/deployment shows it when pip has installed it."""

import json
import os
import re
import sys
import uuid
from functools import partial

import pytest

from helpers.running import ROOT, replaced, run
from helpers.testservice import (
    HOSTILE,
    call_projects,
    copy_service,
    processes_still_running,
    refuses,
)

PLUGIN = "testservice.gardening_service.fixtures"
SIGNALLING_TESTS = """
import contextlib, signal, subprocess, urllib.request

def test_log(gardening):
    token = gardening.issue_token(fail=["500"])
    headers = {"Authorization": f"Bearer {token}"}
    url = gardening.url + "/api/v1/gardening/projects"
    urllib.request.urlopen(urllib.request.Request(url, headers=headers))

def test_signal(gardening_service):
    process = gardening_service._process
    process.send_signal(signal.SIGNAL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # SIGSTOP does not end it
        process.wait(1)

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
