"""The service behind a real nginx, set up with the lines of OPERATIONS.md."""

import gzip
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import running
from running import PROJECTS, ROOT, at_once, gunicorn

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
HOST = "gardening.example.org"
Answer = tuple[int, http.client.HTTPMessage, bytes]
FRAME = """
daemon off; error_log stderr crit; pid {folder}/pid; {user}
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    {block}
}}
"""

pytestmark = pytest.mark.skipif(
    not (NGINX and shutil.which("openssl")), reason="nginx or openssl is not installed"
)


def operations(language: str) -> list[str]:
    """The blocks of OPERATIONS.md in this language."""
    text = (ROOT / "OPERATIONS.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def replaced(block: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert block.count(old) == 1, old
        block = block.replace(old, new)
    return block


class Proxy(NamedTuple):
    port: int  # of https
    plain_port: int


@contextmanager
def proxy(
    folder: Path,
    upstream: int,
    changes: dict[str, str] | None = None,
    origin: str | None = None,
) -> Iterator[Proxy]:
    """nginx as OPERATIONS.md has it, in front of the port; for an origin, if named."""
    block, prefix, maps, cors = operations("nginx")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    [command] = [text for text in operations("sh") if "openssl req" in text]
    places = {
        "/etc/ssl/certs/gardening.pem": str(certificate),
        "/etc/ssl/private/gardening.key": str(key),
    }
    command = replaced(command, places)
    subprocess.run(["sh", "-c", command], check=True, capture_output=True, timeout=20)
    extra = prefix
    if origin:
        extra += cors
        block = replaced(maps, {"https://app.example.org": origin}) + block
    with ExitStack() as listeners:
        ports, descriptors = [], []
        for _ in range(2):
            listener = socket.create_server(("127.0.0.1", 0))
            listeners.enter_context(listener)
            ports.append(listener.getsockname()[1])
            descriptors.append(listener.fileno())
        block = replaced(
            block,
            places
            | {
                "location / {": extra + "\n    location / {",
                "listen 443 ssl;": f"listen 127.0.0.1:{ports[0]} ssl;",
                "listen 80;": f"listen 127.0.0.1:{ports[1]};",
                "127.0.0.1:8000": f"127.0.0.1:{upstream}",
            }
            | {"rate=50r/s": "rate=100000r/s"}
            | (changes or {}),
        )
        user = "user root;" if os.getuid() == 0 else ""
        configuration = folder / "nginx.conf"
        configuration.write_text(FRAME.format(folder=folder, user=user, block=block))
        process = subprocess.Popen(
            [NGINX, "-p", folder, "-e", "stderr", "-c", configuration],
            # The sockets, already bound.
            env={"NGINX": "".join(f"{number};" for number in descriptors)},
            pass_fds=descriptors,
        )
    try:
        yield Proxy(*ports)
    finally:
        process.terminate()
        process.wait(20)


class Client(running.Client):
    """The same over TLS, whoever signed the certificate."""

    def connect(self) -> None:
        super().connect()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.sock.settimeout(20)
        self.sock = context.wrap_socket(self.sock, server_hostname=HOST)

    def fetch(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> Answer:
        """An answer that need not be in openapi.json."""
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.request(method, path, body, self.authorization | headers)
        response = self.getresponse()
        return response.status, response.headers, response.read()


def assert_problem(answer: Answer, status: int) -> None:
    found, headers, content = answer
    assert (found, headers["Content-Type"]) == (status, "application/problem+json")
    problem = json.loads(content)
    assert problem["status"] == status
    assert problem["title"] == http.HTTPStatus(status).phrase
    assert set(problem) == {"type", "title", "status", "detail"}


def mixed_load(
    port: int,
    token: str,
    count: int,
    meanwhile: Callable = lambda number, turn: None,
) -> list[int]:
    """The statuses of so many calls of each of 8 clients on kept-alive connections."""
    statuses = []

    def work(number: int) -> None:
        with Client(port, token) as client:
            for turn in range(count):
                meanwhile(number, turn)
                if turn % 4 == 0:
                    status, project = client.call("POST", PROJECTS, {"name": "x"})
                    url = f"{PROJECTS}/{project['id']}"
                elif turn % 4 == 1:
                    status, _ = client.call("PUT", url, {"name": "y"})
                elif turn % 4 == 2:
                    status, _ = client.call("GET", url)
                else:
                    status, _ = client.call("DELETE", url)
                statuses.append(status)

    at_once(work)
    return statuses


def test_thousands_of_requests_pass(environment, token, tmp_path):
    with gunicorn(environment) as (_, upstream), proxy(tmp_path, upstream) as nginx:
        statuses = mixed_load(nginx.port, token, 400)
    assert Counter(statuses) == {201: 800, 200: 1600, 204: 800}


def test_reload_under_load_drops_nothing(environment, token, tmp_path):
    def reload(number: int, turn: int) -> None:
        if (number, turn % 400) == (0, 200):
            os.kill(process.pid, signal.SIGHUP)

    with (
        gunicorn(environment) as (process, upstream),
        proxy(tmp_path, upstream) as nginx,
    ):
        statuses = mixed_load(nginx.port, token, 800, reload)
    assert len(statuses) == 8 * 800
    assert set(statuses) == {200, 201, 204}


def test_no_idle_connection_ends_in_a_502(environment, token, tmp_path):
    def pause(number: int, turn: int) -> None:
        # Around what the proxy (1 s) and the service (2 s) keep an idle connection.
        time.sleep([0.95, 0.99, 1.0, 1.01, 1.05, 1.98, 2.0, 2.02][number])

    with (
        gunicorn(environment, "--keep-alive=2") as (_, upstream),
        proxy(
            tmp_path, upstream, {"keepalive_timeout 60s": "keepalive_timeout 1s"}
        ) as nginx,
    ):
        statuses = mixed_load(nginx.port, token, 4, pause)
    assert len(statuses) == 32
    assert set(statuses) == {200, 201, 204}


@pytest.mark.parametrize("prefix", ["", "/garden"])
def test_location_leads_back_through_the_proxy(environment, token, tmp_path, prefix):
    with (
        gunicorn(environment) as (_, upstream),
        proxy(tmp_path, upstream) as nginx,
        Client(nginx.port, token) as client,
    ):
        _, headers, content = client.ask("POST", prefix + PROJECTS, {})
        assert headers["Location"].startswith(f"{prefix}{PROJECTS}/")
        assert client.call("GET", headers["Location"]) == (200, json.loads(content))


@pytest.fixture
def upstream(gardening):
    """The port of a running service."""
    return int(gardening.url.rpartition(":")[2])


@pytest.fixture
def nginx(upstream, tmp_path):
    with proxy(tmp_path, upstream) as nginx:
        yield nginx


@pytest.fixture
def client(nginx, gardening):
    with Client(nginx.port, gardening.token) as client:
        yield client


def test_http_leads_to_https(nginx):
    with running.Client(nginx.plain_port, "x") as client:
        client.request("POST", PROJECTS + "?page=1", "{}", {"Host": HOST})
        response = client.getresponse()
        assert response.status == 308
        assert response.headers["Location"] == f"https://{HOST}{PROJECTS}?page=1"


@pytest.mark.parametrize("size", [64 * 1024 + 1, 100_000, 1_000_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_long_body_is_refused_by_nginx(client, size, chunked):
    body = iter([b"x" * size]) if chunked else b"x" * size
    assert_problem(client.fetch("POST", PROJECTS, body), 413)
    assert client.call("GET", PROJECTS) == (200, [])


@pytest.mark.parametrize(
    "method, path, headers, status",
    [
        ("GET", "/../x", {}, 400),
        ("GET", "/%00", {}, 400),
        ("GET", PROJECTS, {"X": "x" * 10_000}, 400),
        ("GET", PROJECTS, {"Content_Length": "x"}, 400),
        ("GET", "/gardening-problem", {}, 404),
        ("TRACE", PROJECTS, {}, 405),
        ("GET", "/" + "x" * 10_000, {}, 414),
        ("POST", PROJECTS, {"Transfer_Encoding": "gzip"}, 501),
    ],
)
def test_refusal_of_nginx_is_a_problem_document(client, method, path, headers, status):
    answer = client.fetch(method, path, **headers)
    assert_problem(answer, status)
    assert "Retry-After" not in answer[1]


@pytest.mark.parametrize(
    "request_line", ["nonsense", "GET / HTTP/3.0", "GET /\x01 HTTP/1.1", "\x16\x03"]
)
def test_refusal_of_what_is_no_request_is_a_problem_document(client, request_line):
    client.connect()
    client.sock.sendall(f"{request_line}\r\nHost: x\r\n\r\n".encode())
    response = http.client.HTTPResponse(client.sock)
    response.begin()
    answer = response.status, response.headers, response.read()
    assert_problem(answer, 505 if "3.0" in request_line else 400)


def test_http_on_the_port_of_https_is_a_problem_document(nginx):
    with running.Client(nginx.port, "x") as client:
        client.request("GET", PROJECTS)
        response = client.getresponse()
        assert_problem((response.status, response.headers, response.read()), 400)


def test_refusal_for_the_rate_is_a_problem_document(upstream, tmp_path):
    slow = {"rate=50r/s": "rate=1r/m", "burst=100": "burst=1"}
    with proxy(tmp_path, upstream, slow) as nginx, Client(nginx.port, "x") as client:
        answers = [client.fetch("GET", PROJECTS) for _ in range(3)]
    assert [status for status, _, _ in answers] == [401, 401, 429]
    assert_problem(answers[2], 429)
    assert answers[2][1]["Retry-After"] == "1"


@pytest.mark.parametrize("listens, status", [(False, 502), (True, 504)])
def test_silence_of_the_service_is_a_problem_document(tmp_path, listens, status):
    brief = {"proxy_http_version 1.1;": "proxy_http_version 1.1; proxy_read_timeout 1;"}
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        upstream = silent.getsockname()[1]
        with (
            proxy(tmp_path, upstream, brief) as nginx,
            Client(nginx.port, "x") as client,
        ):
            answer = client.fetch("POST", PROJECTS, "{}")
    assert_problem(answer, status)
    assert answer[1]["Retry-After"] == "5"


def test_defect_of_nginx_is_a_problem_document(client, tmp_path):
    client.call("GET", PROJECTS)
    shutil.rmtree(tmp_path / "body")  # where nginx keeps bodies of over 16 KiB
    assert_problem(client.fetch("POST", PROJECTS, b"x" * 60_000), 500)


def test_errors_of_the_service_pass_as_they_are(client, upstream, gardening):
    asked = [
        ("GET", "/x", None),
        ("PUT", "/openapi.json", None),
        ("POST", PROJECTS, b"{"),
        ("POST", PROJECTS, b'{"nam": 1}'),
    ]
    with running.Client(upstream, gardening.token) as direct:
        for method, path, body in asked:
            status, headers, content = client.fetch(
                method, path, body, Content_Type="application/json"
            )
            headers_sent = direct.authorization | {"Content-Type": "application/json"}
            direct.request(method, path, body, headers_sent)
            answer = direct.getresponse()
            assert (status, content) == (answer.status, answer.read())
            for name in ("Content-Type", "Allow", "Retry-After"):
                assert headers[name] == answer.headers[name]
    status, headers, _ = client.fetch("GET", PROJECTS, Authorization="")
    assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer realm="gardening"')


@pytest.mark.parametrize(
    "start", ["//garden", "/./garden", "/x/../garden", "/%67arden"]
)
def test_odd_path_under_a_prefix_is_tidied(client, start):
    assert client.fetch("GET", start + PROJECTS)[::2] == (200, b"[]")
    status, headers, _ = client.fetch(
        "POST", start + PROJECTS, "{}", Content_Type="application/json"
    )
    assert status == 201
    assert headers["Location"].startswith(f"/garden{PROJECTS}/")


@pytest.mark.parametrize("prefix", ["", "/garden"])
@pytest.mark.parametrize(
    "rest",
    [
        "/a%2Fb",
        "/a%20b",
        "/a%0D%0AX-Forged:%20x",
        "/a%250A",
        "/a%3Fpage=1",
        "/a%23b",
        "/a%FF%C2%9B",
        "/a%00",
        "/%2e%2e/%2E%2E",
        "//a",
        "/./a",
        "/../../../../../a",
        "/a;b=c",
        "/%zz",
        "/%",
    ],
)
def test_odd_path_is_a_sane_problem(client, prefix, rest):
    answer = client.fetch("GET", prefix + PROJECTS + rest)
    assert answer[0] in (400, 404)
    assert_problem(answer, answer[0])
    assert "X-Forged" not in answer[1]


def test_long_answer_is_compressed_and_its_etag_weak(client):
    accepted = {"Accept_Encoding": "gzip"}
    project = client.call("POST", PROJECTS, {"name": "x" * 5000})[1]
    url = f"{PROJECTS}/{project['id']}"
    for path, expected in ((PROJECTS, [project]), (url, project)):
        status, headers, content = client.fetch("GET", path, **accepted)
        assert (status, headers["Content-Encoding"]) == (200, "gzip")
        assert len(content) < 1000
        assert json.loads(gzip.decompress(content)) == expected
        assert headers["ETag"].startswith('W/"')
        assert "Accept-Encoding" in headers["Vary"]
        known = accepted | {"If_None_Match": headers["ETag"]}
        assert client.fetch("GET", path, **known)[0] == 304
    assert client.fetch("DELETE", url, If_Match=headers["ETag"])[0] == 412
    assert client.fetch("DELETE", url, If_Match=f'"{project["version"]}"')[0] == 204


def test_short_answer_is_not_compressed(client):
    client.call("POST", PROJECTS, {"name": "x" * 1000})
    _, headers, _ = client.fetch("GET", PROJECTS, Accept_Encoding="gzip")
    assert "Content-Encoding" not in headers
    assert not headers["ETag"].startswith("W/")


def test_no_request_is_sent_twice(tmp_path):
    """Not even where the service closes a kept-alive connection without an answer."""
    received = []

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            for line in lines:
                if line.endswith(b"HTTP/1.1\r\n"):
                    received.append(line.split()[0])
                if line == b"\r\n":
                    if received[-1] != b"GET":
                        return
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    def accept() -> None:
        with listener:
            while True:
                connection, _ = listener.accept()
                connection.settimeout(20)
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    upstream = listener.getsockname()[1]
    threading.Thread(target=accept, daemon=True).start()
    with proxy(tmp_path, upstream) as nginx, Client(nginx.port, "x") as client:
        for method in ("POST", "PUT", "DELETE"):
            assert client.fetch("GET", "/")[0] == 200
            assert client.fetch(method, "/")[0] == 502
    assert received == [b"GET", b"POST", b"GET", b"PUT", b"GET", b"DELETE"]


def test_hostile_client_costs_nobody_else_a_request(environment, token, tmp_path):
    refused, accepted, at_work = Counter(), Counter(), True
    bodies = [1_000, 65_535, 65_536, 65_537, 100_000]

    def attack() -> None:
        with Client(nginx.port, "unknown") as client:
            while at_work:
                for size in bodies:
                    for body in (b"x" * size, iter([b"x" * size])):
                        refused[client.fetch("POST", PROJECTS, body)[0]] += 1

    def write(_: int) -> None:
        with Client(nginx.port, token) as client:
            for _ in range(250):
                answer = client.fetch(
                    "POST", PROJECTS, "{}", Content_Type="application/json"
                )
                accepted[answer[0]] += 1

    with gunicorn(environment) as (_, upstream), proxy(tmp_path, upstream) as nginx:
        attackers = [threading.Thread(target=attack) for _ in range(2)]
        for attacker in attackers:
            attacker.start()
        at_once(write, 4)
        at_work = False
        for attacker in attackers:
            attacker.join()
    assert accepted == {201: 1000}
    assert set(refused) == {401, 413}
    assert refused.total() >= 100
