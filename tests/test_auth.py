"""Who may call, and the commands that say so."""

import hashlib
import os
import re
from datetime import date

import pytest
from conftest import on_sqlite
from running import PROJECTS

AUTH = "/api/v1/hello-service/auth"
CHALLENGE = 'Bearer realm="gardening"'


@pytest.fixture
def run(app):
    """Runs `flask token` with the arguments."""

    def run(*arguments):
        return app.test_cli_runner().invoke(args=["token", *arguments])

    return run


@pytest.fixture
def greet(app):
    """The answer to a call with this Authorization header."""

    def greet(authorization):
        return app.test_client().put(AUTH, headers={"Authorization": authorization})

    return greet


PUBLIC = re.compile("/|/docs/?.*|/openapi.json|/api/v1/hello-service")


def protected(app):
    for rule in app.url_map.iter_rules():
        if not PUBLIC.fullmatch(rule.rule):
            for method in rule.methods:
                yield method, rule.rule.replace("<id>", "0" * 24)


@on_sqlite
def test_every_protected_route_demands_a_token(app):
    calls = list(protected(app))
    assert len(calls) == 8
    for method, path in calls:
        response = app.test_client().open(path, method=method, data="no JSON")
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == CHALLENGE


@on_sqlite
@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearerx y",
        "Basic YTpi",
        "Basic !",
        "Basic é",
        "Token x",
    ]
    + ["x", "é"],
)
def test_call_without_bearer_token_is_challenged(greet, authorization):
    response = greet(authorization)
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == CHALLENGE


@on_sqlite
@pytest.mark.parametrize(
    "token", ["x", "a=b", "a b", "é", "'", "x" * 8000, "gardening_" + "A" * 43]
)
def test_unknown_token_is_invalid(greet, token):
    response = greet(f"Bearer {token}")
    assert response.status_code == 401
    expected = f'{CHALLENGE}, error="invalid_token"'
    assert response.headers["WWW-Authenticate"] == expected


@on_sqlite
@pytest.mark.parametrize("change", ["{}é", "é{}", "{}x", "{} x", "{:.40}"])
def test_token_that_is_nearly_right_is_invalid(run, greet, change):
    token = run("create", "ann").stdout.strip()
    response = greet(f"Bearer {change.format(token)}")
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == f'{CHALLENGE}, error="invalid_token"'


@on_sqlite
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_issued_token_is_valid(run, greet, scheme):
    token = run("create", "ann").stdout.strip()
    response = greet(f"{scheme} {token}")
    assert response.status_code == 200
    assert response.json == {
        "greetings": "Hello from the Gardening Project Service!",
        "requestMethod": "PUT",
        "isAuthenticated": True,
    }


def test_create_prints_the_token_alone(run):
    result = run("create", "ann", "--days", "30")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("gardening_")
    assert len(result.stdout.split()) == 1 and len(result.stdout) > 50
    assert run("create", "ann").stdout != result.stdout


def test_only_a_digest_is_kept(run, raw):
    token = run("create", "ann").stdout.strip()
    [row] = raw.execute("SELECT * FROM token").fetchall()
    assert hashlib.sha256(token.encode()).digest() in row
    assert token.removeprefix("gardening_") not in str(row)


def test_tokens_of_an_account_see_the_same_projects(run, app):
    headers = [
        {"Authorization": f"Bearer {run('create', account).stdout.strip()}"}
        for account in ("ann", "ann", "bob")
    ]
    client = app.test_client()
    project = client.post(PROJECTS, json={}, headers=headers[0]).json
    seen = [client.get(PROJECTS, headers=each).json for each in headers]
    assert seen == [[project], [project], []]


def test_list_shows_every_token_but_not_itself(run):
    accounts = ["ann", "bob", "ann"]
    tokens = [run("create", account).stdout.strip() for account in accounts]
    header, *lines = run("list").stdout.splitlines()
    assert header.split() == ["ID", "CREATED", "(UTC)", "EXPIRES", "(UTC)", "ACCOUNT"]
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert [line.split()[3:] for line in lines] == [
        ["never", each] for each in accounts
    ]
    assert not any(token in line for token in tokens for line in lines)


def test_revoked_token_is_invalid_at_once(run, greet):
    token = run("create", "ann").stdout.strip()
    assert greet(f"Bearer {token}").status_code == 200
    assert run("revoke", "1").exit_code == 0
    assert greet(f"Bearer {token}").status_code == 401


def test_any_token_can_be_revoked(run):
    for _ in range(11):
        run("create", "ann")
    assert run("revoke", "11").exit_code == 0
    assert run("revoke", "1").exit_code == 0
    ids = [line.split()[0] for line in run("list").stdout.splitlines()[1:]]
    assert ids == [str(id) for id in range(2, 11)]


@pytest.mark.parametrize(
    "words",
    [
        ["create", ""],
        ["create", "  "],
        ["create", "a\nb"],
        ["create", "\ud800"],
        ["create"],
        ["create", "ann", "--days", "0"],
        ["create", "ann", "--days", "-1"],
        ["create", "ann", "--days", "x"],
        ["create", "ann", "--days", "1000001"],
        ["create", "ann", "--days", "9" * 30],
        ["revoke", "1"],
        ["revoke", "x"],
        ["revoke", "0"],
        ["revoke", str(2**63 - 1)],
        ["revoke", str(2**63)],
        ["revoke", "9" * 30],
        ["revoke"],
        ["no-such-command"],
    ],
)
def test_wrong_input_is_one_line_of_error(run, words):
    result = run(*words)
    assert result.exit_code != 0
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert run("list").stdout.count("\n") == 1


@pytest.mark.parametrize("days", ["1", "2", "1000000"])
def test_lifetime_is_shown_with_its_end(run, days):
    assert run("create", "ann", "--days", days).exit_code == 0
    created, expires = run("list").stdout.splitlines()[1].split()[1:4:2]
    if days == "1000000":
        assert 4000 < int(expires[:4]) < 9999
    else:
        lifetime = date.fromisoformat(expires) - date.fromisoformat(created)
        assert lifetime.days == int(days)


@on_sqlite
@pytest.mark.parametrize("words", [["create", "ann"], ["list"], ["revoke", "1"]])
def test_lost_database_is_one_line_of_error(run, path, words):
    os.remove(path)
    result = run(*words)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: unable to open database file: {path}\n"


def test_account_may_be_any_printable_text(run):
    assert run("create", "Ann O'Neill <ann@example.org> 😀").exit_code == 0
    assert run("list").stdout.endswith("  Ann O'Neill <ann@example.org> 😀\n")
