"""The command gardening-test-service, as a program in any language uses it."""

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from outside import HOSTILE, call, connect, copy_broken, left, marked, refuses
from running import LIMIT, PROJECTS, ROOT, run

COMMAND = [sys.executable, str(ROOT / "testservice.py")]
AT_TERMINAL = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
AS_PARENT = "import subprocess, sys; subprocess.run(sys.argv[1:], stdin=-1, check=True)"
FOREIGN = ("FLASK_", "GARDENING_", "GUNICORN_", "PYTHON", "WEB_CONCURRENCY")


class Service:
    """A running command; its processes are known by a mark in their environment."""

    def __init__(self, process, mark, place):
        self.process, self.mark, self.place = process, mark, place

    def read(self):
        return json.loads(self.process.stdout.readline())

    def ask(self, line):
        print(line, file=self.process.stdin, flush=True)
        return self.read()

    @property
    def gunicorn(self):
        """The process ids: of the master, then of its worker."""
        return [
            pid
            for pid in marked(self.mark)
            if b"\0gunicorn\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    @property
    def keeper(self):
        """The process id of the command's child that is not gunicorn."""
        [keeper] = {*marked(self.mark)} - {self.process.pid, *self.gunicorn}
        return keeper

    @property
    def folder(self):
        [folder] = self.place.iterdir()
        return folder

    def errors(self):
        """What it said on standard error; fails if it does not end, or leaves anything.

        Each of its processes holds its standard error.
        """
        try:
            output, errors = self.process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still there: {marked(self.mark)}")
        assert left(self.mark) == []
        assert list(self.place.iterdir()) == []
        assert output == ""
        return errors


@pytest.fixture
def start(tmp_path):
    """A function that starts the command, or another that does, for a `with`."""
    place = tmp_path / "place"
    place.mkdir()

    @contextmanager
    def start(*options, command=COMMAND, stdin=subprocess.PIPE, **variables):
        mark = f"MARK={uuid.uuid4()}"
        environment = os.environ | {"TMPDIR": str(place), "MARK": mark[5:]} | variables
        process = subprocess.Popen(
            [*command, *options],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        limit = threading.Timer(LIMIT, process.kill)
        limit.start()
        with process:
            try:
                yield Service(process, mark, place)
                assert not limit.finished.is_set(), "Only the limit has ended it."
            finally:
                limit.cancel()
                process.kill()

    return start


@pytest.fixture
def service(start):
    with start() as service:
        yield service


def test_input_and_output_are_lines_of_json(service):
    ready = service.read()
    assert ready == {"url": ready["url"], "token": ready["token"]}
    tokens = [ready["token"]]
    for line in ["ann", "", "ann", '{"account": "ann"}', "{}", "Zoë O'Hara"]:
        answer = service.ask(line)
        assert list(answer) == ["token"]
        tokens.append(answer["token"])
    for token in tokens:
        assert call(ready["url"], token, "POST", {})[0] == 201
    lists = [call(ready["url"], token)[1] for token in tokens]
    assert [len(projects) for projects in lists] == [1, 3, 1, 3, 3, 1, 1]
    assert lists[1] == lists[3] == lists[4]


WRONG = [
    " ",
    "a\tb",
    "a\u2028b",
    "{",
    "{} {}",
    '{"account": null}',
    '{"account": 1}',
    '{"account": "\\ud800"}',
    '{"account": "a\\u0000"}',
    '{"account": "ann", "expired": 1}',
    '{"account": "ann", "expired": "true"}',
    '{"account": "ann", "expires": true}',
    '{"Account": "ann"}',
    '{"account": ' + "9" * 5000 + "}",
    '{"account": ' * 100_000,
]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_wrong_line_is_answered_with_an_error(start, errors):
    with start(PYTHONIOENCODING=f"utf-8:{errors}") as service:
        service.read()
        for line in [line.encode() for line in WRONG] + [b"\xff"]:
            service.process.stdin.buffer.write(line + b"\n")
            answer = service.ask("ann")
            assert list(answer) == ["error"], line
            assert answer["error"]
            assert "\n" not in answer["error"]
            assert list(service.read()) == ["token"]


def test_service_announces_that_it_closes_on_an_unread_body(gardening_service):
    with connect(gardening_service.url, "unknown") as client:
        for size, connection in [(100, "keep-alive"), (100_000, "close")]:
            status, headers, _ = client.ask("POST", PROJECTS, {"name": size * "x"})
            assert (status, headers["Connection"]) == (401, connection)


def test_end_of_input_ends_it(service):
    url = service.read()["url"]
    assert len(marked(service.mark)) == 4
    assert service.errors() == ""
    assert service.process.returncode == 0
    assert refuses(url)


# As a script has it for what it starts with `&`.
IGNORING = ["sh", "-c", 'trap "" INT TERM; exec "$@"', "sh", *COMMAND]


@pytest.mark.parametrize("command", [COMMAND, IGNORING], ids=["", "ignored"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signal_ends_it(start, command, name):
    with start(command=command) as service:
        url = service.read()["url"]
        service.process.send_signal(signal.Signals[name])
        assert service.process.wait(LIMIT) == 0
        assert service.errors() == ""
        assert refuses(url)


def test_signal_to_each_of_its_processes_ends_it(start):
    """As from pkill -f."""
    with start() as service:
        url = service.read()["url"]
        for pid in marked(service.mark):
            with suppress(ProcessLookupError):  # it ended with one before
                os.kill(pid, signal.SIGTERM)
        service.process.wait(LIMIT)
        service.errors()
        assert refuses(url)


@pytest.mark.parametrize("command", [[], [sys.executable, "-c", AS_PARENT]])
def test_kill_of_it_or_of_its_parent_ends_it(start, command):
    with start(command=[*command, *COMMAND], stdin=subprocess.DEVNULL) as service:
        url = service.read()["url"]
        service.process.kill()
        assert service.errors() == ""
        assert refuses(url)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_kill_while_it_starts_leaves_nothing(start, count):
    with start() as service:
        while len(marked(service.mark)) < count:
            assert service.process.poll() is None
        service.process.kill()
        assert service.errors() == ""


@pytest.mark.parametrize("name", ["/dev/null", "file", "closed"])
def test_other_input_does_not_end_it(start, tmp_path, name):
    (tmp_path / "file").write_text("ann\n\n")
    closing = ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND]
    with (
        open(tmp_path / name.replace("closed", "file")) as file,
        start(command=closing if name == "closed" else COMMAND, stdin=file) as service,
    ):
        ready = service.read()
        if name == "file":
            assert [list(service.read()) for _ in range(2)] == [["token"], ["token"]]
        with pytest.raises(subprocess.TimeoutExpired):
            service.process.wait(timeout=0.3)
        assert call(**ready) == (200, [])
        service.process.terminate()
        assert service.process.wait(LIMIT) == 0
        assert service.errors() == ""


@pytest.mark.parametrize("key", [b"\x03", b"\x04"], ids=["Ctrl-C", "Ctrl-D"])
def test_key_ends_it_at_a_terminal(start, key):
    ours, theirs = os.openpty()
    at_terminal = [sys.executable, "-c", AT_TERMINAL, *COMMAND]
    with (
        open(ours, "rb", buffering=0) as screen,
        open(theirs, "r+b", buffering=0) as keyboard,
        start(command=at_terminal, stdin=keyboard) as service,
    ):
        assert list(json.loads(screen.readline())) == ["url", "token"]
        os.write(ours, b"ann\n")
        assert screen.readline() == b"ann\r\n"  # the echo
        assert list(json.loads(screen.readline())) == ["token"]
        os.write(ours, key)
        assert service.process.wait(LIMIT) == 0
        assert service.errors() == ""
        os.write(keyboard.fileno(), b"$\n")
        assert screen.readline() in (b"$\r\n", b"^C$\r\n")  # no traceback


# As under nohup.
DEAF = ["/bin/sh", "-c", 'trap "" HUP; exec "$@"', "sh", *COMMAND]


@pytest.mark.parametrize("command", [COMMAND, DEAF], ids=["", "ignored"])
def test_closed_terminal_ends_it(start, command):
    ours, theirs = os.openpty()
    at_terminal = [sys.executable, "-c", AT_TERMINAL, *command]
    with (
        open(theirs, "rb", buffering=0) as keyboard,
        start(command=at_terminal, stdin=keyboard) as service,
    ):
        with open(ours, "rb", buffering=0) as screen:
            url = json.loads(screen.readline())["url"]
        service.process.wait(LIMIT)
        assert service.errors() == ""
        assert refuses(url)


def test_settings_of_the_caller_do_not_reach_the_service(start, tmp_path):
    for name in ("app", "auth", "schemas", "store"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('theirs')")
    with start(PYTHONPATH=str(tmp_path), PYTHONOPTIMIZE="2", **HOSTILE) as service:
        ready = service.read()
        assert call(**ready, method="POST", body={"name": "Park"})[0] == 201
        assert len(service.gunicorn) == 2
        for pid in service.gunicorn:
            streams = {os.readlink(f"/proc/{pid}/fd/{number}") for number in (0, 1)}
            assert streams == {os.devnull}
            environment = dict(
                line.split("=", 1)
                for line in Path(f"/proc/{pid}/environ").read_text().split("\0")[:-1]
            )
            found = {k: v for k, v in environment.items() if k.startswith(FOREIGN)}
            assert found == {"FLASK_DATABASE": str(service.folder / "gardening.db")}
        assert service.errors() == ""


def test_two_run_side_by_side(start):
    with start() as one, start() as other:
        ready, others = one.read(), other.read()
        assert call(**ready)[0] == 200
        assert call(ready["url"], others["token"])[0] == 401
        one.process.terminate()
        assert one.process.wait(LIMIT) == 0
        assert call(**others)[0] == 200


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_explains_it_on_one_screen(option):
    ended = run(*COMMAND, option, stdin=subprocess.DEVNULL)
    assert ended.stderr == ""
    assert len(ended.stdout.splitlines()) <= 16
    for word in ("--bind HOST:PORT", "url", "token", "expired", "fail", "error"):
        assert word in ended.stdout
    for word in ("SIGTERM", "/dev/null"):
        assert word in ended.stdout


@pytest.mark.parametrize(
    "option",
    ["--port=1", "x", "--bind", *(f"--bind={x}" for x in ("x", "h:x", ":-1", "::1:0"))],
)
def test_wrong_option_is_one_line(option):
    ended = run(*COMMAND, option, status=2, stdin=subprocess.DEVNULL)
    assert ended.stdout == ""
    assert ended.stderr.startswith("gardening-test-service: error: ")
    assert ended.stderr.count("\n") == 1


def test_bind_chooses_the_address_which_must_be_free(start):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with start("--bind", address) as service:
            errors = service.errors()
            assert service.process.returncode == 2
            assert errors.count("\n") == 1
            assert address in errors
            assert "in use" in errors
    with start("--bind", address) as service:
        assert service.read()["url"] == f"http://{address}"


@pytest.mark.parametrize("host", ["0.0.0.0", ""])
def test_address_that_it_prints_can_be_called(start, host):
    with start("--bind", f"{host}:0") as service:
        ready = service.read()
        assert ready["url"].startswith("http://127.0.0.1:")
        assert call(**ready) == (200, [])


def test_service_that_does_not_start_says_why(start, tmp_path):
    copy_broken(tmp_path)
    command = [sys.executable, str(tmp_path / "testservice.py")]
    with start(command=command, stdin=subprocess.DEVNULL) as service:
        assert service.process.wait(LIMIT) == 1
        assert "RuntimeError: no soil" in service.errors()


def test_missing_folder_for_its_data_is_named(start, tmp_path):
    with start(TMPDIR=str(tmp_path / "missing")) as service:
        [line] = service.errors().splitlines()
        assert service.process.returncode == 1
        assert str(tmp_path / "missing") in line


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_service_that_somebody_ends_ends_the_command(service, name):
    url = service.read()["url"]
    os.kill(service.gunicorn[0], signal.Signals[name])
    assert service.process.wait(LIMIT) == 1
    assert "The service has ended." in service.errors()
    assert refuses(url)


def test_kill_of_its_keeper_ends_it(service):
    url = service.read()["url"]
    os.kill(service.keeper, signal.SIGKILL)
    assert service.process.wait(LIMIT) == 1
    assert "The service has ended." in service.errors()
    assert refuses(url)


@pytest.mark.parametrize("count", [1, 2], ids=["alone", "beside gunicorn"])
def test_kill_of_its_keeper_while_it_starts_leaves_nothing(start, count):
    """As soon as the command has so many children, of which the keeper is the first."""
    with start() as service:
        pid = service.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        while len(found := children.read_text().split()) < count:
            assert service.process.poll() is None
        os.kill(int(found[0]), signal.SIGKILL)
        assert service.process.wait(LIMIT) == 1
        assert "The service has ended." in service.errors()


def test_kill_of_it_and_of_its_keeper_leaves_no_process(service):
    """As from pkill -9 -f; nobody is left to remove the folder."""
    url, keeper = service.read()["url"], service.keeper
    service.process.send_signal(signal.SIGSTOP)
    os.kill(keeper, signal.SIGKILL)
    service.process.kill()
    service.process.communicate(timeout=LIMIT)
    assert left(service.mark) == []
    assert refuses(url)


def test_folder_for_its_data_is_private_and_may_be_relative(
    start, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with start(TMPDIR="place") as service:
        assert call(**service.read(), method="POST", body={})[0] == 201
        assert {file.name for file in service.folder.glob("*.db")} == {"gardening.db"}
        assert service.folder.stat().st_mode & 0o777 == 0o700
        service.process.terminate()
        assert service.errors() == ""


@pytest.fixture
def small_disk(start, tmp_path):
    """The place for the service's folder, of a MiB."""
    mount = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        "size=1m,nr_inodes=99",
        "tmpfs",
        tmp_path / "place",
    ]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small disk")
    yield tmp_path / "place"
    run("umount", "--lazy", tmp_path / "place")


def fill(disk):
    with suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(512))


def test_full_folder_at_the_start_is_one_line(small_disk, start):
    fill(small_disk)
    with start() as service:
        _, errors = service.process.communicate(timeout=LIMIT)
        assert service.process.returncode == 1
        assert errors.count("\n") == 1
        assert str(small_disk) in errors
        assert [file.name for file in small_disk.iterdir()] == ["filler"]


@pytest.mark.parametrize("line", ["", '{"fail": ["lost"]}'])
def test_full_folder_is_an_error_until_there_is_room(small_disk, start, line):
    with start() as service:
        service.read()
        fill(small_disk)
        while list(answer := service.ask(line)) == ["token"]:
            pass
        assert list(answer) == ["error"]
        (small_disk / "filler").unlink()
        assert list(service.ask(line)) == ["token"]
        service.process.stdin.close()
        assert service.process.wait(LIMIT) == 0


def test_folder_without_room_for_a_plan_is_an_error(small_disk, start):
    with start() as service:
        service.read()
        with suppress(OSError):
            for number in range(99):
                (small_disk / str(number)).touch()
        assert list(service.ask('{"fail": ["lost"]}')) == ["error"]
        assert list(service.ask("ann")) == ["token"]


@pytest.mark.parametrize("ready", [False, True])
def test_reader_that_goes_away_ends_it_without_a_word(start, ready):
    with start() as service:
        if ready:
            service.read()
        service.process.stdout.close()
        if ready:
            print("ann", file=service.process.stdin, flush=True)
        errors = service.process.stderr.read()
        service.process.wait(LIMIT)
        assert errors == ""
        assert left(service.mark) == []
        assert list(service.place.iterdir()) == []


def test_database_is_not_checked_by_a_process_of_its_own(start):
    """Which would cost a quarter of the start."""
    with start() as service:
        seen = set()
        while not select.select([service.process.stdout], [], [], 0)[0]:
            seen |= {*marked(service.mark)}
        service.read()
        assert seen <= {*marked(service.mark)}


def test_real_failures_are_in_its_log(service):
    ready = service.read()
    plan = '{"fail": ["500", "503", "503-unknown", "401", "lost", "dropped", "429"]}'
    kind = {"Content_Type": "application/json"}
    with connect(ready["url"], service.ask(plan)["token"]) as client:
        for status in (500, 503, 503, 401):
            assert client.fetch("POST", PROJECTS, "{}", **kind)[0] == status
        for _ in range(2):
            with pytest.raises(http.client.RemoteDisconnected):
                client.fetch("POST", PROJECTS, "{}", **kind)
        assert client.fetch("POST", PROJECTS, "{}", **kind)[0] == 429
    service.process.terminate()
    errors = service.errors()
    assert errors.count("Traceback (most recent call last)") == 1
    assert errors.count("RuntimeError: planned for this token") == 1
    assert errors.count("Database unavailable: planned for this token") == 2
