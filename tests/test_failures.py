"""What a token's plan makes of its requests, compared with the real responses."""

import http.client
import json
import os
import sqlite3
import time
from collections import Counter
from contextlib import closing

import pytest

from helpers.running import (
    PROJECTS,
    Client,
    at_once,
    gunicorn,
    wait_for,
)
from helpers.testservice import connect

JSON_HEADER = {"Content-Type": "application/json"}
JSON = {"Content_Type": "application/json"}
MADE = {"none": 201, "503-unknown": 503, "504": 504, "lost": None}
MADE |= {"slow": 201, "slow:1": 201}
UNKNOWN = ["LOST", 503, [], "slow:0", "slow:301", "slow:1.5"]
NOT_MADE = {"401": 401, "429": 429, "500": 500, "502": 502, "503": 503, "dropped": None}
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


def status_of(client, method="POST", path=PROJECTS, body="{}", **headers):
    """The status of the response; None where the connection closes without one."""
    try:
        return client.fetch(method, path, body, **JSON | headers)[0]
    except http.client.RemoteDisconnected:
        return None


@pytest.mark.parametrize("failure", [*MADE, *NOT_MADE])
def test_first_request_fails_as_planned_and_the_next_works(failing, failure):
    client, other = failing(failure)
    assert status_of(client) == (MADE | NOT_MADE)[failure]
    assert len(other.call("GET", PROJECTS)[1]) == (failure in MADE)
    assert client.call("POST", PROJECTS, {})[0] == 201
    assert len(other.call("GET", PROJECTS)[1]) == 1 + (failure in MADE)


@pytest.mark.parametrize("word", ["GET", "HEAD"])
def test_read_whose_outcome_cannot_be_unknown_gets_the_other_503(failing, word):
    client, _ = failing("503", "503-unknown")
    known, unknown = [client.fetch(word, PROJECTS) for _ in range(2)]
    assert (known[0], known[2]) == (unknown[0], unknown[2])
    assert known[0] == 503


def test_slow_request_makes_its_change_at_the_end(failing, gardening_service):
    """So a client that gives up and looks sees nothing yet."""
    client, other = failing("slow")
    token = client.authorization["Authorization"].removeprefix("Bearer ")
    client.request("POST", PROJECTS, "{}", client.authorization | JSON_HEADER)
    wait_for(lambda: gardening_service.left(token) == [])
    assert other.call("GET", PROJECTS) == (200, [])
    assert client.getresponse().status == 201
    assert len(other.call("GET", PROJECTS)[1]) == 1


@pytest.mark.parametrize("failure, seconds", {"slow": 3, "slow:1": 1}.items())
def test_slow_request_waits_as_long_as_planned(failing, failure, seconds):
    client, _ = failing(failure)
    started = time.monotonic()
    assert client.call("GET", PROJECTS) == (200, [])
    assert seconds <= time.monotonic() - started < seconds + 2


def test_each_request_takes_one_failure_whatever_its_path(failing):
    client, _ = failing("429", "502", "none", "504", "429")
    paths = [PROJECTS, "/nowhere", "/api/v1/hello-service", "/openapi.json", PROJECTS]
    statuses = [status_of(client, "GET", path, None) for path in paths]
    assert statuses == [429, 502, 200, 504, 429]
    assert status_of(client, "GET", PROJECTS, None) == 200


def test_requests_at_the_same_time_lose_no_failure_and_double_none(gardening_service):
    failures = ["429", "none", "502"] * 100
    token = gardening_service.issue_token(fail=failures)
    found = [[] for _ in range(8)]

    def work(number):
        with connect(gardening_service.url, token) as client:
            for _ in range(50):
                found[number].append(status_of(client, "GET", PROJECTS, None))

    at_once(work)
    statuses = Counter(status for each in found for status in each)
    assert statuses == {429: 100, 502: 100, 200: 200}


def test_plan_is_found_however_the_token_is_sent(gardening_service):
    token = gardening_service.issue_token(fail=["429", "429"])
    found = []
    with connect(gardening_service.url) as client:
        for sent in ("", "Basic ", "Bearer x", "Bearer  ", "bearer "):
            status, *_ = client.fetch("GET", PROJECTS, Authorization=sent + token)
            found.append(status)
    assert found == [401, 401, 401, 429, 429]


@pytest.mark.parametrize("failure", UNKNOWN, ids=str)
def test_unknown_failure_is_an_error_that_names_the_known_ones(
    gardening_service, failure
):
    with pytest.raises(ValueError, match="is not one of") as raised:
        gardening_service.issue_token(fail=["lost", failure])
    [message] = raised.value.args[0]["fail"]["1"]
    assert message.startswith(repr(failure))
    for known in {*MADE, *NOT_MADE, "slow:SECONDS"} - {"slow:1"}:
        assert repr(known) in message


def own_parts(response):
    """The status, the headers that are this response's own, and the content."""
    status, headers, content = response
    own = {k: v for k, v in headers.items() if k not in ON_EVERY_RESPONSE}
    return status, own, content


DAMAGES = {"401": "DELETE FROM token", "500": "DROP TABLE token", "503": "removed"}


@pytest.mark.parametrize("failure, damage", DAMAGES.items())
def test_failure_is_that_of_a_damaged_database(
    failing, environment, token, database, failure, damage
):
    client, _ = failing(failure)
    with gunicorn(environment) as (_, port), Client(port, token) as real:
        assert real.call("GET", "/api/v1/hello-service")[0] == 200
        if damage == "removed":
            os.remove(database)
        else:
            with closing(sqlite3.connect(database, isolation_level=None)) as connection:
                connection.execute(damage)
        expected = own_parts(real.fetch("POST", PROJECTS, "{}", **JSON))
    assert own_parts(client.fetch("POST", PROJECTS, "{}", **JSON)) == expected
    assert expected[0] == int(failure)


def test_unknown_outcome_has_a_503_of_its_own_type(failing):
    client, _ = failing("503", "503-unknown")
    known, unknown = [client.ask("POST", PROJECTS, {}) for _ in range(2)]
    assert unknown[1]["Retry-After"] == known[1]["Retry-After"]
    types = [json.loads(content)["type"] for _, _, content in (known, unknown)]
    assert types == ["about:blank", "urn:gardening:outcome-unknown"]
