"""The command gardening-test-service, as a program in any language uses it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from urllib.request import urlopen

import pytest

from helpers.running import (
    LIMIT,
    PROJECTS,
    ROOT,
    hold_port,
    port_of,
    run,
    wait_for,
    workers,
)
from helpers.testservice import call_projects, call_test_tokens, connect, refuses

COMMAND = [sys.executable, "-E", "-m", "testservice"]


@pytest.fixture
def start(tmp_path):
    """A function that starts the command, or another that does, for a `with`.

    Fails if, after the test, the command has left a file.
    """
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
                yield process
                assert not limit.finished.is_set(), "Only the limit has ended it."
            finally:
                limit.cancel()
                process.kill()

    yield start
    assert list(place.iterdir()) == []


@pytest.fixture
def service(start):
    with start() as service:
        yield service


def printed_by(service):
    """What it prints once it responds."""
    return json.loads(service.stdout.readline())


def assert_goes_on(service, ready):
    assert [call_projects(**ready)[0] for _ in range(20)] == 20 * [200]
    with pytest.raises(subprocess.TimeoutExpired):
        service.wait(timeout=0.3)


def assert_ends_in_silence(service):
    """It says nothing more on standard output or error, which its last process closes."""
    assert service.communicate(timeout=LIMIT) == ("", "")
    assert service.returncode == 0


def test_command_prints_an_address_and_a_token_that_work(service):
    ready = printed_by(service)
    assert list(ready) == ["url", "token"]
    assert call_projects(**ready, method="POST", body={"name": "Park"})[0] == 201
    assert len(call_projects(**ready)[1]) == 1
    assert workers(service.pid) == []  # the data would end with any of them


def test_issued_token_comes_with_its_account_and_plan(gardening_service):
    given = {"account": "Zoe\u0308", "fail": ["lost", "429"]}
    status, issued = call_test_tokens(gardening_service.url, "POST", body=given)
    token = issued.pop("token")
    assert (status, issued) == (201, {"account": "Zoë", "fail": ["lost", "429"]})
    found = call_test_tokens(gardening_service.url, "GET", token)
    assert found == (200, issued | {"requests": []})


def test_token_without_an_account_is_for_a_new_one(gardening_service):
    accounts = set()
    for given in (None, {}, {"account": None, "expired": None, "fail": None}):
        status, issued = call_test_tokens(gardening_service.url, "POST", body=given)
        assert (status, issued["fail"]) == (201, [])
        assert call_projects(gardening_service.url, issued["token"]) == (200, [])
        accounts.add(issued["account"])
    assert len(accounts) == 3


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


@pytest.mark.parametrize("empty", [{"fail": []}, {"fail": None}, {}])
def test_plan_can_be_emptied(gardening, empty):
    gardening.plan(["504"])
    assert call_test_tokens(gardening.url, "PUT", gardening.token, empty) == (204, None)
    assert call_projects(gardening.url, gardening.token)[0] == 200


def test_journal_has_each_request_as_it_was_sent(gardening):
    path = PROJECTS + "/a%20b?x=%2F&x"
    headers = {"If_Match": '"1-2"', "Idempotency_Key": "ä".encode(), "X_Y": "z"}
    with connect(gardening.url, gardening.token) as client:
        client.fetch("PUT", path, b'{"name": "\xc3\xa9\xff"}', **headers)
        client.fetch("GET", PROJECTS)
    put, get = gardening.requests
    assert put == {
        "method": "PUT",
        "path": path,
        "headers": {
            "Host": gardening.url.removeprefix("http://"),
            "Accept-Encoding": "identity",
            "Content-Length": "15",
            "If-Match": '"1-2"',
            "Idempotency-Key": "Ã¤",  # as HTTP has it, in Latin-1
            "X-Y": "z",
        },
        "body": '{"name": "é\ufffd"}',  # the last byte of the name is not UTF-8
        "status": 422,
    }
    assert (get["method"], get["path"], get["body"], get["status"]) == ("GET", PROJECTS, "", 200)


def test_plan_and_journal_of_a_token_are_for_any_path_but_those_of_tokens(
    gardening, gardening_service
):
    token = gardening.issue_token(fail=["502", "none", "429"])
    paths = ["/nowhere", "/test/tokens", "//test/tokens", "/api/v1/hello-service"]
    with connect(gardening.url, token) as client:
        assert [client.fetch("GET", path)[0] for path in paths] == [502, 405, 405, 200]
    requests = gardening_service.requests(token)
    assert [request["path"] for request in requests] == [paths[0], paths[3]]
    assert gardening.left(token) == ["429"]
    assert gardening.requests == []


def test_chunked_body_is_in_the_journal_and_reaches_the_service(gardening):
    chunks = [b'{"name": ', b'"Park"}'.rjust(50_000)]
    with connect(gardening.url, gardening.token) as client:
        client.fetch("POST", PROJECTS, chunks, **{"Content-Type": JSON})
    [project] = call_projects(gardening.url, gardening.token)[1]
    assert project["name"] == "Park"
    request = gardening.requests[0]
    assert request["body"].encode() == b"".join(chunks)
    assert request["headers"]["Transfer-Encoding"] == "chunked"


def test_journal_has_of_a_long_body_what_the_service_reads(gardening):
    with connect(gardening.url, gardening.token) as client:
        assert client.fetch("POST", PROJECTS, bytes(200_000), **{"Content-Type": JSON})[0] == 413
    assert len(gardening.requests[0]["body"]) == 65_537


def test_journal_keeps_the_last_thousand_requests(gardening):
    with connect(gardening.url, gardening.token) as client:
        for number in range(1002):
            client.fetch("GET", f"/{number}")
    kept = [each["path"] for each in gardening.requests]
    assert kept == [f"/{number}" for number in range(2, 1002)]


def test_revoked_token_is_forgotten(gardening):
    url, token = gardening.url, gardening.issue_token()
    assert call_test_tokens(url, "DELETE", token) == (204, None)
    status, problem = call_test_tokens(url, "GET", token)
    assert (status, problem["detail"]) == (404, "There is no such token.")
    assert call_projects(url, gardening.token)[0] == 200


def test_sixty_slow_requests_hold_up_nobody(service):
    ready = printed_by(service)
    with ExitStack() as clients:
        for _ in range(60):
            slow = call_test_tokens(ready["url"], "POST", body={"fail": ["slow:300"]})[1]["token"]
            client = clients.enter_context(connect(ready["url"], slow))
            client.request("GET", PROJECTS, headers=client.authorization)
        assert call_projects(**ready) == (200, [])


@pytest.mark.parametrize("is_blocking", [True, False])
def test_pipe_at_the_input_ends_the_service_when_it_closes_and_not_before(start, is_blocking):
    theirs, ours = os.pipe()
    os.set_blocking(theirs, is_blocking)
    with open(theirs) as stdin, open(ours, "wb", 0) as pipe, start(stdin=stdin) as service:
        ready = printed_by(service)
        pipe.write(b"y\n")
        assert_goes_on(service, ready)
        pipe.close()
        assert_ends_in_silence(service)
        assert refuses(ready["url"])


def test_socket_at_the_input_is_a_pipe_that_may_close_in_one_direction(start):
    """As a pipe of Node.js is and does."""
    ours, theirs = socket.socketpair()
    with ours, theirs, start(stdin=theirs) as service:
        assert_goes_on(service, printed_by(service))
        ours.shutdown(socket.SHUT_WR)
        assert_ends_in_silence(service)


@pytest.mark.parametrize("left", ["", "y\n"])
def test_pipe_that_is_closed_from_the_start_is_an_error(left):
    """As under `make -j2`, where silence would be a green build."""
    ended = run(*COMMAND, status=1, input=left)
    assert ended.stdout == ""
    assert "add < /dev/null" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signal_ends_the_service_at_once(service, name):
    """Also while a connection is open and a response is on its way."""
    url = printed_by(service)["url"]
    slow = call_test_tokens(url, "POST", body={"fail": ["slow:300"]})[1]["token"]
    with connect(url, slow) as client:
        client.request("GET", PROJECTS, headers=client.authorization)
        wait_for(lambda: call_test_tokens(url, "GET", slow)[1]["fail"] == [])
        service.send_signal(signal.Signals[name])
        assert service.wait(LIMIT) == 0
        with pytest.raises(ConnectionError):
            client.getresponse()
    assert_ends_in_silence(service)
    assert refuses(url)


@pytest.mark.parametrize("redirection", ["< /dev/null", "< README.md", "<&-"])
def test_other_input_does_not_end_the_service(start, redirection):
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND]
    with start(command=command) as service:
        assert_goes_on(service, printed_by(service))
        service.terminate()
        assert_ends_in_silence(service)


def test_service_outlives_the_shell_that_started_it(start):
    command = ["sh", "-c", '"$@" & echo $!', "sh", *COMMAND]
    with start(command=command) as shell:
        pid = int(shell.stdout.readline())
        ready = printed_by(shell)
        assert shell.wait(LIMIT) == 0
        try:
            deadline = time.monotonic() + 1.5  # gunicorn's worker looks once a second
            while time.monotonic() < deadline:
                assert call_projects(**ready) == (200, [])
        finally:
            os.kill(pid, signal.SIGTERM)
        assert_ends_in_silence(shell)


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
            assert printed_by(service)["url"] == f"http://{address}"
        holder.listen()
        command = [*COMMAND, "--bind", address]
        message = run(*command, status=2, stdin=subprocess.DEVNULL).stderr
    assert message.count("\n") == 1
    assert address in message and "in use" in message


def assert_printed(start, host, printed):
    with start("--bind", f"{host}:0") as service:
        url = printed_by(service)["url"]
        assert url.startswith(f"http://{printed}:")
        with urlopen(f"{url}/health", timeout=LIMIT) as response:
            assert response.status == 200


def test_printed_address_can_be_called(start):
    assert_printed(start, "0.0.0.0", "127.0.0.1")


def test_client_that_does_not_close_its_connection_delays_nobody(gardening):
    request = "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port_of(gardening.url))) as idle:
        idle.sendall(request.encode())
        while idle.recv(4096):
            pass
        started = time.monotonic()
        assert call_projects(gardening.url, gardening.token) == (200, [])
        assert time.monotonic() - started < 1


OLD_SQLITE = """
import runpy, sqlite3
sqlite3.sqlite_version, sqlite3.sqlite_version_info = "3.34.1", (3, 34, 1)
runpy.run_module("testservice", run_name="__main__")
"""


def test_old_sqlite_is_refused_in_one_line():
    command = [sys.executable, "-c", OLD_SQLITE]
    ended = run(*command, status=1, stdin=subprocess.DEVNULL)
    assert ended.stdout == ""
    assert "3.34.1" in ended.stderr and "3.37" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_missing_packages_are_named_with_what_to_do():
    """After `pip install --no-deps`, as in a Python without any package."""
    command = [sys.executable, "-S", *COMMAND[1:]]
    ended = run(*command, status=1, stdin=subprocess.DEVNULL)
    assert ended.stderr.startswith("No module named ")
    assert "set GARDENING_TEST_SERVICE" in ended.stderr
    assert ended.stderr.count("\n") == 1
