"""The command gardening-test-service, as a program in any language uses it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from app import create_app
from helpers.running import (
    IPV6,
    LIMIT,
    PROJECTS,
    ROOT,
    at_once,
    hold_port,
    port_of,
    run,
    wait_for,
    workers,
)
from helpers.testservice import call_projects, connect, copy_service, refuses, steer
from testservice.server import Server

COMMAND = [sys.executable, "-E", "-m", "testservice"]
AT_TERMINAL = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
IN_BACKGROUND = """
import os, sys
os.login_tty(0)
if os.fork():
    os.wait()
else:
    os.setpgid(0, 0)
    os.execv(sys.argv[1], sys.argv[1:])
"""


class Service:
    """A running command."""

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
                yield Service(process, place)
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
    status, issued = steer(url, "POST", body=fields)
    assert status == 201
    return issued["token"]


def test_it_is_two_processes_that_say_where_they_are(service):
    ready = service.read()
    assert ready == {"url": ready["url"], "token": ready["token"]}
    assert call_projects(**ready, method="POST", body={"name": "Park"})[0] == 201
    assert len(call_projects(**ready)[1]) == 1
    assert len(workers(service.process.pid)) == 1


GIVEN = [
    None,  # no body at all
    {},
    {"account": None, "expired": None, "fail": None},
    {"account": "Zoë O'Hara", "expired": False, "fail": []},
    {"account": "Zoe\u0308", "fail": ["lost", "429"]},
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_issued_token_is_told_with_its_account_and_plan(gardening_service, given):
    status, issued = steer(gardening_service.url, "POST", body=given)
    assert status == 201
    assert {*issued} == {"token", "account", "fail"}
    assert issued["token"].startswith("gardening_")
    given = given or {}
    account = given.get("account") or issued["account"]
    assert issued["account"] == account.replace("e\u0308", "ë")
    assert issued["fail"] == (given.get("fail") or [])
    found = steer(gardening_service.url, "GET", issued.pop("token"))
    assert found == (200, issued)


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


@pytest.mark.parametrize(("body", "kind", "status", "field"), WRONG)
def test_wrong_request_is_refused_as_that_of_a_project_is(
    gardening_service, body, kind, status, field
):
    headers = {"Content-Type": kind} if kind else {}
    with connect(gardening_service.url) as client:
        response = client.fetch("POST", "/test/tokens", body, **headers)
    problem = json.loads(response[2])
    assert (response[0], problem["status"]) == (status, status)
    assert response[1]["Content-Type"] == "application/problem+json"
    assert [*problem.get("errors", {})] == [field] * (field is not None)


def test_what_is_left_of_a_plan_can_be_read(gardening_service):
    url = gardening_service.url
    token = issue(url, account="ann", fail=["429", "none", "502"])
    for rest in (["none", "502"], ["502"], [], []):
        call_projects(url, token)
        assert steer(url, "GET", token) == (200, {"account": "ann", "fail": rest})


def test_revoked_token_gets_401_and_is_forgotten(gardening_service):
    url = gardening_service.url
    token, other = issue(url, account="ann"), issue(url, account="ann")
    assert steer(url, "DELETE", token) == (204, None)
    assert [call_projects(url, each)[0] for each in (token, other)] == [401, 200]
    for method in ("GET", "DELETE"):
        status, problem = steer(url, method, token)
        assert (status, problem["detail"]) == (404, "There is no such token.")


def test_no_plan_applies_to_the_paths_that_steer(gardening_service):
    token = issue(gardening_service.url, fail=["429", "401"])
    with connect(gardening_service.url, token) as client:
        for _ in range(3):
            assert client.fetch("POST", "/test/tokens")[0] == 201
            status, _, content = client.fetch("GET", f"/test/tokens/{token}")
            assert (status, json.loads(content)["fail"]) == (200, ["429", "401"])


def test_only_the_test_service_can_be_steered(gardening_service):
    with connect(gardening_service.url) as client:
        document = json.loads(client.fetch("GET", "/openapi.json")[2])
        assert client.fetch("PATCH", "/test/tokens")[0] == 405
    assert not [path for path in document["paths"] if path.startswith("/test")]
    app = create_app({"DATABASE": ":memory:"})
    assert not [rule for rule in app.url_map.iter_rules() if "/test" in rule.rule]
    app.extensions["store"].close()


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


def test_end_of_input_ends_it(service):
    url = service.read()["url"]
    assert service.errors() == ""
    assert service.process.returncode == 0
    assert refuses(url)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signal_ends_it_at_once(start, name):
    """Also while a connection is open and a response is on its way."""
    with start() as service:
        ready = service.read()
        token = issue(ready["url"], fail=["slow"])
        with connect(ready["url"], token) as client:
            client.request("GET", PROJECTS, headers=client.authorization)
            wait_for(lambda: steer(ready["url"], "GET", token)[1]["fail"] == [])
            service.process.send_signal(signal.Signals[name])
            assert service.process.wait(LIMIT) == 0
            with pytest.raises(ConnectionError):
                client.getresponse()
        assert service.errors() == ""
        assert refuses(ready["url"])


def test_it_leaves_no_database_in_its_folder(tmp_path):
    copy_service(tmp_path)
    run(*COMMAND, folder=tmp_path, input="")
    assert not (tmp_path / "instance").exists()


@pytest.mark.parametrize("name", ["/dev/null", "file", "closed"])
def test_other_input_does_not_end_it(start, tmp_path, name):
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
def test_key_ends_it_at_a_terminal(start, key):
    with at_terminal(start) as (service, user):
        assert list(json.loads(user.readline())) == ["url", "token"]
        user.write(key)
        assert service.process.wait(LIMIT) == 0


@pytest.mark.parametrize("command", [COMMAND, DEAF], ids=["", "ignored"])
def test_closed_terminal_ends_it(start, command):
    with at_terminal(start, command) as (service, user):
        url = json.loads(user.readline())["url"]
        user.close()
        service.process.wait(LIMIT)
    assert refuses(url)


def test_job_in_the_background_is_not_stopped_by_its_terminal(start):
    with at_terminal(start, script=IN_BACKGROUND) as (service, user):
        ready = json.loads(user.readline())
        [job] = workers(service.process.pid)
        [worker] = workers(job)
        user.write(b"for the shell\n")
        state, threads = (Path(f"/proc/{worker}/{name}") for name in ("status", "task"))
        # It no longer reads its terminal, or was stopped.
        wait_for(lambda: len([*threads.iterdir()]) == 1 or "T (" in state.read_text())
        assert call_projects(**ready) == (200, [])
        os.kill(job, signal.SIGTERM)
        assert service.process.wait(LIMIT) == 0


NO_ADDRESS = ["x", "h:x", ":-1", "::1:0", "[::1", "127.0.0.1:70000", "a..b:0"]


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


@pytest.mark.parametrize(
    ("host", "printed"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        pytest.param("[::1]", "[::1]", marks=IPV6),
        pytest.param("[::]", "[::1]", marks=IPV6),
    ],
)
def test_address_that_it_prints_can_be_called(start, host, printed):
    with start("--bind", f"{host}:0") as service:
        ready = service.read()
        assert ready["url"].startswith(f"http://{printed}:")
        with urlopen(f"{ready['url']}/health", timeout=LIMIT) as response:
            assert response.status == 200


def test_reader_that_goes_away_before_it_starts_ends_it_without_a_word(start):
    with start(stdin=subprocess.DEVNULL) as service:
        service.process.stdout.close()
        assert service.process.stderr.read() == ""
        assert service.process.wait(LIMIT) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("killed", ["master", "worker"])
def test_end_of_one_process_is_the_end_of_both(start, killed, number):
    with start(stdin=subprocess.DEVNULL) as service:
        service.read()
        process = service.process
        [worker] = workers(process.pid)
        started = time.monotonic()
        os.kill(worker if killed == "worker" else process.pid, number)
        errors = service.errors()
        assert time.monotonic() - started < 5
        if killed == "worker":
            assert process.returncode == 1
            assert "The test service has ended" in errors
        else:
            assert process.returncode == (0 if number == signal.SIGTERM else -number)


def test_silent_client_does_not_keep_a_worker_alone_for_long(start):
    """gunicorn itself takes five seconds, but by its default thirty."""
    with start(stdin=subprocess.DEVNULL) as service:
        port = port_of(service.read()["url"])
        with socket.create_connection(("127.0.0.1", port), LIMIT):
            started = time.monotonic()
            service.process.kill()
            service.errors()
            assert time.monotonic() - started < 15


def test_silent_worker_is_not_killed_with_the_data():
    """By gunicorn's default, it would be after 30 s."""
    server = Server(socket.create_server(("127.0.0.1", 0)))
    os.close(int(server.cfg.bind[0].removeprefix("fd://")))
    assert (server.cfg.timeout, server.cfg.workers) == (0, 1)


def ignored(pid):
    """The signals that the process ignores."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(re.search(r"SigIgn:\s*(\w+)", status)[1], 16)
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}


def test_no_signal_reloads_it_or_starts_a_second_worker(start):
    """SIGHUP ends it, but not under nohup."""
    others = {signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR2, signal.SIGWINCH}
    with start(command=DEAF, stdin=subprocess.DEVNULL) as service:
        service.read()
        [worker] = workers(service.process.pid)
        assert ignored(service.process.pid) >= others | {signal.SIGHUP}
        assert ignored(worker) >= {signal.SIGHUP, signal.SIGINT}
        service.process.terminate()
        assert service.process.wait(LIMIT) == 0
