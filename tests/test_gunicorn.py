"""gunicorn.conf.py: what it does for hostile clients, stuck writers and operators."""

import fcntl
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from gunicorn.workers.gthread import STOP_KEEPALIVE_LINGER

from helpers.openapi import HELLO
from helpers.running import (
    BIN,
    LIMIT,
    PROJECTS,
    ROOT,
    TWO_WORKERS,
    Client,
    environment_of,
    gunicorn,
    replaced,
    run,
    token_on,
)

UNREAD = {  # requests that get a response before their body is read
    200: ("POST", HELLO, True, "application/json"),
    401: ("POST", PROJECTS, False, "application/json"),
    404: ("POST", "/nowhere", True, "application/json"),
    405: ("PATCH", PROJECTS, True, "application/json"),
    415: ("POST", PROJECTS, True, "text/plain"),
}
SIZES = [1_000, 60_000, 65_535, 65_536, 65_537, 100_000, 1_000_000]
MIX = [(status, size) for status in UNREAD for size in SIZES]


def set_up(environment, **changes):
    """The settings in gunicorn.conf.py, as gunicorn itself reads them."""
    # Loading the service itself on PostgreSQL would need the driver.
    command = [BIN / "gunicorn", "--print-config", "wsgiref.simple_server:demo_app"]
    printed = run(*command, environment=environment | changes).stdout
    return dict(re.findall(r"^(\w+) += (.*)$", printed, re.MULTILINE))


def open_connection(port):
    return socket.create_connection(("127.0.0.1", port), LIMIT)


def test_environment_sets_the_address(environment):
    settings = set_up(environment)
    assert settings["bind"] == "['127.0.0.1:8000']"
    # What the pages say of it, and no request shows.
    assert (settings["threads"], settings["keepalive"]) == ("2", "75")
    assert set_up(environment, GARDENING_DATABASE="postgresql://x")["threads"] == "4"
    assert "keepalive_timeout 1s;" in (ROOT / "deploy/nginx.conf").read_text()
    assert STOP_KEEPALIVE_LINGER == 2  # seconds, so nginx closes first, at a restart, too
    assert settings["control_socket_disable"] == "True"
    for empty in ("", " "):
        assert set_up(environment, GARDENING_BIND=empty, PORT=empty) == settings
    changed = set_up(environment, GARDENING_BIND="[::1]:8080", PORT="0")
    assert changed["bind"] == "['[::1]:8080']"
    assert set_up(environment, PORT="8080")["bind"] == "['0.0.0.0:8080']"
    for other in ("unix:/run/x", "fd://3", "127.0.0.1:65535", "localhost"):
        assert set_up(environment, GARDENING_BIND=other)["bind"] == f"['{other}']"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="there is no affinity")
def test_two_workers_start_for_each_core_that_may_be_used(environment):
    cores = os.sched_getaffinity(0)
    assert set_up(environment)["workers"] == str(2 * len(cores))
    os.sched_setaffinity(0, [min(cores)])  # of this thread, and of what it starts
    try:
        assert set_up(environment)["workers"] == "2"
        assert set_up(environment, WEB_CONCURRENCY="5")["workers"] == "5"
    finally:
        os.sched_setaffinity(0, cores)


NUMBER, RANGE = "must be a whole number,", "the port of GARDENING_BIND must be from 0 to 65535"
ADDRESS = "GARDENING_BIND must be HOST:PORT, [HOST]:PORT or unix:PATH"
REFUSED = [
    ("WEB_CONCURRENCY", "0", f"WEB_CONCURRENCY {NUMBER} 1 or more"),
    *[("PORT", port, f"PORT {NUMBER} from 1 to 65535") for port in ("0", "-1", "65536", "http")],
    ("GARDENING_BIND", "127.0.0.1:65536", RANGE),
    ("GARDENING_BIND", "[::1]:-1", RANGE),
    ("GARDENING_BIND", "23511", "GARDENING_BIND must have a host, too: HOST:23511"),
    ("GARDENING_BIND", "localhost:http", f"{ADDRESS}: 'http' is not a valid port number."),
]


@pytest.mark.parametrize("name, value, reason", REFUSED)
def test_setting_that_would_serve_nobody_is_refused_in_one_line(environment, name, value, reason):
    refused = run(BIN / "gunicorn", environment=environment | {name: value}, status=1)
    assert refused.stderr.strip() == f"Error: {reason}"


def test_address_that_has_no_effect_is_refused(environment):
    """Since gunicorn takes a socket of systemd's in its place, but not one of another process."""
    environment |= {"GARDENING_BIND": ":8001", "LISTEN_FDS": "1"}
    refused = run(BIN / "gunicorn", environment=environment, status=1)
    assert refused.stderr.startswith("Error: GARDENING_BIND has no effect: ")
    of_systemd = ["sh", "-c", f"LISTEN_PID=$$ exec {BIN}/gunicorn"]
    assert run(*of_systemd, environment=environment, status=1).stderr == refused.stderr
    assert set_up(environment, LISTEN_PID=str(os.getpid()))["bind"] == "[':8001']"


# The settings, and a worker that stops the service before it has signal handlers of its own.
STOPPED_EARLY = """
import os, runpy, signal, time
globals().update(runpy.run_path("gunicorn.conf.py"))

def post_fork(server, worker):
    os.kill(worker.ppid, signal.NAME)
    time.sleep(1)  # meanwhile, the main process tells the worker to end
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_service_that_is_stopped_while_a_worker_starts_ends_soon(environment, tmp_path, name):
    settings = tmp_path / "settings.py"
    settings.write_text(replaced(STOPPED_EARLY, {"NAME": name}))
    with gunicorn(environment, f"--config={settings}") as (process, _):
        assert process.wait(15) == 0  # seconds; a worker that missed the signal is killed after 30


def test_prefix_does_not_come_from_a_header(environment, token):
    """Whoever is trusted to send one."""
    environment |= {"FORWARDED_ALLOW_IPS": "*"}
    with gunicorn(environment) as (_, port), Client(port, token) as client:
        headers = client.authorization | {"SCRIPT_NAME": "/garden"}
        for address, status in [(f"/garden{PROJECTS}", 404), (PROJECTS, 200)]:
            client.request("GET", address, None, headers)
            response = client.getresponse()
            response.read()
            assert response.status == status


class Shared(NamedTuple):
    """A gunicorn for tests that change nothing which another one sees."""

    port: int
    database: str
    token: str  # of ann
    access_log: Path


@contextmanager
def start_shared(folder):
    database = str(folder / "gardening.db")
    token = token_on(database)
    log = folder / "access.log"
    options = environment_of(database), f"--error-logfile={folder}/error.log"
    with log.open("wb") as stdout, gunicorn(*options, stdout=stdout) as (_, port):
        yield Shared(port, database, token, log)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with start_shared(tmp_path_factory.mktemp("shared")) as shared:
        yield shared


@pytest.fixture(scope="module")
def logging(tmp_path_factory):
    """One of its own: a response of another test may be logged only after it has arrived."""
    with start_shared(tmp_path_factory.mktemp("logging")) as logging:
        yield logging


@pytest.fixture
def log(logging):
    """A function that sends raw requests, and returns their lines of the access log."""

    def log(*requests):
        with logging.access_log.open("rb") as lines:
            lines.seek(0, os.SEEK_END)
            for request in requests:
                head = f"{request}\r\nHost: x\r\nConnection: close\r\n\r\n"
                head = head.replace("TOKEN", logging.token)
                with open_connection(logging.port) as client:
                    client.sendall(head.encode())
                    while client.recv(65536):
                        pass
            return lines.read().decode().splitlines()

    return log


TIME = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def test_access_log_has_a_line_for_each_request(log):
    called = f"GET {PROJECTS}?page=0 HTTP/1.1\r\nX-Request-Id: 7f\r\n"
    lines = log(
        called + "Authorization: Bearer TOKEN",
        called + "Authorization: Bearer wrong",
        f"GET {PROJECTS}/none HTTP/1.1\r\nAuthorization: Bearer TOKEN",
        f"PURGE {HELLO}?secret=1 HTTP/1.1",
    )
    fields = rf'{TIME} "([^"]*)" "(\S+) (\S+)" (\d+) \d+ \d+ (.*)'
    found = [re.fullmatch(fields, line).groups() for line in lines]
    assert found == [
        ("ann/1", "GET", PROJECTS, "200", "7f"),
        ("-", "GET", PROJECTS, "401", "7f"),
        ("ann/1", "GET", f"{PROJECTS}/none", "404", "-"),
        ("-", "PURGE", HELLO, "200", "-"),
    ]


def test_request_line_may_have_8190_bytes(log):
    for size, status in [(8190, "200"), (8191, None)]:
        head, version = f"GET {HELLO}?", " HTTP/1.1"
        lines = log(head + "x" * (size - len(head + version)) + version)
        assert [line.split()[4] for line in lines] == [status] * bool(status)


def test_proxies_in_a_row_may_name_different_schemes(log):
    [line] = log(f"GET {HELLO} HTTP/1.1\r\nX-Forwarded-Proto: http\r\nX-Forwarded-Ssl: on")
    assert line.split()[4] == "200"


# gunicorn refuses a path with white space, or not in ASCII, without a line.
@pytest.mark.parametrize(
    "text, count",
    [('"200', 3), ('" 200', 2), ('\\" 200', 2), ("a b", 2), ("a\tb", 2), ("%0A", 3), ("\x85", 2)],
)
def test_nothing_in_a_path_or_header_forges_a_log_line(log, logging, text, count):
    lines = log(
        f"GET /{text} HTTP/1.1",
        f"GET / HTTP/1.1\r\nX-Request-Id: {text}",
        f"GET / HTTP/1.1\r\nAuthorization: Bearer {text}TOKEN",
    )
    for line in lines:
        assert logging.token not in line
        assert re.fullmatch(rf'{TIME} "-" "GET /([^\s"]|\\")*" (30[28]|404) \d+ \d+ [!-~]+', line)
    assert len(lines) == count


def is_now(text):
    """Whether this is the time in UTC."""
    time = datetime.fromisoformat(text).replace(tzinfo=UTC)
    return abs(datetime.now(UTC) - time) < timedelta(seconds=LIMIT)


def test_outage_names_the_request_as_the_access_log_does(
    environment, database, token, tmp_path, capfd
):
    """And the time in UTC, wherever the machine is: here, nine hours ahead."""
    path, log = f"{PROJECTS}/x%0A%22root%22", tmp_path / "access.log"
    with (
        log.open("wb") as stdout,
        gunicorn(environment | {"TZ": "JST-9"}, stdout=stdout) as (_, port),
        Client(port, token) as client,
    ):
        assert client.fetch("GET", HELLO)[0] == 200  # it has started
        os.remove(database)
        assert client.fetch("DELETE", f"{path}?secret=1", X_Request_Id="7f")[0] == 503
    time, line = log.read_text().splitlines()[1].split(" ", 1)
    assert re.fullmatch(rf'"-" "DELETE {path}" 503 \d+ \d+ 7f', line) and is_now(time)
    [line] = [each for each in capfd.readouterr().err.splitlines() if "Database" in each]
    time, rest = line.removeprefix("[").split("]", 1)
    assert rest.endswith(f" (DELETE {path}, request id 7f)") and is_now(time.replace(",", "."))


@pytest.mark.parametrize("journal, start", [("log", ""), ("another", f"{TIME} ")])
def test_line_has_no_time_where_journald_adds_one(environment, token, tmp_path, journal, start):
    """The variable may also come from a process that has started this one."""
    (tmp_path / "another").touch()
    with (tmp_path / "log").open("wb") as stdout:
        file = os.stat(tmp_path / journal)
        environment["JOURNAL_STREAM"] = f"{file.st_dev}:{file.st_ino}"
        with gunicorn(environment, stdout=stdout) as (_, port), Client(port, token) as client:
            assert client.fetch("GET", HELLO)[0] == 200
    assert re.match(f'{start}"-" "GET', (tmp_path / "log").read_text())


def test_standard_output_may_be_closed(environment):
    run("sh", "-c", 'exec "$0" --check-config >&-', BIN / "gunicorn", environment=environment)


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no such device")
@pytest.mark.parametrize(
    "output, encoding, error",
    [
        ("/dev/full", "utf-8", "No space left"),
        (None, "utf-8", "BrokenPipeError"),
        ("/dev/null", "iso-8859-1", "UnicodeEncodeError"),
    ],
)
def test_line_that_cannot_be_written_shows_no_token(
    environment, database, capfd, output, encoding, error
):
    token = token_on(database, "日本")
    environment |= {"PYTHONIOENCODING": encoding}
    with (
        open(output or closed_pipe(), "wb") as stdout,
        gunicorn(environment, stdout=stdout) as (_, port),
        Client(port, token) as client,
    ):
        for _ in range(2):
            assert client.call("GET", PROJECTS) == (200, [])
    printed = capfd.readouterr().err
    assert printed.count("--- Logging error ---") == 2
    assert error in printed
    assert token not in printed


def send(connection, method, path, headers, size, chunked):
    """Send a request as far as the server takes it."""
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    head = [f"{method} {path} HTTP/1.1", "Host: x", *headers, framing, "", ""]
    body = b"x" * size
    if chunked:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (size, body)
    with suppress(ConnectionError):
        connection.sendall("\r\n".join(head).encode() + body)


def receive(stream):
    """The status and the headers of a response, whose body is read."""
    status = int(stream.readline().split()[1])
    headers = dict(line.decode().rstrip().split(": ") for line in iter(stream.readline, b"\r\n"))
    stream.read(int(headers.get("Content-Length", 0)))
    return status, headers


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_unread_body_leaves_the_connection_usable_or_announces_its_end(shared, chunked):
    for status, size in [*MIX, (413, 65_537), (413, 100_000), (413, 1_000_000)]:
        method, path, signed, kind = UNREAD.get(status, UNREAD[415])
        kind = "application/json" if status == 413 else kind
        headers = [f"Content-Type: {kind}"]
        headers += [f"Authorization: Bearer {shared.token}"] * signed
        with open_connection(shared.port) as connection, connection.makefile("rb") as stream:
            send(connection, method, path, headers, size, chunked)
            found, responded = receive(stream)
            assert found == status
            if responded.get("Connection") != "close":
                send(connection, "GET", HELLO, [], 0, False)
                assert receive(stream)[0] == 200


def test_key_in_two_header_lines_is_refused(shared):
    """They arrive as one, joined by a comma, and a repetition with one line has another key."""
    token = token_on(shared.database, "of two lines")
    with Client(shared.port, token) as client:
        client.putrequest("POST", PROJECTS)
        for name, value in [
            *client.authorization.items(),
            ("Content-Type", "application/json"),
            ("Content-Length", "2"),
            *[("Idempotency-Key", "k")] * 2,
        ]:
            client.putheader(name, value)
        client.endheaders(b"{}")
        response = client.getresponse()
        assert (response.status, response.read().count(b"without a comma")) == (400, 1)
        assert client.call("GET", PROJECTS) == (200, [])


class Timed(NamedTuple):
    """A call, and when it started after the lock."""

    started: float
    status: int
    seconds: float


def test_stuck_writer_holds_up_neither_writers_nor_readers_for_long(environment, database):
    """2 processes of 2 threads, 8 writers and 2 readers, and the write lock is held."""

    def timed(method, body=None):
        with Client(port, token) as client:
            started = time.monotonic()
            status, _ = client.call(method, project_url, body)
            return Timed(started - held, status, time.monotonic() - started)

    def read(_):
        reads = [timed("GET")]
        while reads[-1].started < 7:
            time.sleep(0.05)
            reads.append(timed("GET"))
        return reads

    token = token_on(database)
    with gunicorn(environment, TWO_WORKERS) as (_, port), ThreadPoolExecutor(10) as threads:
        with Client(port, token) as client:
            project_url = f"{PROJECTS}/{client.call('POST', PROJECTS, {})[1]['id']}"
        with open(f"{database}-lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            held = time.monotonic()
            readers = [threads.submit(read, number) for number in range(2)]
            writes = list(threads.map(lambda _: timed("PUT", {}), range(8)))
            reads = [each for reader in readers for each in reader.result()]
        assert {write.status for write in writes} == {503}
        assert max(write.seconds for write in writes) < 6
        assert {read.status for read in reads} == {200}
        assert max(read.seconds for read in reads) < 4
        assert max(read.seconds for read in reads if read.started > 5) < 1
        assert timed("PUT", {}).status == 200


@pytest.mark.parametrize(
    "framing, body",
    [
        ("Content-Length: 100", b"{}"),
        ("Transfer-Encoding: chunked", b"5\r\n{}"),
        ("Transfer-Encoding: chunked", b"zz\r\n{}\r\n0\r\n\r\n"),
    ],
    ids=["ends early", "chunk ends early", "chunk without a size"],
)
def test_body_must_be_whole(shared, framing, body):
    token = token_on(shared.database, f"of {framing} {body!r}")
    head = [f"POST {PROJECTS} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    head += [f"Authorization: Bearer {token}", framing, "", ""]
    with open_connection(shared.port) as connection:
        connection.sendall("\r\n".join(head).encode() + body)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as stream:
            received = stream.read()
    assert received.startswith(b"HTTP/1.1 400")
    assert b"The body ended early" in received
    with Client(shared.port, token) as client:
        assert client.call("GET", PROJECTS) == (200, [])
