"""Web pages of other origins, in a browser, behind nginx with deploy/nginx-cors.conf."""

import json
import threading
from collections.abc import Iterator
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rigs.nginx import Response, assert_problem, needs_nginx, proxy
from rigs.running import PROJECTS, TLSClient, port_of

ALLOWED = {"Authorization", "Content-Type", "If-Match", "If-None-Match"}
ALLOWED |= {"Idempotency-Key"}
EXPOSED = {"ETag", "Link", "Location", "Retry-After"}
FETCH = """async ([url, method, headers, body]) => {
    const response = await fetch(url, {method, headers, body, cache: "no-store"});
    return [
        response.status, Object.fromEntries(response.headers), await response.text()
    ];
}"""

pytestmark = needs_nginx


class EmptyPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><link rel=icon href=data:,>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def origins() -> Iterator[tuple[str, str]]:
    """Two origins with an empty page each: one to be named, and one not."""
    sites = [ThreadingHTTPServer(("127.0.0.1", 0), EmptyPage) for _ in range(2)]
    for site in sites:
        threading.Thread(target=site.serve_forever).start()
    yield tuple(f"http://127.0.0.1:{site.server_port}" for site in sites)
    for site in sites:
        site.shutdown()
        site.server_close()


@pytest.fixture(scope="module")
def nginx(gardening_service, tmp_path_factory, origins):
    folder, upstream = tmp_path_factory.mktemp("nginx"), port_of(gardening_service.url)
    with proxy(folder, upstream, origin=origins[0]) as nginx:
        yield nginx


@pytest.fixture
def client(nginx, gardening):
    with TLSClient(nginx.port, gardening.token) as client:
        yield client


@pytest.fixture
def visit(page, nginx, gardening):
    """A function that calls the API from a page of the origin."""

    def visit(origin):
        page.goto(origin)

        def fetch(method, path, body=None, **headers):
            headers = {name.replace("_", "-"): text for name, text in headers.items()}
            url = f"https://127.0.0.1:{nginx.port}{path}"
            return page.evaluate(
                FETCH, [url, method, gardening.headers | headers, body]
            )

        return fetch

    return visit


@pytest.mark.parametrize("prefix", ["", "/garden"])
def test_page_of_a_named_origin_may_use_the_api(visit, origins, prefix):
    fetch, kind = visit(origins[0]), {"Content-Type": "application/json"}
    status, headers, content = fetch(
        "POST", prefix + PROJECTS, "{}", **kind, Idempotency_Key="one"
    )
    project_url, etag = headers["location"], headers["etag"]
    assert status == 201
    assert project_url == f"{prefix}{PROJECTS}/{json.loads(content)['id']}"
    assert fetch("GET", project_url, If_None_Match=etag)[0] == 304
    assert fetch("PUT", project_url, '{"name": "x"}', **kind, If_Match=etag)[0] == 200
    status, _, content = fetch("PUT", project_url, "{}", **kind, If_Match=etag)
    assert (status, json.loads(content)["status"]) == (412, 412)
    changed = fetch("GET", project_url)[1]["etag"]
    assert fetch("DELETE", project_url, If_Match=changed)[0] == 204
    assert fetch("GET", project_url)[0] == 404


def test_page_of_a_named_origin_may_read_the_errors_of_nginx(visit, origins):
    status, _, content = visit(origins[0])("POST", PROJECTS, "x" * 100_000)
    assert (status, json.loads(content)["status"]) == (413, 413)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
def test_page_of_another_origin_is_refused_by_the_browser(visit, origins, method):
    with pytest.raises(Exception, match="Failed to fetch"):
        visit(origins[1])(method, PROJECTS)


def preflight(
    client: TLSClient, path: str, origin: str | None, method: str | None = "PUT"
) -> Response:
    asked = {"Access_Control_Request_Method": method} if method else {}
    origin = {"Origin": origin} if origin else {}
    return client.fetch("OPTIONS", path, **origin, **asked)


def listed(headers: HTTPMessage, name: str) -> set[str]:
    return set(filter(None, (headers[name] or "").split(", ")))


@pytest.mark.parametrize(
    "path", [PROJECTS, "/garden" + PROJECTS, "/api/v1/hello-service"]
)
def test_preflight_of_a_named_origin_succeeds(client, origins, path):
    status, headers, content = preflight(client, path, origins[0])
    assert (status, content) == (204, b"")
    assert headers["Access-Control-Allow-Origin"] == origins[0]
    assert listed(headers, "Access-Control-Allow-Methods") >= {"PUT", "DELETE"}
    assert listed(headers, "Access-Control-Allow-Headers") == ALLOWED
    assert headers["Access-Control-Max-Age"] == "7200"
    assert "Origin" in headers.get_all("Vary")


def test_other_options_reach_the_service(client, origins):
    hello = "/api/v1/hello-service"
    for origin, method in ((origins[1], "PUT"), (origins[0], None), (None, "PUT")):
        status, headers, content = preflight(client, hello, origin, method)
        assert (status, json.loads(content)["requestMethod"]) == (200, "OPTIONS")
        assert "Access-Control-Allow-Methods" not in headers
        assert "Access-Control-Max-Age" not in headers
        assert_problem(preflight(client, PROJECTS, origin, method), 405)


@pytest.mark.parametrize(
    "path, status",
    [(PROJECTS, 200), ("/x", 404), ("/gardening-problem", 404)],
)
def test_headers_name_the_named_origin_alone(client, origins, path, status):
    for origin in (*origins, origins[0] + ".evil.example", "null"):
        found, headers, _ = client.fetch("GET", path, Origin=origin)
        assert found == status
        assert "Origin" in headers.get_all("Vary")
        named = origin == origins[0]
        assert headers["Access-Control-Allow-Origin"] == (origin if named else None)
        exposed = listed(headers, "Access-Control-Expose-Headers")
        assert exposed == (EXPOSED if named else set())


def test_no_origin_may_without_the_lines(gardening, tmp_path):
    upstream = port_of(gardening.url)
    with proxy(tmp_path, upstream) as nginx, TLSClient(nginx.port, "x") as client:
        status, headers, _ = preflight(client, PROJECTS, "https://app.example.org")
    assert status == 405
    assert not [name for name in headers if name.startswith("Access-Control")]
