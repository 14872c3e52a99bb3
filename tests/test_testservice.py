"""The command gardening-test-service, as a program in any language uses it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from http.client import RemoteDisconnected
from statistics import median
from urllib.request import urlopen

import pytest

from helpers.running import (
    LIMIT,
    PROJECTS,
    ROOT,
    at_once,
    hold_port,
    run,
    wait_for,
    workers,
)
from helpers.testservice import (
    call_projects,
    call_test_tokens,
    connect,
    refuses,
)

COMMAND = [sys.executable, "-E", "-m", "testservice"]
AT_TERMINAL = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"


class Command:
    """The command, running."""

    def __init__(self, process, place):
        self.process, self.place = process, place

    def read(self):
        return json.loads(self.process.stdout.readline())

    def errors(self):
        """What it said on standard error, which each of its processes holds to its end.

        Fails if it leaves a file, or says anything else on standard output.
        """
        output, errors = self.process.communicate(timeout=LIMIT)
        assert (output, list(self.place.iterdir())) == ("", [])
        return errors


@pytest.fixture
def start(tmp_path):
    """A function that starts the command, or another that does, for a `with`."""
    place = tmp_path / "place"
    place.mkdir()

    @contextmanager
    def start(*options, command=COMMAND, stdin=subprocess.PIPE):
        process = subprocess.Popen(
            [*command, *options],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(place)},
        )
        limit = threading.Timer(LIMIT, process.kill)
        limit.start()
        with process:
            try:
                yield Command(process, place)
                assert not limit.finished.is_set(), "Only the limit has ended it."
            finally:
                limit.cancel()
                process.kill()

    return start


@pytest.fixture
def service(start):
    with start() as service:
        yield service


def issue(url, **fields):
    status, issued = call_test_tokens(url, "POST", body=fields)
    assert status == 201
    return issued["token"]


def test_command_prints_an_address_and_a_token_that_work(service):
    ready = service.read()
    assert list(ready) == ["url", "token"]
    assert call_projects(**ready, method="POST", body={"name": "Park"})[0] == 201
    assert len(call_projects(**ready)[1]) == 1
    assert workers(service.process.pid) == []  # the data would end with any of them


GIVEN = [
    None,  # no body at all
    {},
    {"account": None, "expired": None, "fail": None},
    {"account": "Zoë O'Hara", "expired": False, "fail": []},
    {"account": "Zoe\u0308", "fail": ["lost", "429"]},
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_issued_token_is_told_with_its_account_and_plan(gardening_service, given):
    status, issued = call_test_tokens(gardening_service.url, "POST", body=given)
    assert status == 201
    assert {*issued} == {"token", "account", "fail"}
    assert issued["token"].startswith("gardening_")
    given = given or {}
    account = given.get("account") or issued["account"]
    assert issued["account"] == account.replace("e\u0308", "ë")
    assert issued["fail"] == (given.get("fail") or [])
    found = call_test_tokens(gardening_service.url, "GET", issued.pop("token"))
    assert found == (200, issued | {"requests": []})


JSON = "application/json"
WRONG = [
    (b"{", JSON, 400, None),
    (b"{}", None, 415, None),
    (b"[]", JSON, 422, "_schema"),
    (b'{"account": "\\ud800"}', JSON, 422, "account"),
    (b'{"Account": "ann"}', JSON, 422, "Account"),
    (b'{"expired": "soon"}', JSON, 422, "expired"),
    (b'{"fail": "lost"}', JSON, 422, "fail"),
]


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize(("body", "kind", "status", "field"), WRONG)
def test_wrong_request_is_refused_like_a_wrong_project(
    gardening, method, body, kind, status, field
):
    headers = {"Content-Type": kind} if kind else {}
    path = "/test/tokens" if method == "POST" else f"/test/tokens/{gardening.token}"
    with connect(gardening.url) as client:
        response = client.fetch(method, path, body, **headers)
    problem = json.loads(response[2])
    assert (response[0], problem["status"]) == (status, status)
    assert response[1]["Content-Type"] == "application/problem+json"
    assert [*problem.get("errors", {})] == [field] * (field is not None)


def plan_of(url, token):
    status, found = call_test_tokens(url, "GET", token)
    assert (status, found["account"]) == (200, "ann")
    return found["fail"]


def test_plan_of_a_token_in_use_can_be_replaced(gardening_service):
    url = gardening_service.url
    token = issue(url, account="ann", fail=["502", "502"])
    assert call_projects(url, token)[0] == 502
    replaced = call_test_tokens(url, "PUT", token, {"fail": ["429", "none", "504"]})
    assert replaced == (204, None)
    assert plan_of(url, token) == ["429", "none", "504"]
    assert [call_projects(url, token)[0] for _ in range(2)] == [429, 200]
    for empty in ({"fail": []}, {"fail": None}, {}):
        assert call_test_tokens(url, "PUT", token, {"fail": ["504"]})[0] == 204
        assert call_test_tokens(url, "PUT", token, empty)[0] == 204
        assert call_projects(url, token)[0] == 200


def journal_of(url, token):
    return call_test_tokens(url, "GET", token)[1]["requests"]


def test_journal_has_each_request_as_it_was_sent(gardening):
    path = PROJECTS + "/a%20b?x=%2F&x"
    headers = {"If_Match": '"1-2"', "Idempotency_Key": "ä".encode(), "X_Y": "z"}
    with connect(gardening.url, gardening.token) as client:
        client.fetch("PUT", path, '{"name": "é"}'.encode(), **headers)
        client.fetch("GET", PROJECTS)
    put, get = journal_of(gardening.url, gardening.token)
    assert put == {
        "method": "PUT",
        "path": path,
        "headers": {
            "Host": gardening.url.removeprefix("http://"),
            "Accept-Encoding": "identity",
            "Content-Length": "14",
            "If-Match": '"1-2"',
            "Idempotency-Key": "Ã¤",  # as HTTP has it, in Latin-1
            "X-Y": "z",
        },
        "body": '{"name": "é"}',
    }
    assert (get["method"], get["path"], get["body"]) == ("GET", PROJECTS, "")
    assert not {"authorization", "sent-path"} & {*map(str.lower, get["headers"])}


def test_body_that_is_not_utf_8_is_in_the_journal_as_far_as_it_is_text(gardening):
    with connect(gardening.url, gardening.token) as client:
        sent = client.fetch("POST", PROJECTS, b"a\xffb", **{"Content-Type": JSON})
    assert sent[0] == 400
    assert journal_of(gardening.url, gardening.token)[0]["body"] == "a\ufffdb"


def test_journal_and_plan_are_the_tokens_without_the_paths_of_tokens(gardening_service):
    url = gardening_service.url
    token = issue(url, account="ann", fail=["none", "none", "429"])
    other = issue(url, account="ann")
    for path in ("/nowhere", "/test/tokens", "/api/v1/hello-service"):
        with connect(url, token) as client:
            client.fetch("GET", path)
    paths = [request["path"] for request in journal_of(url, token)]
    assert paths == ["/nowhere", "/api/v1/hello-service"]
    assert plan_of(url, token) == ["429"]
    assert journal_of(url, other) == []


def chunks():
    yield b'{"name": '
    yield b'"Park"}'.rjust(50_000)


@pytest.mark.parametrize("failure", ["none", "503-unknown", "504", "lost"])
def test_chunked_body_is_in_the_journal_and_reaches_the_service(gardening, failure):
    token = gardening.issue_token(fail=[failure])
    with connect(gardening.url, token) as client, suppress(RemoteDisconnected):
        client.fetch("POST", PROJECTS, chunks(), **{"Content-Type": JSON})
    [project] = call_projects(gardening.url, gardening.token)[1]
    assert project["name"] == "Park"
    [request] = journal_of(gardening.url, token)
    assert request["body"].encode() == b"".join(chunks())
    assert request["headers"]["Transfer-Encoding"] == "chunked"


def test_journal_keeps_the_last_thousand_requests(gardening):
    with connect(gardening.url, gardening.token) as client:
        for number in range(1002):
            client.fetch("GET", f"/{number}")
    kept = [each["path"] for each in journal_of(gardening.url, gardening.token)]
    assert kept == [f"/{number}" for number in range(2, 1002)]


def test_revoked_token_gets_401_and_is_forgotten(gardening_service):
    url = gardening_service.url
    token, other = issue(url, account="ann"), issue(url, account="ann")
    assert call_test_tokens(url, "DELETE", token) == (204, None)
    assert [call_projects(url, each)[0] for each in (token, other)] == [401, 200]
    for method, body in {"GET": None, "PUT": {"fail": []}, "DELETE": None}.items():
        status, problem = call_test_tokens(url, method, token, body)
        assert (status, problem["detail"]) == (404, "There is no such token.")


def test_sixty_slow_requests_take_three_seconds_and_hold_up_nobody(gardening_service):
    slow = [gardening_service.issue_token(fail=["slow"]) for _ in range(60)]
    good = gardening_service.issue_token()

    def seconds(number):
        if number == 60:  # once all the others wait
            wait_for(lambda: not any(map(gardening_service.left, slow)))
        started = time.monotonic()
        call_projects(gardening_service.url, [*slow, good][number])
        return time.monotonic() - started

    *waited, held_up = at_once(seconds, 61)
    assert held_up < 2
    assert 3 <= min(waited) < 4
    assert max(waited) < 6  # which two rounds would take


def test_end_of_input_ends_the_service(service):
    url = service.read()["url"]
    assert service.errors() == ""
    assert service.process.returncode == 0
    assert refuses(url)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signal_ends_the_service_at_once(start, name):
    """Also while a connection is open and a response is on its way."""
    with start() as service:
        ready = service.read()
        token = issue(ready["url"], fail=["slow:300"])
        with connect(ready["url"], token) as client:
            client.request("GET", PROJECTS, headers=client.authorization)
            wait_for(
                lambda: call_test_tokens(ready["url"], "GET", token)[1]["fail"] == []
            )
            service.process.send_signal(signal.Signals[name])
            assert service.process.wait(LIMIT) == 0
            with pytest.raises(ConnectionError):
                client.getresponse()
        assert service.errors() == ""
        assert refuses(ready["url"])


@pytest.mark.parametrize("name", ["/dev/null", "file", "closed"])
def test_other_input_does_not_end_the_service(start, tmp_path, name):
    (tmp_path / "file").write_text("ann\n\n")
    (tmp_path / "closed").touch()
    closing = ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND]
    command = closing if name == "closed" else COMMAND
    with open(tmp_path / name) as file, start(command=command, stdin=file) as service:
        ready = service.read()
        with pytest.raises(subprocess.TimeoutExpired):
            service.process.wait(timeout=0.3)
        assert call_projects(**ready) == (200, [])
        service.process.terminate()
        assert service.process.wait(LIMIT) == 0
        assert service.errors() == ""


# As under nohup.
DEAF = ["/bin/sh", "-c", 'trap "" HUP; exec "$@"', "sh", *COMMAND]


@contextmanager
def at_terminal(start, command=COMMAND, script=AT_TERMINAL):
    """The command at a terminal, and the file that is its user's screen and keyboard."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", script, *command]
    with (
        open(ours, "r+b", buffering=0) as user,
        open(theirs, "r+b", buffering=0) as terminal,
        start(command=command, stdin=terminal) as service,
    ):
        yield service, user
        assert service.errors() == ""


@pytest.mark.parametrize("key", [b"\x03", b"\x04"], ids=["Ctrl-C", "Ctrl-D"])
def test_key_ends_the_service_at_a_terminal(start, key):
    with at_terminal(start) as (service, user):
        assert list(json.loads(user.readline())) == ["url", "token"]
        user.write(key)
        assert service.process.wait(LIMIT) == 0


@pytest.mark.parametrize("command", [COMMAND, DEAF], ids=["", "ignored"])
def test_closed_terminal_ends_the_service(start, command):
    with at_terminal(start, command) as (service, user):
        url = json.loads(user.readline())["url"]
        user.close()
        service.process.wait(LIMIT)
    assert refuses(url)


NO_ADDRESS = ["::1:0", "a..b:0"]


@pytest.mark.parametrize(
    "option", ["--port=1", "x", "--bind", *(f"--bind={x}" for x in NO_ADDRESS)]
)
def test_wrong_option_is_refused_in_one_line(option):
    ended = run(*COMMAND, option, status=2, stdin=subprocess.DEVNULL)
    assert ended.stdout == ""
    assert ended.stderr.startswith("gardening-test-service: error: ")
    assert ended.stderr.count("\n") == 1
    assert ("[HOST]:PORT" in ended.stderr) == ("=" in option and "port" not in option)


def test_bind_chooses_the_address_which_must_be_free(start):
    with hold_port() as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        with start("--bind", address) as service:
            assert service.read()["url"] == f"http://{address}"
            assert service.errors() == ""
        holder.listen()
        with start("--bind", address) as service:
            errors = service.errors()
            assert service.process.returncode == 2
            assert errors.count("\n") == 1
            assert address in errors
            assert "in use" in errors


HOSTS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "localhost": "127.0.0.1"}


def assert_printed(start, host, printed):
    with start("--bind", f"{host}:0") as service:
        ready = service.read()
        assert ready["url"].startswith(f"http://{printed}:")
        with urlopen(f"{ready['url']}/health", timeout=LIMIT) as response:
            assert response.status == 200


@pytest.mark.parametrize(("host", "printed"), HOSTS.items())
def test_printed_address_can_be_called(start, host, printed):
    assert_printed(start, host, printed)


def test_reader_that_goes_away_ends_the_service_without_a_word(start):
    with start(stdin=subprocess.DEVNULL) as service:
        service.process.stdout.close()
        assert service.process.stderr.read() == ""
        assert service.process.wait(LIMIT) == 0


def test_response_does_not_wait_for_an_acknowledgement(gardening):
    """Without TCP_NODELAY, each takes 40 ms or more."""
    seconds = []
    with connect(gardening.url, gardening.token) as client:
        for _ in range(20):
            started = time.monotonic()
            client.fetch("GET", PROJECTS)
            seconds.append(time.monotonic() - started)
    assert median(seconds) < 0.03


def test_hangup_does_not_end_a_service_under_nohup(start):
    with start(command=DEAF, stdin=subprocess.DEVNULL) as service:
        ready = service.read()
        service.process.send_signal(signal.SIGHUP)
        assert call_projects(**ready) == (200, [])


def test_service_goes_on_after_the_process_that_started_it(start):
    """As after `nohup gardening-test-service &` in a shell that ends."""
    command = ["sh", "-c", '"$@" & echo $!', "sh", *COMMAND]
    with start(command=command, stdin=subprocess.DEVNULL) as service:
        pid = int(service.process.stdout.readline())
        ready = service.read()
        assert service.process.wait(LIMIT) == 0
        try:
            deadline = time.monotonic() + 1.5  # gunicorn's worker looks once a second
            while time.monotonic() < deadline:
                assert call_projects(**ready) == (200, [])
        finally:
            os.kill(pid, signal.SIGTERM)
        assert service.errors() == ""


def test_missing_packages_are_told_with_what_to_do():
    """After `pip install --no-deps`, as in a Python without any package."""
    command = [sys.executable, "-S", *COMMAND[1:]]
    ended = run(*command, status=1, stdin=subprocess.DEVNULL)
    assert ended.stderr.startswith("No module named ")
    assert "set GARDENING_TEST_SERVICE" in ended.stderr
    assert ended.stderr.count("\n") == 1
