"""Who may call."""

import hashlib
import re

import pytest

AUTH = "/api/v1/hello-service/auth"
CHALLENGE = 'Bearer realm="gardening"'


@pytest.fixture
def greet(app):
    """The response to a call with this Authorization header."""

    def greet(authorization):
        return app.test_client().put(AUTH, headers={"Authorization": authorization})

    return greet


PUBLIC = re.compile("/|/docs/?.*|/openapi.json|/health|/api/v1/hello-service")


def protected(app):
    for rule in app.url_map.iter_rules():
        if not PUBLIC.fullmatch(rule.rule):
            for method in rule.methods:
                yield method, rule.rule.replace("<id>", "0" * 24)


def test_every_protected_route_demands_a_token_before_anything_else(app):
    calls = list(protected(app))
    assert len(calls) == 8
    for method, path in calls:
        response = app.test_client().open(f"{path}?x", method=method, data=b"x" * 70_000)
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == CHALLENGE


NO_BEARER = ["", "Bearer ", "Bearerx y", "Basic YTpi", "Basic é", "x"]


@pytest.mark.parametrize("authorization", NO_BEARER)
def test_call_without_bearer_token_is_challenged(greet, authorization):
    response = greet(authorization)
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == CHALLENGE


OTHERS = ["é", "x" * 8000, "gardening_" + "A" * 43]
NEARLY_RIGHT = ["{}é", "{}x", "{} x", "{:.40}", "\xa0{}", "{}\x85"]


@pytest.mark.parametrize("other", [*OTHERS, *NEARLY_RIGHT])
def test_token_that_was_not_issued_is_invalid(command, greet, other):
    token = command("token", "create", "ann").stdout.strip()
    response = greet(f"Bearer {other.format(token)}")
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == f'{CHALLENGE}, error="invalid_token"'


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_issued_token_is_valid(command, greet, scheme):
    token = command("token", "create", "ann").stdout.strip()
    response = greet(f"{scheme} {token}")
    assert response.status_code == 200
    assert response.json == {
        "greetings": "Hello from the Gardening Project Service!",
        "requestMethod": "PUT",
        "isAuthenticated": True,
    }


def test_only_a_digest_is_kept(command, plain_sql):
    token = command("token", "create", "ann").stdout.strip()
    [row] = plain_sql.execute("SELECT * FROM token").fetchall()
    assert hashlib.sha256(token.encode()).digest() in row
    assert token.removeprefix("gardening_") not in str(row)
