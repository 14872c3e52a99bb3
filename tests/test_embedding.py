"""The service in other teams' tests; tests/deployment shows it when pip has installed it."""

import os
import pickle
import shlex
import signal
import socket
import sys
import threading
import uuid
from contextlib import nullcontext
from functools import partial

import pytest

from helpers import running
from helpers.running import LIMIT, ROOT, workers
from helpers.stores import lasts
from helpers.testservice import call_projects, processes_still_running, refuses
from testservice.gardening_service import COMMAND, client, run
from testservice.server import url_of

# What a user may have set, and what is not for the service.
READ_BY_OURS = ("FORWARDED_ALLOW_IPS", "GARDENING_MAX_PROJECTS", "PORT", "WEB_CONCURRENCY")
THEIRS = dict.fromkeys(READ_BY_OURS, "theirs") | {"SCRIPT_NAME": "/theirs"}


@pytest.fixture
def their_environment(tmp_path_factory):
    """Settings that are theirs; fails if, after the test, anything of ours is left."""
    place, mark = tmp_path_factory.mktemp("place"), str(uuid.uuid4())
    theirs = os.environ | THEIRS | {"TMPDIR": str(place), "MARK": mark}
    theirs.pop("PYTHONDONTWRITEBYTECODE", None)  # or each run compiles pytest anew
    yield theirs
    assert processes_still_running(mark) == []
    assert list(place.glob("gardening-*")) == []


NOT_STARTED = [
    ("sh -c 'echo no soil >&2'", "start[.]", "no soil"),
    ("sleep 99", "start within 1 seconds[.]", ""),
]


@pytest.mark.parametrize("command, reason, log", NOT_STARTED)
def test_service_that_does_not_start_says_why(monkeypatch, capfd, command, reason, log):
    monkeypatch.setenv("GARDENING_TEST_SERVICE", command)
    monkeypatch.setattr(client, "START_LIMIT", 1)
    raised = pytest.raises(RuntimeError, match=f"^The service did not {reason}$")
    with lasts(0, LIMIT), raised, run():
        pass
    assert log in capfd.readouterr().err


HAS_ENDED = partial(pytest.raises, RuntimeError, match="^The service has ended")


def test_service_that_has_ended_says_so_at_the_next_call_and_at_the_end():
    others = workers(os.getpid())
    with HAS_ENDED(), run() as service:
        [process] = {*workers(os.getpid())} - {*others}
        os.kill(process, signal.SIGKILL)
        assert refuses(service.url)
        with HAS_ENDED():
            service.with_new_account()


ENDS = {"-": nullcontext, "exit 143": nullcontext, "exit 1": HAS_ENDED, "exit 137": HAS_ENDED}


@pytest.mark.parametrize("end, outcome", ENDS.items())
def test_shell_around_the_service_may_end_by_the_signal(monkeypatch, end, outcome):
    script = f"exec 3<&0; trap '{end}' TERM; cd {ROOT}; {shlex.join(COMMAND)} <&3 & wait"
    monkeypatch.setenv("GARDENING_TEST_SERVICE", shlex.join(["sh", "-c", script]))
    with outcome(), run() as service:
        service.with_new_account()
    assert refuses(service.url)


def test_service_that_is_silent_is_an_error_after_the_limit(monkeypatch):
    monkeypatch.setattr(client, "LIMIT", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        closing = threading.Timer(5, silent.close)  # if nothing else ends the call
        closing.start()
        with pytest.raises(TimeoutError):
            client.Service(url_of(silent)).with_new_account()
        closing.cancel()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_any_process_can_use_a_fixture(gardening):
    """A forked one, as of Django's parallel tests, and one that was sent a copy."""
    copy = pickle.loads(pickle.dumps(gardening))
    copy.plan(["429"])
    child = os.fork()
    if child == 0:
        left = []
        try:
            left = gardening.left()
        finally:
            os._exit(len(left))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_log_is_on_standard_error_which_pytest_shows(monkeypatch, capfd):
    monkeypatch.setenv("FLASK_DEBUG", "1")  # theirs, which would change the response
    with run() as service:
        assert call_projects(service.url, service.issue_token(fail=["500"]))[0] == 500
    assert "RuntimeError: planned for this token" in capfd.readouterr().err


def test_fixture_of_a_test_works_on_its_own_account(gardening, gardening_service):
    tokens = [
        gardening.issue_token(),
        gardening.issue_token(fail=["429"]),
        gardening.issue_token(expired=True),
        gardening_service.issue_token(gardening.account),
        gardening_service.issue_token(),
    ]
    assert call_projects(gardening.url, gardening.token, "POST", {})[0] == 201
    responses = [call_projects(gardening.url, token) for token in tokens]
    assert [status for status, _ in responses] == [200, 429, 401, 200, 200]
    assert [len(responses[number][1]) for number in (0, 3, 4)] == [1, 1, 0]
    assert gardening.headers == {"Authorization": f"Bearer {gardening.token}"}


def test_fixtures_plan_failures_have_the_requests_and_revoke(gardening, gardening_service):
    """By default, the fixture of a test does so with its own token."""
    token = gardening.issue_token(fail=["502"])
    gardening_service.plan(token, ("429", "504"))
    gardening.plan(["504"])
    assert call_projects(gardening.url, token)[0] == 429
    assert gardening.left(token) == gardening_service.left(token) == ["504"]
    assert gardening.left() == ["504"]
    assert call_projects(gardening.url, gardening.token, "POST", {})[0] == 504
    assert gardening.left() == []
    assert [each["method"] for each in gardening_service.requests(token)] == ["GET"]
    assert [each["method"] for each in gardening.requests] == ["POST"]
    another = gardening.issue_token()
    gardening.revoke(token)
    gardening_service.revoke(another)
    gardening.revoke()
    for revoked in (token, another, gardening.token):
        assert call_projects(gardening.url, revoked)[0] == 401


def test_unknown_failure_or_token_is_an_error(gardening, gardening_service):
    with pytest.raises(ValueError, match="'5O3' is not one of"):
        gardening.plan(["5O3"])
    plan = partial(gardening_service.plan, fail=[])
    asks = gardening_service.left, gardening_service.requests, gardening_service.revoke
    for ask in (*asks, plan):
        for unknown in ("gardening_x", "a b\n", "ü"):
            with pytest.raises(ValueError, match="There is no such token"):
                ask(unknown)


RUNNING = """
import sys, urllib.request
import gardening_service

with gardening_service.run() as service:
    gardening = service.with_new_account()
    url = gardening.url + "/api/v1/gardening/projects"
    request = urllib.request.Request(url, headers=gardening.headers)
    assert urllib.request.urlopen(request).read() == b"[]"
    assert [each["method"] for each in gardening.requests] == ["GET"]
    assert "pytest" not in sys.modules
    print(service.url)
"""


def test_service_runs_without_pytest_for_the_time_of_a_with(their_environment):
    theirs = their_environment | {"PYTHONPATH": str(ROOT / "testservice")}
    command = [sys.executable, "-Werror", "-c", RUNNING]
    ended = running.run(*command, folder="/", environment=theirs)
    assert refuses(ended.stdout.strip())
