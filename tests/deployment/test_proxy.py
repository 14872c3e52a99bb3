"""The service behind a real nginx, with the files of deploy/."""

import gzip
import json
import os
import re
import secrets
import signal
import socketserver
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from email import message_from_string
from functools import partial
from http.client import HTTPResponse
from types import SimpleNamespace
from urllib.parse import urljoin

import pytest

from deployment.servers import nginx
from deployment.servers.nginx import HOST, STRICT
from helpers.openapi import assert_problem
from helpers.running import (
    LIMIT,
    PROJECTS,
    TWO_WORKERS,
    Client,
    TLSClient,
    at_once,
    closing_store,
    environment_of,
    gunicorn,
    port_of,
    replaced,
    run,
    token_on,
    wait_for,
)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    database, file = str(folder / "gardening.db"), folder / "log"
    token_on(database)  # which creates it
    with file.open("wb") as log, gunicorn(environment_of(database), stdout=log) as (_, port):
        yield SimpleNamespace(port=port, database=database, log=file)


@pytest.fixture(scope="module")
def proxy(service, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nginx")
    with nginx.proxy(folder, service.port) as proxy:
        yield proxy


@pytest.fixture
def account(service):
    """The token of a new account."""
    return token_on(service.database, secrets.token_hex())


@pytest.fixture
def tls_client(proxy, account):
    with TLSClient(proxy.port, account) as client:
        yield client


def test_reload_drops_no_request_and_doubles_none(environment, token, tmp_path):
    """8 clients, each on a connection that is kept alive."""
    statuses = []

    def work(number: int) -> None:
        with TLSClient(proxy.port, token) as client:
            for turn in range(30):
                if (number, turn) in [(0, 8), (0, 22)]:
                    os.kill(process.pid, signal.SIGHUP)
                status, project = client.call("POST", PROJECTS, {"name": "x"})
                project_url = f"{PROJECTS}/{project['id']}"
                statuses.append(status)
                for method in ("PUT", "GET", "DELETE"):
                    body = {"name": "y"} if method == "PUT" else None
                    statuses.append(client.call(method, project_url, body)[0])

    with (
        gunicorn(environment, TWO_WORKERS) as (process, upstream),
        nginx.proxy(tmp_path, upstream) as proxy,
    ):
        at_once(work)
        with TLSClient(proxy.port, token) as client:
            assert client.call("GET", PROJECTS) == (200, [])
    assert Counter(statuses) == {201: 240, 200: 480, 204: 240}


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_body_of_64_kib_passes_and_no_longer_one(tls_client, chunked):
    for size, status in ((65_536, 201), (65_537, 413)):
        body = b"{}".ljust(size)
        response = tls_client.fetch(
            "POST", PROJECTS, iter([body]) if chunked else body, Content_Type="application/json"
        )
        assert response[0] == status
    assert_problem(response, 413)
    assert len(tls_client.call("GET", PROJECTS)[1]) == 1


@pytest.mark.parametrize(
    "lines",
    [
        "X: ",
        f"Content-Length: 60000\r\n\r\n{'x' * 30_000}",
        "Content-Length: 60000\r\nExpect: 100-continue\r\n\r\n",
        f"Transfer-Encoding: chunked\r\n\r\nea60\r\n{'x' * 30_000}",
    ],
    ids=["header", "length", "expect", "chunked"],
)
def test_slow_uploads_hold_up_nobody(proxy, account, lines):
    head = f"POST {PROJECTS} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    with ExitStack() as uploads:
        for _ in range(12):
            upload = uploads.enter_context(TLSClient(proxy.port, account))
            upload.connect()
            authorization = f"Authorization: Bearer {account}\r\n"
            upload.sock.sendall(f"{head}{authorization}{lines}".encode())
        started = time.monotonic()
        with TLSClient(proxy.port, account) as client:
            assert client.fetch("GET", "/health")[0] == 200
        # Mostly a tenth of a second; ten and more where the service waits for the bodies.
        assert time.monotonic() - started < 5


def test_block_of_the_page_calls_the_configuration_that_it_has_loaded(service, tmp_path):
    """Not that of old processes; nor does it call through a proxy of the company."""
    with nginx.proxy(tmp_path, service.port) as proxy:
        with TLSClient(proxy.port, "x") as client:
            assert client.fetch("GET", "/health")[0] == 200  # so its pid is in the file
        changes = {
            "nginx -t && systemctl reload-or-restart nginx": f"kill -HUP $(cat {tmp_path}/pid)",
            "--retry 3 ": "",
            ":443:": f":{proxy.port}:",
            "/$HOST/": f"/$HOST:{proxy.port}/",
        }
        script = f"HOST={HOST}\n{replaced(nginx.lines_of_the_page('^nginx -t .*'), changes)}"
        behind = os.environ | {"https_proxy": "http://127.0.0.1:1"}
        assert run("sh", "-c", script, environment=behind).stdout == "200\n"
        configuration = tmp_path / "nginx.conf"
        broken = {f"127.0.0.1:{service.port} ": "127.0.0.1:1 "}
        configuration.write_text(replaced(configuration.read_text(), broken))
        assert "502" in run("sh", "-c", script, environment=behind, status=22).stderr


def test_http_leads_to_https(proxy):
    with Client(proxy.plain_port, "x") as client:
        client.request("POST", PROJECTS + "?page=1", "{}", {"Host": HOST})
        response = client.getresponse()
        assert response.status == 308
        assert response.headers["Location"] == f"https://{HOST}{PROJECTS}?page=1"
        response.read()
        # A page of a cache must not lead to whatever host somebody names.
        redirect = client.fetch("GET", "/health", Host="other.example.org")
        assert redirect[1]["Location"] == f"https://{HOST}/health"


class Silent(socketserver.StreamRequestHandler):
    """Reads what it is sent, and does not respond."""

    timeout = LIMIT

    def handle(self) -> None:
        while line := self.rfile.readline():
            self.server.received.append(line)


@contextmanager
def listening(handler):
    """A server with this handler, in place of the service."""
    with (
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server,
        ThreadPoolExecutor(1) as threads,
    ):
        server.connections, server.received = [], []
        threads.submit(server.serve_forever)
        try:
            yield server
        finally:
            server.shutdown()


def fetch(port, version, path, *options):
    """What curl receives over this version of HTTP."""
    curl = ["curl", "-sSki", "--noproxy", "*", f"--http{version}"]
    printed = run(*curl, *options, f"https://127.0.0.1:{port}{path}").stdout
    line, _, rest = printed.partition("\n")
    protocol, status = line.split()[:2]
    assert protocol == f"HTTP/{version}"
    message = message_from_string(rest)
    return int(status), message, message.get_payload()


@pytest.mark.parametrize("version", ["1.1", "2"])
def test_errors_of_nginx_are_problem_documents_and_a_502_has_its_reason(tmp_path, version):
    """Over HTTP/2, too, which another site of the same nginx may have turned on for all."""
    changes = STRICT | {
        "burst=100": "burst=2",
        "listen 443 ssl": "listen 443 ssl http2",
        "location / {": "location / { client_body_buffer_size 1k;",
        "proxy_next_upstream off": "proxy_read_timeout 1s; proxy_next_upstream off",
    }
    with (
        listening(Silent) as server,
        nginx.proxy(tmp_path, server.server_address[1], changes) as proxy,
    ):
        get = partial(fetch, proxy.port, version)
        responses = {
            400: get("/%zz"),
            413: get(PROJECTS, "-d", "x" * 65_537),
            501: get(PROJECTS, "-X", "TRACE"),
        }
        (tmp_path / "body").rmdir()  # so that no body can be written to the disk
        responses[500] = get("/x", "-d", "x" * 65_536)
        responses[504] = get(PROJECTS, "-d", "x" * 65_536)
        server.shutdown()
        server.server_close()
        responses[502] = get(PROJECTS)
        responses[429] = get(PROJECTS)
    for status, response in responses.items():
        assert_problem(response, status)
        seconds = {429: ["1"], 502: ["5"], 504: ["5"]}.get(status)
        assert response[1].get_all("Retry-After") == seconds
    ends = dict(re.findall(r"(?m) (50[24]) .* (\S+ \S+)$", proxy.log.read_text()))
    assert ends["502"] == "- -"
    assert re.fullmatch(r"0\.\d{3} -", ends["504"])


@pytest.mark.parametrize(
    "kind, request_line, header, status",
    [
        (TLSClient, "GET / HTTP/1.1", "X: x", 400),  # no Host
        (TLSClient, "GET / HTTP/3.0", f"Host: {HOST}", 400),
        (TLSClient, "GET / HTTP/1.1", "X: ".ljust(9_000, "x"), 400),
        (TLSClient, "GET /".ljust(9_000, "x"), "X: x", 414),
        (TLSClient, "POST / HTTP/1.1", f"Host: {HOST}\r\nTransfer-Encoding: gzip", 501),
        (Client, "GET / HTTP/1.1", f"Host: {HOST}", 400),
    ],
)
def test_invalid_http_gets_a_problem_document(proxy, kind, request_line, header, status):
    with kind(proxy.port, "x") as client:
        client.connect()
        client.sock.sendall(f"{request_line}\r\n{header}\r\n\r\n".encode())
        response = HTTPResponse(client.sock)
        response.begin()
        assert response.headers["Content-Type"] == "application/problem+json"
        assert response.status == json.loads(response.read())["status"] == status


def test_errors_of_the_service_pass_unchanged(gardening, tmp_path):
    asked = [
        ("none", "GET", "/x", None),
        ("none", "PUT", "/openapi.json", None),
        ("none", "POST", PROJECTS, b"{"),
        ("none", "POST", PROJECTS, b'{"nam": 1}'),
        *((failure, "GET", PROJECTS, None) for failure in ("401", "500", "503")),
    ]
    upstream = port_of(gardening.url)
    with (
        nginx.proxy(tmp_path, upstream) as proxy,
        Client(upstream, gardening.token) as direct,
        TLSClient(proxy.port, gardening.token) as behind,
    ):
        for failure, *call in asked:
            gardening.plan([failure] * 2)
            sent, passed = (
                each.fetch(*call, Content_Type="application/json") for each in (direct, behind)
            )
            assert passed[::2] == sent[::2]
            for name in ("Content-Type", "Allow", "Retry-After", "WWW-Authenticate"):
                assert passed[1][name] == sent[1][name]


ODD_PATHS = "/a%2Fb /a%20b /a%0D%0AX-Forged:%20x /a%250A /a%3Fpage=1 /a%23b /a%FF%C2%9B"
ODD_PATHS += " /a%00 /%2e%2e/%2E%2E //a /./a /../../../../../a /a;b=c /%zz /%"


def test_odd_path_is_not_found(tls_client):
    """Or nginx refuses it."""
    for rest in ODD_PATHS.split():
        response = tls_client.fetch("GET", PROJECTS + rest)
        assert response[0] in (400, 404), rest
        assert_problem(response, response[0], ["about:blank", "urn:gardening:no-such-project"])
        assert "X-Forged" not in response[1]


@pytest.fixture
def projects(tls_client):
    """A list of 4 KiB or more, which nginx compresses."""
    return [tls_client.call("POST", PROJECTS, {"name": "😀" * 255})[1] for _ in range(4)]


def test_long_list_is_compressed_and_its_etag_known(tls_client, projects):
    for path, expected in {
        PROJECTS: projects,
        f"{PROJECTS}?page=0": {"projectList": projects, "page": 0, "size": 20, "total": 4},
    }.items():
        accepted = {"Accept_Encoding": "gzip"}
        status, headers, content = tls_client.fetch("GET", path, **accepted)
        assert (status, headers["Content-Encoding"]) == (200, "gzip")
        assert len(content) < 1000
        assert json.loads(gzip.decompress(content)) == expected
        assert "Accept-Encoding" in headers["Vary"]
        known = accepted | {"If_None_Match": headers["ETag"]}
        assert tls_client.fetch("GET", path, **known)[0] == 304


def test_only_lists_and_what_the_page_loads_are_compressed(tmp_path):
    """Whatever else has their names in its path. If-Match never takes a compressed ETag."""
    changes = {
        "proxy_pass http://gardening;": "default_type application/json; return 200 '[1, 2, 3]';",
        "gzip_min_length 4096": "gzip_min_length 0",
    }
    compressed = {
        **dict.fromkeys([PROJECTS, f"{PROJECTS}?page=0", "/openapi.json"], "gzip"),
        **dict.fromkeys(["/docs/", "/docs/files/swagger-ui.css", "/docs/../docs/"], "gzip"),
        **dict.fromkeys([f"{PROJECTS}/5f0c", f"{PROJECTS}/docs/", f"{PROJECTS}/openapi.json"]),
        **dict.fromkeys(["/x/docs/y", f"/docs/..{PROJECTS}/5f0c", f"/x{PROJECTS}", "/docs"]),
    }
    with (
        nginx.proxy(tmp_path, 1, changes) as proxy,
        TLSClient(proxy.port, "x") as client,
    ):
        found = {}
        for path in compressed:
            _, headers, _ = client.fetch("GET", path, Accept_Encoding="gzip")
            found[path] = headers["Content-Encoding"]
    assert found == compressed


@pytest.mark.parametrize("path, status", [(PROJECTS, 200), ("/%7Ex", 404)])
def test_response_has_the_id_that_both_logs_have(tls_client, proxy, service, path, status):
    found, headers, _ = tls_client.fetch("GET", path, X_Request_Id="of the client")
    assert found == status
    id = headers["X-Request-Id"]
    assert re.fullmatch(r"[0-9a-f]{32}", id)
    # They are written once the response has been sent.
    line = wait_for(lambda: re.search(f".*{id}.*", proxy.log.read_text()))[0]
    assert "127.0.0.1" in line and str(status) in line
    # The path arrives as it was sent.
    logged = f'(?m)"GET {path}" {status} .* {id}$'
    assert wait_for(lambda: re.search(logged, service.log.read_text()))


@pytest.mark.parametrize(
    "kind, timeout, lines",
    [
        (Client, "client_header_timeout", "X: "),
        (TLSClient, "client_header_timeout", "X: "),
        (TLSClient, "client_body_timeout", "Content-Length: 2\r\n\r\n{"),
    ],
)
def test_client_that_stops_sending_is_dropped(service, tmp_path, kind, timeout, lines):
    shorter = {f"{timeout} 10s": f"{timeout} 2s"}
    with nginx.proxy(tmp_path, service.port, shorter) as proxy:
        port = proxy.plain_port if kind is Client else proxy.port
        with kind(port, "x") as client:
            client.connect()
            client.sock.settimeout(10)  # nginx's own limit is 60 s
            client.sock.sendall(f"POST / HTTP/1.1\r\nHost: x\r\n{lines}".encode())
            assert client.sock.recv(1) == b""


@pytest.fixture(scope="module")
def full_account(service):
    """The token of an account whose list is longer than what the system buffers."""
    token = token_on(service.database, "full")
    with closing_store(service.database) as store:
        for _ in range(3000):
            store.create_project("full", {"name": "\x01" * 255, "postal_code": "\x01" * 60})
    return token


SPELLINGS = ["Bearer {}", "bearer {}", "BEARER  {}", "Bearer" + " " * 40 + "{}"]
SPELLINGS += ["Bearer" + " " * 300 + "{}", "Bearer \t{}\t", "\tBearer {}", " \t Bearer {} "]


@contextmanager
def unread_lists(port, token):
    """Two clients that have the whole list under way, and read no more than its head."""
    with ExitStack() as clients:
        for _ in range(2):
            client = clients.enter_context(TLSClient(port, token))
            client.request("GET", PROJECTS, headers=client.authorization)
            assert client.getresponse().status == 200
        yield


def test_third_whole_list_of_a_token_is_refused(proxy, full_account):
    with unread_lists(proxy.port, full_account), TLSClient(proxy.port, full_account) as client:
        for spelling in SPELLINGS:
            for method, path in [("GET", PROJECTS), ("HEAD", PROJECTS), ("GET", f"{PROJECTS}?&")]:
                written = spelling.format(full_account)
                response = client.fetch(method, path, Authorization=written)
                assert (response[0], response[1]["Retry-After"]) == (429, "1")
        assert_problem(client.fetch("GET", PROJECTS), 429)


def test_whole_lists_of_a_token_hold_up_nothing_else(proxy, full_account, tls_client):
    with TLSClient(proxy.port, full_account) as client:
        _, project = client.call("POST", PROJECTS, {})
    project_url = f"{PROJECTS}/{project['id']}"
    calls = [
        ("GET", f"{PROJECTS}?page=0", full_account, 200),
        ("GET", project_url, full_account, 200),
        ("PUT", project_url, full_account, 200),
        ("POST", PROJECTS, full_account, 201),
        ("GET", PROJECTS, "", 401),
    ]

    def call(number):
        method, path, token, _ = calls[number % len(calls)]
        with TLSClient(proxy.port, token) as client:
            body = "{}" if method in ("PUT", "POST") else None
            return client.fetch(method, path, body, Content_Type="application/json")[0]

    with unread_lists(proxy.port, full_account):
        assert tls_client.call("GET", PROJECTS) == (200, [])
        statuses = at_once(call, 20 * len(calls))
    assert statuses == [status for *_, status in calls] * 20


def test_list_that_its_client_gave_up_counts_until_it_is_built(tmp_path):
    with listening(Silent) as server, nginx.proxy(tmp_path, server.server_address[1]) as proxy:
        for _ in range(2):
            with TLSClient(proxy.port, "x") as client:
                client.request("GET", PROJECTS, headers=client.authorization)
                wait_for(lambda: b"\r\n" in server.received)  # the end of the head
            server.received.clear()
        with TLSClient(proxy.port, "x") as client:
            assert client.fetch("GET", PROJECTS)[0] == 429


def statuses_from(port: int, addresses: list[str], authorization: str = "") -> list[int]:
    """What a call from each of the addresses gets."""
    with TLSClient(port, "") as client:
        sent = {"Authorization": authorization}
        return [client.fetch("GET", "/x", X_From=each, **sent)[0] for each in addresses]


def test_refused_requests_take_little_room_on_the_disk(tmp_path):
    """Or a flood of them would fill it, and nobody could write any more."""
    statuses = Counter()
    with (
        nginx.proxy(tmp_path, 1, STRICT | {"1%": "50%"}) as proxy,
        TLSClient(proxy.port, "x") as client,
        Client(proxy.plain_port, "x") as plain,
    ):
        path, long_body = "/".ljust(2000, "x"), {"Content_Length": "70000"}
        for _ in range(300):
            statuses[client.fetch("GET", path)[0]] += 1
            statuses[client.fetch("POST", PROJECTS, **long_body)[0]] += 1
            client.close()  # which nginx does, too
            statuses[plain.fetch("POST", path, **long_body | {"Content_Length": "9999999"})[0]] += 1
            plain.close()
    assert statuses == {502: 2, 429: 298, 413: 300, 308: 300}
    assert proxy.log.read_text().count("\n") in range(230, 370)  # of 600
    assert proxy.log.with_name("error.log").read_text() == ""


# nginx takes the client's address from a header, as behind a load balancer.
SLOW_AND_FROM_ANYWHERE = {
    "rate=50r/s": "rate=1r/m",
    "limit_req_status": "set_real_ip_from 127.0.0.1; real_ip_header X-From; limit_req_status",
}


def test_token_may_send_as_much_from_many_addresses_as_from_one(service, tmp_path):
    addresses = [f"192.0.2.{number}" for number in range(3)] * 36
    with nginx.proxy(tmp_path, service.port, SLOW_AND_FROM_ANYWHERE) as proxy:
        assert Counter(statuses_from(proxy.port, addresses, "Bearer x")) == {404: 101, 429: 7}
        for spelling in SPELLINGS:
            assert statuses_from(proxy.port, ["192.0.2.9"], spelling.format("x")) == [429]
        assert statuses_from(proxy.port, addresses[:3], "Bearer y") == [404] * 3


def test_ipv6_network_may_send_as_much_as_an_ipv4_address(service, tmp_path):
    with nginx.proxy(tmp_path, service.port, SLOW_AND_FROM_ANYWHERE) as proxy:
        one = statuses_from(proxy.port, ["192.0.2.7"] * 110)
        assert Counter(one) == {404: 101, 429: 9}
        others = statuses_from(proxy.port, [f"192.0.2.{n}" for n in range(100, 210)])
        assert Counter(others) == {404: 110}
        # The tenth byte is a line break in some of them.
        network = [f"2001:db8:a:b:{n:x}0a::1" for n in range(110)]
        assert Counter(statuses_from(proxy.port, network)) == {404: 101, 429: 9}
        assert statuses_from(proxy.port, ["2001:db8:a:c::1"]) == [404]
        short = [f"2001:db8::{n:x}" for n in range(110)]
        assert Counter(statuses_from(proxy.port, short)) == {404: 101, 429: 9}


def test_api_works_below_a_prefix_of_another_site(service, account, tmp_path):
    with nginx.another_site(tmp_path, service.port) as port, Client(port, account) as client:
        projects = f"/garden{PROJECTS}"
        for path in ("/", "/gardens", PROJECTS):
            assert client.fetch("GET", path)[::2] == (200, b"another site")
        status, headers, content = client.ask("POST", projects, {"name": "x"})
        project_url = urljoin(projects, headers["Location"])
        assert (status, project_url) == (201, f"{projects}/{json.loads(content)['id']}")
        etag = {"If_Match": headers["ETag"], "Accept_Encoding": "gzip"}
        assert client.ask("GET", project_url, Accept_Encoding="gzip")[2] == content
        assert client.ask("PUT", project_url, {}, **etag)[0] == 200
        client.call("POST", projects, {})
        _, headers, _ = client.ask("GET", f"{projects}?size=1")
        link = urljoin(projects, headers["Link"].split(">")[0].strip("<"))
        status, page = client.call("GET", link)
        assert (status, len(page["projectList"])) == (200, 1)
        assert client.fetch("GET", f"{projects}/%C3%A9%20x")[0] == 404
    wait_for(lambda: f'"GET {PROJECTS}/%C3%A9%20x" 404' in service.log.read_text())


def test_headers_of_every_response_keep_browsers_to_https_and_to_the_origin(tls_client, proxy):
    for path in (PROJECTS, "/x", "/docs/"):
        _, headers, _ = tls_client.fetch("GET", path, Origin="https://app.example.org")
        assert headers["Access-Control-Allow-Origin"] is None
        assert headers["Server"] == "nginx"
        assert headers.get_all("X-Content-Type-Options") == ["nosniff"]
        assert headers["Strict-Transport-Security"] == "max-age=31536000"
    with Client(proxy.plain_port, "x") as plain:
        _, headers, _ = plain.fetch("GET", PROJECTS)
    assert headers["Server"] == "nginx"
    assert "Strict-Transport-Security" not in headers  # RFC 6797 7.2 forbids it


@pytest.mark.parametrize("cipher, status", [("ECDHE", 0), ("kRSA", 1)])
def test_no_cipher_is_without_forward_secrecy(service, tmp_path, cipher, status):
    """With the key of RSA that many certificates have."""
    with nginx.proxy(tmp_path, service.port, key="rsa:2048") as proxy:
        connect = ["openssl", "s_client", "-tls1_2", "-cipher", cipher]
        address = f"127.0.0.1:{proxy.port}"
        run(*connect, "-connect", address, status=status, input="")


class Closing(socketserver.StreamRequestHandler):
    """Responds to a GET, and closes the connection without a response to anything else."""

    timeout = LIMIT

    def handle(self) -> None:
        self.server.connections.append(self.client_address)
        for line in self.rfile:
            if line.endswith(b"HTTP/1.1\r\n"):
                self.server.received.append(line.split()[0])
            if line == b"\r\n":
                if self.server.received[-1] != b"GET":
                    return
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


def test_no_request_is_sent_twice(tmp_path):
    """Not even where the service closes a kept-alive connection without a response."""
    with listening(Closing) as server, nginx.proxy(tmp_path, server.server_address[1]) as proxy:
        for method in ("POST", "PUT", "DELETE"):
            with TLSClient(proxy.port, "x") as client:
                assert client.fetch("GET", PROJECTS)[0] == 200
                assert client.fetch(method, PROJECTS)[0] == 502
    assert len(server.connections) == 3  # each was kept after the GET
    assert server.received == [b"GET", b"POST", b"GET", b"PUT", b"GET", b"DELETE"]
