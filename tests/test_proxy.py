"""The service behind a real nginx, with the files of deploy/."""

import gzip
import http.client
import http.server
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
from rigs.nginx import HOST, add_http_2, assert_problem, needs_nginx, proxy
from rigs.running import (
    LIMIT,
    PROJECTS,
    TWO_WORKERS,
    Client,
    TLSClient,
    at_once,
    gunicorn,
    needs,
    port_of,
    run,
    wait_for,
)

pytestmark = needs_nginx


def mixed_load(
    port: int, token: str, count: int, meanwhile: Callable = lambda number, turn: None
) -> list[int]:
    """The statuses of so many calls of each of 8 clients on kept-alive connections."""
    statuses = []

    def work(number: int) -> None:
        with TLSClient(port, token) as client:
            for turn in range(count):
                meanwhile(number, turn)
                if turn % 4 == 0:
                    status, project = client.call("POST", PROJECTS, {"name": "x"})
                    project_url = f"{PROJECTS}/{project['id']}"
                elif turn % 4 == 1:
                    status, _ = client.call("PUT", project_url, {"name": "y"})
                elif turn % 4 == 2:
                    status, _ = client.call("GET", project_url)
                else:
                    status, _ = client.call("DELETE", project_url)
                statuses.append(status)

    at_once(work)
    return statuses


def test_reload_drops_none_of_thousands_of_requests(environment, token, tmp_path):
    def reload(number: int, turn: int) -> None:
        if (number, turn) in [(0, 200), (0, 600)]:
            os.kill(process.pid, signal.SIGHUP)

    with (
        gunicorn(environment, TWO_WORKERS) as (process, upstream),
        proxy(tmp_path, upstream) as nginx,
    ):
        statuses = mixed_load(nginx.port, token, 800, reload)
    assert Counter(statuses) == {201: 1600, 200: 3200, 204: 1600}


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
def test_location_leads_back_through_the_proxy(client, prefix):
    _, headers, content = client.ask("POST", prefix + PROJECTS, {})
    assert headers["Location"].startswith(f"{prefix}{PROJECTS}/")
    assert client.call("GET", headers["Location"]) == (200, json.loads(content))


@pytest.fixture(scope="module")
def upstream(gardening_service):
    """The port of a running service."""
    return port_of(gardening_service.url)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Where nginx writes its log."""
    return tmp_path_factory.mktemp("nginx") / "access.log"


@pytest.fixture(scope="module")
def nginx(log, upstream):
    with proxy(log.parent, upstream) as nginx:
        yield nginx


@pytest.fixture
def client(nginx, gardening):
    with TLSClient(nginx.port, gardening.token) as client:
        yield client


@pytest.mark.parametrize("version", ["1.22.1", "1.24.0", "1.26.3", "1.29.0", "1.30.2"])
def test_http_2_is_turned_on_as_each_version_of_nginx_wants_it(tmp_path, version):
    program = tmp_path / "nginx"
    program.write_text(f"#!/bin/sh\necho nginx version: nginx/{version} >&2\n")
    program.chmod(0o755)
    lines = add_http_2(tmp_path, program).splitlines()
    snippet = tmp_path / "gardening-http2.conf"
    if version < "1.25":
        assert "    listen 443 ssl http2;" in lines
        assert "    listen [::]:443 ssl http2;" in lines
        assert not snippet.exists()
    else:
        assert not [line for line in lines if "listen" in line and "http2" in line]
        assert snippet.read_text() == "http2 on;\n"


def test_http_leads_to_https(nginx):
    with Client(nginx.plain_port, "x") as client:
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
    response = client.fetch(method, path, **headers)
    assert_problem(response, status)
    assert "Retry-After" not in response[1]


@pytest.mark.parametrize(
    "request_line", ["nonsense", "GET / HTTP/3.0", "GET /\x01 HTTP/1.1", "\x16\x03"]
)
def test_refusal_of_what_is_no_request_is_a_problem_document(client, request_line):
    client.connect()
    client.sock.sendall(f"{request_line}\r\nHost: x\r\n\r\n".encode())
    response = http.client.HTTPResponse(client.sock)
    response.begin()
    received = response.status, response.headers, response.read()
    assert_problem(received, 505 if "3.0" in request_line else 400)


def test_http_on_the_port_of_https_is_a_problem_document(nginx):
    with Client(nginx.port, "x") as client:
        assert_problem(client.fetch("GET", PROJECTS), 400)


def test_defect_of_nginx_is_a_problem_document(upstream, tmp_path):
    with proxy(tmp_path, upstream) as nginx, TLSClient(nginx.port, "x") as client:
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
    with Client(upstream, gardening.token) as direct:
        for call in asked:
            passed, sent = (
                each.fetch(*call, Content_Type="application/json")
                for each in (client, direct)
            )
            assert passed[::2] == sent[::2]
            for name in ("Content-Type", "Allow", "Retry-After"):
                assert passed[1][name] == sent[1][name]
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


ODD_PATHS = "/a%2Fb /a%20b /a%0D%0AX-Forged:%20x /a%250A /a%3Fpage=1 /a%23b /a%FF%C2%9B"
ODD_PATHS += " /a%00 /%2e%2e/%2E%2E //a /./a /../../../../../a /a;b=c /%zz /%"


@pytest.mark.parametrize("prefix", ["", "/garden"])
@pytest.mark.parametrize("rest", ODD_PATHS.split())
def test_odd_path_is_a_sane_problem(client, prefix, rest):
    response = client.fetch("GET", prefix + PROJECTS + rest)
    assert response[0] in (400, 404)
    assert_problem(response, response[0])
    assert "X-Forged" not in response[1]


@pytest.fixture
def long_project(client):
    """One of 4 KiB or more, which nginx would compress."""
    members = {"name": "😀" * 1000, "postal_code": "😀" * 100}
    return client.call("POST", PROJECTS, members)[1]


@pytest.mark.parametrize("prefix", ["", "/garden"])
def test_long_list_is_compressed_and_its_etag_weak(client, long_project, prefix):
    for path, expected in {
        PROJECTS: [long_project],
        f"{PROJECTS}?page=0": {"projectList": [long_project], "page": 0, "size": 20}
        | {"total": 1},
    }.items():
        accepted = {"Accept_Encoding": "gzip"}
        status, headers, content = client.fetch("GET", prefix + path, **accepted)
        assert (status, headers["Content-Encoding"]) == (200, "gzip")
        assert len(content) < 1000
        assert json.loads(gzip.decompress(content)) == expected
        assert headers["ETag"].startswith('W/"')
        assert "Accept-Encoding" in headers["Vary"]
        known = accepted | {"If_None_Match": headers["ETag"]}
        assert client.fetch("GET", prefix + path, **known)[0] == 304


@pytest.mark.parametrize("prefix", ["", "/garden"])
def test_page_of_the_documentation_is_compressed(client, prefix):
    pytest.importorskip("flask_swagger_ui")
    path = f"{prefix}/docs/files/swagger-ui.css"
    status, headers, _ = client.fetch("GET", path, Accept_Encoding="gzip")
    assert (status, headers["Content-Encoding"]) == (200, "gzip")


@pytest.mark.parametrize("prefix", ["", "/garden", "//garden", "/garden/."])
@pytest.mark.parametrize("encoding", ["gzip", "br, gzip;q=0.5, *"])
def test_etag_of_a_project_is_never_weakened(client, long_project, prefix, encoding):
    project_url = f"{prefix}{PROJECTS}/{long_project['id']}"
    accepted = {"Accept_Encoding": encoding}
    if prefix == "/garden/.":
        project_url = project_url.replace("projects/", "projects%2F")
    status, headers, content = client.fetch("GET", project_url, **accepted)
    assert (status, json.loads(content)) == (200, long_project)
    assert headers["ETag"].startswith('"')
    strong = {"If_Match": headers["ETag"], "Content_Type": "application/json"}
    assert client.fetch("PUT", project_url, "{}", **accepted, **strong)[0] == 200
    assert client.fetch("DELETE", project_url, **accepted, **strong)[0] == 412


def test_short_response_is_not_compressed(client):
    client.call("POST", PROJECTS, {"name": "x" * 1000})
    _, headers, _ = client.fetch("GET", PROJECTS, Accept_Encoding="gzip")
    assert "Content-Encoding" not in headers
    assert not headers["ETag"].startswith("W/")


@pytest.mark.parametrize("path, status", [(PROJECTS, 200), ("/x", 404), ("/%00", 400)])
def test_response_has_the_id_that_nginx_logs_beside_the_address(
    client, log, path, status
):
    found, headers, _ = client.fetch("GET", path, X_Request_Id="of the client")
    assert found == status
    id = headers["X-Request-Id"]
    assert re.fullmatch("[0-9a-f]{32}", id)
    # nginx writes the line once it has sent the response.
    line = wait_for(lambda: re.search(f".*{id}.*", log.read_text()))
    assert re.fullmatch(rf"\S+ 127\.0\.0\.1 {id} {status} \d+ [\d.]+", line[0])


def test_service_logs_the_id_that_nginx_returns(environment, token, tmp_path):
    file = tmp_path / "service.log"
    with (
        file.open("wb") as log,
        gunicorn(environment, stdout=log) as (_, upstream),
        proxy(tmp_path, upstream) as nginx,
        TLSClient(nginx.port, token) as client,
    ):
        ids = [
            client.fetch("GET", prefix + PROJECTS)[1]["X-Request-Id"]
            for prefix in ("", "/garden")
        ]
    logged = [line.split() for line in file.read_text().splitlines()]
    assert [(line[0], line[-1]) for line in logged] == [('"ann/1"', id) for id in ids]


def test_browsers_are_told_to_keep_to_https(client, nginx):
    for path in (PROJECTS, "/gardening-problem"):
        _, headers, _ = client.fetch("GET", path)
        assert headers["Strict-Transport-Security"] == "max-age=31536000"
    with Client(nginx.plain_port, "x") as plain:  # where RFC 6797 7.2 forbids it
        assert "Strict-Transport-Security" not in plain.fetch("GET", PROJECTS)[1]


@needs("curl")
@pytest.mark.parametrize("version", ["1.1", "2"])
@pytest.mark.parametrize(
    "host, port", [("127.0.0.1", "port"), ("[::1]", "port_of_ipv6")]
)
def test_https_is_served_over_both_protocols(nginx, gardening, version, host, port):
    url = f"https://{host}:{getattr(nginx, port)}{PROJECTS}"
    token = f"Authorization: Bearer {gardening.token}"
    served = " %{http_code} %{http_version}"
    curl = ["curl", "-sSk", f"--http{version}", "-w", served, "-H", token, url]
    assert run(*curl).stdout == f"[] 200 {version}"


@needs("curl")
@pytest.mark.parametrize(
    "path, options, status",
    [
        (PROJECTS, ["--data-binary", "@-"], 413),
        (PROJECTS, ["-X", "POST", "-T", "-"], 413),  # without Content-Length
        ("/gardening-problem", [], 404),
        (PROJECTS, ["-X", "TRACE"], 405),
    ],
)
def test_refusal_over_http_2_is_a_problem_document(nginx, path, options, status):
    url = f"https://127.0.0.1:{nginx.port}{path}"
    curl = ["curl", "-sSki", "--http2", *options, url]
    head, _, content = run(*curl, input="x" * 100_000).stdout.partition("\n\n")
    start, *lines = head.splitlines()
    assert start == f"HTTP/2 {status} "
    headers = http.client.HTTPMessage()
    for line in lines:
        headers.add_header(*line.split(": ", 1))
    assert_problem((status, headers, content.encode()), status)


@pytest.mark.parametrize("prefix", ["", "/garden"])
def test_no_request_is_sent_twice(tmp_path, prefix):
    """Not even where the service closes a kept-alive connection without a response."""
    received, connections = [], []

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
                connections.append(connection)
                connection.settimeout(LIMIT)
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    upstream = listener.getsockname()[1]
    threading.Thread(target=accept, daemon=True).start()
    with proxy(tmp_path, upstream) as nginx, TLSClient(nginx.port, "x") as client:
        for method in ("POST", "PUT", "DELETE"):
            assert client.fetch("GET", prefix + PROJECTS)[0] == 200
            assert client.fetch(method, prefix + PROJECTS)[0] == 502
    assert len(connections) == 3  # each was kept after its GET
    assert received == [b"GET", b"POST", b"GET", b"PUT", b"GET", b"DELETE"]
