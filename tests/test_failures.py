"""What a token's plan makes of its requests, compared with the real responses."""

import http.client
import json
import os
import sqlite3
import time
from contextlib import closing, suppress

import pytest

from helpers.running import PROJECTS, Client, gunicorn, wait_for
from helpers.testservice import connect

JSON = {"Content_Type": "application/json"}
MADE = {"none": 201, "503-unknown": 503, "504": 504, "lost": None}
UNKNOWN = ["LOST", 503, [], "slow:0", "slow:301", "slow:1.5"]
NOT_MADE = {"401": 401, "account-full": 409, "429": 429, "500": 500, "502": 502, "503": 503}
NOT_MADE |= {"dropped": None}
ON_EVERY_RESPONSE = {"Date", "Server", "X-Request-Id"}
ON_EVERY_RESPONSE |= {"Strict-Transport-Security", "X-Content-Type-Options"}


@pytest.fixture
def failing(gardening_service):
    """A function: a client whose first requests fail like this, and a good one."""
    clients = []

    def failing(*failures):
        account = os.urandom(8).hex()
        for plan in (failures, []):
            token = gardening_service.issue_token(account, fail=plan)
            clients.append(connect(gardening_service.url, token))
        return clients[-2:]

    yield failing
    for client in clients:
        client.close()


def token_of(client):
    return client.authorization["Authorization"].removeprefix("Bearer ")


@pytest.mark.parametrize("failure", [*MADE, *NOT_MADE])
def test_first_request_fails_as_planned_and_the_next_works(failing, gardening_service, failure):
    client, other = failing(failure)
    status = None  # where the connection closes without a response
    with suppress(http.client.RemoteDisconnected):
        status = client.fetch("POST", PROJECTS, "{}", **JSON)[0]
    assert status == (MADE | NOT_MADE)[failure]
    assert len(other.call("GET", PROJECTS)[1]) == (failure in MADE)
    assert client.call("POST", PROJECTS, {})[0] == 201
    assert len(other.call("GET", PROJECTS)[1]) == 1 + (failure in MADE)
    requests = gardening_service.requests(token_of(client))
    assert [request["status"] for request in requests] == [status, 201]


@pytest.mark.parametrize(
    "method, kind", {"POST": "urn:gardening:outcome-unknown", "GET": "about:blank"}.items()
)
def test_only_a_write_has_an_unknown_outcome(failing, method, kind):
    client, _ = failing("503-unknown")
    status, headers, content = client.ask(method, PROJECTS, {})
    assert (status, headers["Retry-After"]) == (503, "5")
    assert json.loads(content)["type"] == kind


def test_full_account_refuses_only_what_would_create_a_project(failing):
    client, other = failing("account-full", "account-full", "429")
    _, _, document = other.ask("POST", PROJECTS, {}, Idempotency_Key="k")
    status, _, again = client.ask("POST", PROJECTS, {}, Idempotency_Key="k")
    assert (status, again) == (201, document)
    path = f"{PROJECTS}/{json.loads(document)['id']}"
    others = [client.call(method, path, {})[0] for method in ("GET", "PUT", "DELETE")]
    assert others == [200, 200, 204]
    # The first address is made of a base that ends in a slash.
    paths = [f"/{PROJECTS}", PROJECTS, PROJECTS]
    created = [client.fetch("POST", path, "{}", **JSON)[0] for path in paths]
    assert created == [409, 429, 201]


@pytest.mark.parametrize("failure, seconds", {"slow": 3, "slow:2": 2}.items())
def test_slow_request_makes_its_change_after_the_seconds_of_its_plan(
    failing, gardening_service, failure, seconds
):
    """So a client that gives up and looks sees nothing yet."""
    client, other = failing(failure)
    token = token_of(client)
    started = time.monotonic()
    headers = client.authorization | {"Content-Type": "application/json"}
    client.request("POST", PROJECTS, "{}", headers)
    wait_for(lambda: gardening_service.left(token) == [])
    assert other.call("GET", PROJECTS) == (200, [])
    assert gardening_service.requests(token)[0]["status"] is None
    assert client.getresponse().status == 201
    assert gardening_service.requests(token)[0]["status"] == 201
    assert seconds <= time.monotonic() - started < seconds + 1
    assert len(other.call("GET", PROJECTS)[1]) == 1


@pytest.mark.parametrize("failure", UNKNOWN, ids=str)
def test_unknown_failure_is_an_error_that_names_the_known_ones(gardening_service, failure):
    with pytest.raises(ValueError, match="is not one of") as raised:
        gardening_service.issue_token(fail=["lost", failure])
    [message] = raised.value.args[0]["fail"]["1"]
    assert message.startswith(repr(failure))
    for known in {*MADE, *NOT_MADE, "slow", "slow:SECONDS"}:
        assert repr(known) in message


def own_parts(response):
    """The status, the headers that are this response's own, and the content."""
    status, headers, content = response
    own = {k: v for k, v in headers.items() if k not in ON_EVERY_RESPONSE}
    return status, own, content


CAUSES = {"401": "DELETE FROM token", "500": "DROP TABLE token", "503": "removed"}
CAUSES |= {"account-full": "INSERT INTO account (name, project_count) VALUES ('ann', 10000)"}


@pytest.mark.parametrize("failure, cause", CAUSES.items())
def test_failure_is_the_one_that_its_cause_has_in_production(
    failing, environment, token, database, failure, cause
):
    client, _ = failing(failure)
    with gunicorn(environment) as (_, port), Client(port, token) as real:
        assert real.call("GET", "/api/v1/hello-service")[0] == 200
        if cause == "removed":
            os.remove(database)
        else:
            with closing(sqlite3.connect(database, isolation_level=None)) as connection:
                connection.execute(cause)
        expected = own_parts(real.fetch("POST", PROJECTS, "{}", **JSON))
    assert own_parts(client.fetch("POST", PROJECTS, "{}", **JSON)) == expected
    assert expected[0] == NOT_MADE[failure]
