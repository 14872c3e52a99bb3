"""Web pages of other origins, which nginx lets call the API with deploy/nginx-cors.conf."""

import json

import pytest

from deployment.servers.nginx import proxy
from helpers.openapi import assert_problem
from helpers.running import PROJECTS, TLSClient, port_of

NAMED, OTHER = "https://gardens.example.org", "https://other.example.org"
ALLOWED = {"Authorization", "Content-Type", "If-Match", "If-None-Match"}
ALLOWED |= {"Idempotency-Key"}
METHODS = {"GET", "POST", "PUT", "DELETE"}
EXPOSED = {"Allow", "Deprecation", "ETag", "Link", "Location", "Retry-After", "Sunset"}
EXPOSED |= {"WWW-Authenticate", "X-Request-Id"}


@pytest.fixture(scope="module")
def nginx(gardening_service, tmp_path_factory):
    folder, upstream = tmp_path_factory.mktemp("nginx"), port_of(gardening_service.url)
    with proxy(folder, upstream, origin=NAMED) as nginx:
        yield nginx


@pytest.fixture
def tls_client(nginx, gardening):
    with TLSClient(nginx.port, gardening.token) as client:
        yield client


def preflight(client, path, origin, method="PUT"):
    asked = {"Access_Control_Request_Method": method} if method else {}
    origin = {"Origin": origin} if origin else {}
    return client.fetch("OPTIONS", path, **origin, **asked)


def names_in(headers, name):
    return set(filter(None, (headers[name] or "").split(", ")))


@pytest.mark.parametrize("path", [PROJECTS, "/api/v1/hello-service"])
def test_preflight_of_a_named_origin_succeeds(tls_client, path):
    status, headers, content = preflight(tls_client, path, NAMED)
    assert (status, content) == (204, b"")
    assert headers["Access-Control-Allow-Origin"] == NAMED
    assert names_in(headers, "Access-Control-Allow-Methods") == METHODS
    assert names_in(headers, "Access-Control-Allow-Headers") == ALLOWED
    assert headers["Access-Control-Max-Age"] == "7200"
    assert "Origin" in headers.get_all("Vary")


def test_other_options_reach_the_service(tls_client):
    hello = "/api/v1/hello-service"
    for origin, method in ((OTHER, "PUT"), (NAMED, None), (None, "PUT")):
        status, headers, content = preflight(tls_client, hello, origin, method)
        assert (status, json.loads(content)["requestMethod"]) == (200, "OPTIONS")
        assert "Access-Control-Allow-Methods" not in headers
        assert "Access-Control-Max-Age" not in headers
        assert_problem(preflight(tls_client, PROJECTS, origin, method), 405)


@pytest.mark.parametrize(
    "path, body, status", [(PROJECTS, "", 200), ("/x", "", 404), ("/x", "x" * 65_537, 413)]
)
def test_headers_name_the_named_origin_alone(tls_client, path, body, status):
    for origin in (NAMED, OTHER, NAMED + ".evil.example", "null"):
        found, headers, _ = tls_client.fetch("GET", path, body, Origin=origin)
        assert found == status
        assert "Origin" in headers.get_all("Vary")
        named = origin == NAMED
        assert headers["Access-Control-Allow-Origin"] == (origin if named else None)
        exposed = names_in(headers, "Access-Control-Expose-Headers")
        assert exposed == (EXPOSED if named else set())
