"""What a caller meets over HTTP: responses, headers, errors; and the settings."""

import io
import json
import os
import re
import sqlite3
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from traceback import walk_stack
from urllib.parse import urljoin

import pytest
from werkzeug import Response
from werkzeug.test import EnvironBuilder

from app import create_app
from engines.sqlite import SQLiteConnection
from helpers.openapi import HELLO, CheckedClient
from helpers.running import BIN, LIMIT, POINT, PROJECTS, environment_of, run, wait_for
from store import Store

MISSING = f"{PROJECTS}/{'0' * 24}"


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_hello_echoes_any_method_whatever_the_token(app, headers):
    for method in ("GET", "POST", "PUT", "PATCH", "OPTIONS", "TRACE", "PURGE"):
        response = app.test_client().open(HELLO, method=method, headers=headers)
        assert (response.status_code, response.json["requestMethod"]) == (200, method)
        assert set(response.json) == {"greetings", "requestMethod"}


@pytest.mark.parametrize("path", [PROJECTS, HELLO, "/health", "/openapi.json"])
def test_offer_to_upgrade_is_ignored(client, project_url, path):
    """A library may always make one, and another proxy than nginx.conf's may pass it on."""
    client.environ_base |= {"HTTP_CONNECTION": "Upgrade", "HTTP_UPGRADE": "websocket"}
    assert client.get(path).status_code == 200
    assert client.put(project_url, json={}).status_code == 200
    assert client.get(f"{path}/x").status_code == 404


def test_create_responds_with_the_project_and_its_address(client):
    response = client.post(PROJECTS, json={"name": "Park", "location": POINT})
    assert response.status_code == 201
    assert response.headers["ETag"] == quoted_etag(response.json)
    assert response.headers["Location"] == f"projects/{response.json['id']}"
    assert response.content_type == "application/json"
    found = client.get(created_at(response))
    assert (found.status_code, found.json) == (200, response.json)
    assert found.headers["ETag"] == response.headers["ETag"]


def test_any_json_content_type_is_accepted(client):
    kind = "application/geo+json;charset=x"
    assert client.post(PROJECTS, data="{}", content_type=kind).status_code == 201


@pytest.mark.parametrize("tag", ["{}", "W/{}", '"0", {}', "*"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_unchanged_project_is_not_sent_again(client, project, project_url, method, tag):
    headers = {"If-None-Match": tag.format(quoted_etag(project))}
    response = client.open(project_url, method=method, headers=headers)
    assert (response.status_code, response.data) == (304, b"")
    assert response.headers["ETag"] == quoted_etag(project)
    assert response.headers["Cache-Control"] == "private, no-cache"
    assert "Content-Type" not in response.headers


OTHER_TAGS = ['"1-1"', "", "garbage", '"", ""']


@pytest.mark.parametrize("tag", OTHER_TAGS)
def test_other_etag_gets_the_whole_response(client, project, project_url, tag):
    headers = {"If-None-Match": tag}
    assert client.get(project_url, headers=headers).json == project
    assert client.get(PROJECTS, headers=headers).json == [project]


REFUSED = [("If-Match", tag) for tag in [*OTHER_TAGS, "W/{}", ",", '"{}"']]
REFUSED += [("If-None-Match", tag) for tag in ["{}", "W/{}", '"x", {}', "*"]]
MADE = [("If-Match", tag) for tag in ["{}", '"0", {}', "*"]]
MADE += [("If-None-Match", tag) for tag in [*OTHER_TAGS, '"*"']]


# What each compares, and what it does to either engine, stands in test_store.py.
@pytest.mark.parametrize("field, tag", REFUSED)
def test_change_whose_condition_fails_is_refused(client, project, project_url, field, tag):
    headers = {field: tag.format(quoted_etag(project))}
    for method in ("PUT", "DELETE"):
        response = client.open(project_url, method=method, json={}, headers=headers)
        assert response.status_code == 412
    assert client.get(project_url).json == project


@pytest.mark.parametrize("field, tag", MADE)
def test_change_whose_condition_holds_is_made(client, project, project_url, field, tag):
    for method, status in [("PUT", 200), ("DELETE", 204)]:
        headers = {field: tag.format(quoted_etag(client.get(project_url).json))}
        response = client.open(project_url, method=method, json={}, headers=headers)
        assert response.status_code == status


def test_both_conditions_must_hold(client, project, project_url):
    tag = quoted_etag(project)
    for match, none_match in [(tag, tag), ('"x"', '"y"')]:
        headers = {"If-Match": match, "If-None-Match": none_match}
        assert client.put(project_url, json={}, headers=headers).status_code == 412


def test_another_accounts_project_is_not_found(sign_in, project, project_url):
    stranger, owner = sign_in("bob"), sign_in("ann2")
    for method, field in [("GET", "If-None-Match"), ("PUT", "If-Match"), ("DELETE", "If-Match")]:
        responses = [
            stranger.open(address, method=method, json={}, headers={field: '"7"'})
            for address in (project_url, MISSING)
        ]
        assert [response.status_code for response in responses] == [404, 404]
        assert responses[0].data == responses[1].data
        assert dict(responses[0].headers) == dict(responses[1].headers)
    assert owner.get(PROJECTS).json == stranger.get(PROJECTS).json == []


def created_at(response):
    """The address of the Project, as a client resolves it (RFC 9110 10.2.2)."""
    return urljoin(PROJECTS, response.headers["Location"])


def quoted_etag(project):
    """As a caller can write it."""
    return f'"{project["version"]}-{project["updated_at"]}"'


def post_with_key(client, key, **fields):
    return client.post(PROJECTS, json=fields, headers={"Idempotency-Key": key})


# What a key is for, and what each engine does with it, stands in test_store.py.
def test_post_repeated_with_its_key_returns_the_project_as_it_is(client):
    first = post_with_key(client, "k", name="Park")
    changed = client.put(created_at(first), json={"name": "Lake"})
    again = post_with_key(client, "k", postal_code=None, name="Park", id="ignored")
    assert (again.status_code, again.json) == (201, changed.json)
    assert again.headers["Location"] == first.headers["Location"]
    assert again.headers["ETag"] == quoted_etag(changed.json)


def test_key_is_refused_with_other_fields_and_once_its_project_is_deleted(client):
    first = post_with_key(client, "k", name="Park")
    again = post_with_key(client, "k", name="Wood")
    assert (again.status_code, again.json["errors"]) == (422, {})
    assert again.json["type"] == "urn:gardening:key-reused"
    client.delete(created_at(first))
    again = post_with_key(client, "k", name="Park")
    assert (again.status_code, again.json["type"]) == (409, "urn:gardening:key-spent")


@pytest.mark.parametrize("query", ["", "?page=0", "?size=1", "?page=3&size=100"])
def test_unchanged_list_is_not_sent_again(client, project_url, query):
    def ask(tag):
        return client.get(PROJECTS + query, headers={"If-None-Match": tag})

    client.post(PROJECTS, json={})
    old = ask("").headers["ETag"]
    client.delete(project_url)
    changed = ask(old)
    tag = changed.headers["ETag"]
    assert changed.status_code == 200 and tag != old
    for known in (tag, f"W/{tag}", f'"x", {tag}', "*"):
        response = ask(known)
        assert (response.status_code, response.data) == (304, b"")
        assert response.headers["ETag"] == tag
        assert "Link" not in response.headers


def test_link_repeats_the_size_and_counts_the_pages(client):
    for _ in range(3):
        client.post(PROJECTS, json={})
    assert "Link" not in client.get(PROJECTS).headers
    link = client.get(f"{PROJECTS}?size=1").headers["Link"]
    assert link == '<?page=1&size=1&after=1>; rel="next"'
    link = client.get(f"{PROJECTS}?page=1&size=1").headers["Link"]
    assert link == '<?page=2&size=1&after=2>; rel="next"'
    last = client.get(f"{PROJECTS}?page={2**53 - 1}&after=1&size=1")
    assert last.json["page"] == 2**53 - 1
    [address] = re.findall("<(.+)>", last.headers["Link"])
    assert client.get(urljoin(PROJECTS, address)).status_code == 200


OTHER = "it is nested too deeply, or holds NaN, an infinity or too long an integer"
PYTHON = re.compile(r"codec|int\(\)|sys\.|recursion|Expecting|literal|Error")
NOT_JSON = {
    "empty": (b"", "it is empty"),
    "blank": (b" ", "see line 1, column 2"),
    "invalid UTF-8": (b'{"name": "\xff"}', "it is not UTF-8"),
    # Too deeply for the parser, or, where that goes as deep, they end too early.
    "nested arrays": (b"[" * 65_536, f"{OTHER}|see line 1, column 65537"),
    "NaN": (b'{"name": NaN}', OTHER),
    "integer too long": (b'{"name": 1' + b"0" * 5_000 + b"}", OTHER),
}


@pytest.mark.parametrize("body, reason", NOT_JSON.values(), ids=NOT_JSON)
def test_body_that_is_not_json_is_refused(client, body, reason):
    response = client.post(PROJECTS, data=body, content_type="application/json")
    assert response.status_code == 400
    assert response.json["detail"].startswith("The body is not JSON: ")
    assert re.search(reason, response.json["detail"])
    assert not PYTHON.search(response.json["detail"])


def test_byte_order_mark_is_skipped(client):
    body = b'\xef\xbb\xbf{"name": "Park"}'
    response = client.post(PROJECTS, data=body, content_type="application/json")
    assert (response.status_code, response.json["name"]) == (201, "Park")


def post_stream(client, stream, **environ):
    return client.post(
        PROJECTS,
        content_type="application/json",
        environ_overrides={"wsgi.input": stream, **environ},
    )


DUPLICATES = {
    "field": (b'{"postal_code": "1", "name": "a", "name": "b"}', '"name"'),
    "surrogate": (b'{"\\ud800": 1, "\\ud800": 1}', '"\\ud800"'),
}


@pytest.mark.parametrize("body, name", DUPLICATES.values(), ids=DUPLICATES)
def test_duplicate_field_is_refused(client, project, project_url, body, name):
    response = client.put(project_url, data=body, content_type="application/json")
    assert response.status_code == 400
    assert response.json["detail"] == f"The body gives the field {name} twice."
    assert client.get(project_url).json == project


@pytest.mark.parametrize("coding, status", [("gzip", 415), ("x", 415), ("Identity", 201)])
def test_body_with_a_content_coding_is_refused(client, coding, status):
    headers = {"Content-Encoding": coding}
    response = client.post(PROJECTS, json={}, headers=headers)
    assert response.status_code == status
    if status == 415:
        assert "Content-Encoding" in response.json["detail"]


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_invalid_project_changes_nothing(client, project, project_url, method):
    """test_schemas.py has the rules."""
    address = PROJECTS if method == "POST" else project_url
    response = client.open(address, method=method, json={"name": 1, "\ud800": 2})
    assert response.status_code == 422
    assert sorted(response.json["errors"]) == ["name", "\ud800"]
    assert client.get(PROJECTS).json == [project]


WRONG = ["page=x", "size=101", "pgae=1", "page=0&page=1&size=2", "page=\xff", "\xff"]


@pytest.mark.parametrize("query", WRONG)
def test_wrong_query_is_refused(client, query):
    response = client.get(PROJECTS, environ_overrides={"QUERY_STRING": query})
    assert response.status_code == 422
    field = query.split("=")[0].replace("\xff", "\ufffd")  # it is not UTF-8
    assert list(response.json["errors"]) == [field]


@pytest.mark.parametrize("is_nested", [False, True])
def test_object_of_more_than_100_fields_is_refused(client, is_nested):
    for count, status in [(100, 422), (101, 400)]:
        fields = dict.fromkeys(map(str, range(count)))
        response = client.post(PROJECTS, json={"location": fields} if is_nested else fields)
        assert response.status_code == status
    assert response.json["detail"] == "The body has an object with more than 100 fields."


def test_query_of_more_than_100_parameters_is_refused_without_their_names(client):
    for count, named in [(100, 100), (101, 1)]:
        response = client.get(PROJECTS, query_string=dict.fromkeys(map(str, range(count)), "1"))
        assert (response.status_code, len(response.json["errors"])) == (422, named)
    assert client.get(f"{PROJECTS}?{'&' * 101}").json == []  # nginx takes it for none, too


def test_parameter_that_a_call_of_projects_does_not_know_is_refused(
    app, client, project, project_url
):
    rules = [rule for rule in app.url_map.iter_rules() if rule.rule.startswith(PROJECTS)]
    calls = [(method, rule.rule) for rule in rules for method in rule.methods - {"HEAD"}]
    assert len(calls) == 5
    for method, path in calls:
        address = f"{path.replace('<id>', project['id'])}?dryRun=true"
        response = client.open(address, method=method, json={})
        assert (response.status_code, [*response.json["errors"]]) == (422, ["dryRun"])
    assert client.delete(f"{project_url}?page=0").status_code == 422  # which the list knows
    assert client.get(PROJECTS).json == [project]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_over_64_kib_is_refused(client, is_chunked):
    for size, status in [(65_536, 201), (65_537, 413)]:
        body = b"{}".rjust(size)
        framing = {"wsgi.input_terminated": True}
        if not is_chunked:
            framing = {"CONTENT_LENGTH": str(size)}
        response = post_stream(client, io.BytesIO(body), **framing)
        assert response.status_code == status
    assert response.json["detail"] == "The body is longer than 65536 bytes."


HANDED_OVER = {"wsgi.input_terminated": True}


@pytest.mark.parametrize(
    "body, server, status", [(b"{}", {}, 411), (b"", HANDED_OVER, 400), (b"{}", HANDED_OVER, 201)]
)
def test_chunked_body_that_the_server_keeps_is_not_called_empty(client, body, server, status):
    response = post_stream(client, io.BytesIO(body), HTTP_TRANSFER_ENCODING="chunked", **server)
    assert response.status_code == status
    assert ("it is empty" in response.text) == (status == 400)


def test_body_that_announces_a_gigabyte_is_refused_unread(client):
    stream = io.BytesIO(b"{}")
    response = post_stream(client, stream, CONTENT_LENGTH=str(10**9))
    assert (response.status_code, stream.tell()) == (413, 0)


def test_full_account_reads_how_many_projects_it_may_have(database, client, plain_sql):
    client.post(PROJECTS, json={})
    plain_sql.execute("UPDATE account SET project_count = 1000")
    small = create_app({"DATABASE": database, "MAX_PROJECTS": 1000})
    small.test_client_class = CheckedClient
    with closing(small.extensions["store"].engine):
        response = small.test_client().post(PROJECTS, json={}, environ_base=client.environ_base)
    assert (response.status_code, response.json["title"]) == (409, "Conflict")
    assert response.json["type"] == "urn:gardening:account-full"
    assert response.json["detail"] == (
        "The account holds as many Projects as it may, 1,000: delete some first."
    )


ERRORS = [
    ("GET", "/nowhere", {}, 404),
    ("GET", f"{PROJECTS}/", {}, 404),
    ("GET", PROJECTS.replace("/v1", "//v1"), {}, 404),
    ("GET", f"{PROJECTS}/%00%ff", {}, 404),
    ("GET", MISSING, {}, 404),
    ("PATCH", PROJECTS, {}, 405),
    ("POST", PROJECTS, {}, 415),
    ("POST", PROJECTS, {"data": "{}", "content_type": "text/plain"}, 415),
    ("POST", PROJECTS, {"json": {"x": 1}}, 422),
]
# A wrong address must not look like a Project that was deleted.
TYPES = dict.fromkeys([MISSING, f"{PROJECTS}/%00%ff"], "urn:gardening:no-such-project")


@pytest.mark.parametrize("method, target, options, status", ERRORS)
def test_error_is_a_problem_document(client, method, target, options, status):
    response = client.open(target, method=method, **options)
    assert response.status_code == status
    fields = ["type", "title", "status", "detail"] + ["errors"] * (status == 422)
    assert list(json.loads(response.data)) == fields
    assert response.json["type"] == TYPES.get(target, "about:blank")
    assert "URL" not in response.json["detail"]  # the word of Werkzeug's own texts


def test_defect_shows_nothing_of_itself_but_in_the_log(client, plain_sql, caplog):
    plain_sql.execute("ALTER TABLE project RENAME TO lost")
    response = client.get(PROJECTS)
    assert response.status_code == 500
    assert response.json["detail"] == "This is a bug in the service; see its log."
    assert "Retry-After" not in response.headers
    assert "Traceback" in caplog.text and "no such table" in caplog.text


SENT = "/crash/x%0AERROR%20%C3%A9%22"


@pytest.mark.parametrize(
    "changes, path",
    [
        ({"RAW_URI": f"{SENT}?secret"}, SENT),  # gunicorn's
        ({"REQUEST_URI": f"{SENT}?secret"}, SENT),  # waitress's and others'
        ({"RAW_URI": '/crash/é\n\x1b["'.encode().decode("latin-1")}, '/crash/%C3%A9%0A%1B["'),
        ({}, SENT),
        ({"SCRIPT_NAME": "/garden"}, f"/garden{SENT}"),
        ({"RAW_URI": "x" * 200}, "x" * 200),
        ({"RAW_URI": "x" * 201}, "x" * 200 + "..."),  # as the access log has it
    ],
)
def test_defect_is_one_entry_of_the_log_that_shows_the_request(app, caplog, changes, path):
    @app.get("/crash/<text>")
    def crash(text):
        raise RuntimeError(f"what was sent: {text}\r{text}")

    environ = EnvironBuilder(path=f"{SENT}?secret").get_environ()
    del environ["RAW_URI"], environ["REQUEST_URI"]
    environ |= {"HTTP_X_REQUEST_ID": "7f"} | changes
    status = Response.from_app(app, environ, buffered=True).status_code
    [record] = caplog.records
    first, *others = record.getMessage().splitlines()
    assert (status, first) == (500, f"Bug in the service (GET {path}, request id 7f)")
    assert others[0] == "    Traceback (most recent call last):"
    assert "    RuntimeError: what was sent: x" in others
    assert all(line.startswith("    ") for line in others)
    assert "secret" not in record.getMessage()


IDS = {"7f": "7f", "": "-", "a b": "a%20b", 'x"): é\x1b\x85': 'x"):%20%E9%1B%85'}


@pytest.mark.parametrize("sent, shown", [(None, "-"), *IDS.items()])
def test_outage_is_one_line_of_the_log_that_shows_the_request(
    app, client, database, caplog, sent, shown
):
    os.remove(database)
    environ = {} if sent is None else {"HTTP_X_REQUEST_ID": sent}
    client.get("/health?secret", environ_overrides=environ)
    [record] = caplog.records
    reason = f"the database file was removed: {database}"
    request = f"GET /health, request id {shown}"
    assert record.getMessage() == f"Database unavailable: {reason} ({request})"


def test_outage_says_when_to_retry_and_ends(client, project, project_url, foreign_lock, caplog):
    with foreign_lock():
        response = client.put(project_url, json={"name": "Wood"})
        assert client.get(project_url).json == project
    assert response.status_code == 503
    assert response.json["detail"] == (
        "The database is unavailable; nothing was changed. Try again later."
    )
    assert response.headers["Retry-After"] == "5"
    assert "Database unavailable: " in caplog.text
    assert "Traceback" not in caplog.text
    wait_for(lambda: client.put(project_url, json={}).status_code == 200)
    assert client.get(project_url).json["version"] == 2


def test_write_in_doubt_is_named_in_the_response_and_the_log(
    client, project_url, database, foreign_lock, caplog
):
    def is_sent():
        """The token is read before, with the same method."""
        sent = {Store.update_project.__code__, SQLiteConnection.fetch.__code__}
        stacks = map(walk_stack, sys._current_frames().values())
        return any(sent <= {frame.f_code for frame, _ in stack} for stack in stacks)

    with ThreadPoolExecutor() as pool:
        with foreign_lock():
            write = pool.submit(client.put, project_url, json={})
            wait_for(is_sent)
            os.remove(database)
        response = write.result(LIMIT)
    assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
    assert response.json["type"] == "urn:gardening:outcome-unknown"
    assert f"Outcome unknown: the database file was removed: {database}" in caplog.text


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def databases(folder):
    return sorted(file.name for file in folder.iterdir() if "-" not in file.name)


def open_app(config=None):
    """An application, after the creation of its database."""
    with closing(create_app(config).extensions["store"].engine) as engine:
        engine.open_database(creates=True)


def test_config_goes_before_the_environment(folder, monkeypatch):
    monkeypatch.setenv("GARDENING_DATABASE", "environment.db")
    monkeypatch.setenv("FLASK_DATABASE", "another program's")
    open_app({"DATABASE": folder / "config.db"})
    assert databases(folder) == ["config.db"]
    open_app()
    assert databases(folder) == ["config.db", "environment.db"]


def test_database_in_memory_is_none_of_the_environment(monkeypatch):
    monkeypatch.setenv("GARDENING_DATABASE", ":memory:")
    with pytest.raises(ValueError, match="^GARDENING_DATABASE cannot be :memory:$"):
        create_app()
    create_app({"DATABASE": ":memory:"})


SPACED = [" a.db", "a.db ", "a.db\r", "a.db\n", "\t", "postgresql://db1/gardening\r"]
HOMES = ["~/gardening.db", "~ann/gardening.db"]  # or `init-db` would create a folder named ~
NO_PATHS = ["host=db1 dbname=gardening password=Qz7wXk", "postgresql:/u:Qz7wXk@127.0.0.1/db"]
NO_PATHS += ["mysql://u:Qz7wXk@127.0.0.1/db", "postgres//u:Qz7wXk@127.0.0.1/db"]
FORMS = "a path, such as ./gardening.db, or a URL that starts with postgresql://"
NO_DATABASES = dict.fromkeys(SPACED, "must not start or end with whitespace")
NO_DATABASES |= dict.fromkeys(HOMES, "must not start with ~: write the whole path")
NO_DATABASES |= dict.fromkeys(NO_PATHS, f"must be {FORMS}")  # without their password


@pytest.mark.parametrize("setting, reason", NO_DATABASES.items())
def test_setting_that_names_no_database_is_refused(folder, monkeypatch, setting, reason):
    monkeypatch.setenv("GARDENING_DATABASE", setting)
    for config in ({}, {"DATABASE": setting}):
        with pytest.raises(ValueError) as refusal:
            create_app(config)
        assert str(refusal.value) == f"GARDENING_DATABASE {reason}"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("setting", ["postgres-data/gardening.db", "a~.db", "me@home/x:y.db"])
def test_path_that_can_hold_no_password_is_taken(folder, setting):
    open_app({"DATABASE": setting})
    assert (folder / setting).exists()


def test_create_app_opens_no_database(folder):
    with closing(sqlite3.connect("old.db")) as old:
        old.execute("CREATE TABLE project (id)")
    Path("text.db").write_text("This is no database." * 100)
    before = {file: file.read_bytes() for file in folder.iterdir()}
    for name in ("new.db", "old.db", "text.db", "no/such.db"):
        create_app({"DATABASE": name})
    environment = os.environ | {"GARDENING_DATABASE": str(folder / "old.db")}
    for program, argument in [("flask", "routes"), ("gunicorn", "--check-config")]:
        run(BIN / program, argument, environment=environment)
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_health_needs_no_token_until_the_database_is_lost(app, database):
    client = app.test_client()
    response = client.get("/health")
    assert (response.status_code, response.json) == (200, {"status": "ok"})
    assert response.headers["Cache-Control"] == "no-store"
    assert client.head("/health").status_code == 200
    os.remove(database)
    response = client.get("/health")
    assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
    assert database not in response.text


def test_empty_maximum_means_the_default(monkeypatch):
    monkeypatch.setenv("GARDENING_MAX_PROJECTS", "")
    assert create_app({"DATABASE": ":memory:"}).config["MAX_PROJECTS"] == 10_000


@pytest.mark.parametrize("setting", ["0", "-1", "x", "1.5", "9" * 19, "１"])
def test_maximum_that_is_no_positive_number_is_refused(monkeypatch, setting):
    message = "GARDENING_MAX_PROJECTS must be a whole number, 1 or more, of up to 18 digits"
    monkeypatch.setenv("GARDENING_MAX_PROJECTS", setting)
    with pytest.raises(ValueError, match=re.escape(message)):
        create_app({"DATABASE": ":memory:"})
    with pytest.raises(ValueError, match=re.escape(message)):
        create_app({"DATABASE": ":memory:", "MAX_PROJECTS": 0})
    create_app({"DATABASE": ":memory:", "MAX_PROJECTS": 1})


def test_driver_that_is_not_installed_is_named(tmp_path):
    (tmp_path / "psycopg.py").write_text("raise ImportError")
    path = {"PYTHONPATH": str(tmp_path)}
    variables = environment_of("postgresql://127.0.0.1/db") | path
    message = "for PostgreSQL, install psycopg[binary], or this package with the extra"
    for command in ["token", "list"], ["run", "--port=0"]:
        end = run(BIN / "flask", *command, environment=variables, status=1)
        assert end.stderr == f"Error: {message} postgres\n"
    # So a release without the driver is not reloaded.
    end = run(BIN / "gunicorn", "--check-config", environment=variables, status=1)
    assert message in end.stderr
