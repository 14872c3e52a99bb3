import json
import sqlite3

import pytest
from conftest import PROJECTS

from app import create_app

HELLO = "/api/v1/hello-service"
POINT = {"type": "Point", "coordinates": [-122.4410896675, 37.768361565]}
MISSING = f"{PROJECTS}/{'0' * 24}"


@pytest.mark.parametrize(
    "method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PURGE"]
)
def test_hello_echoes_any_method_without_a_token(app, method):
    response = app.test_client().open(HELLO, method=method)
    assert (response.status_code, response.json["requestMethod"]) == (200, method)
    assert list(response.json) == ["greetings", "requestMethod"]


def test_hello_ignores_a_bad_token(app):
    headers = {"Authorization": "Bearer wrong"}
    assert app.test_client().get(HELLO, headers=headers).status_code == 200


def test_head_of_hello_is_empty(app):
    response = app.test_client().head(HELLO)
    assert (response.status_code, response.data) == (200, b"")


def test_create_answers_with_the_project_and_its_address(client):
    response = client.post(PROJECTS, json={"name": "Park", "location": POINT})
    assert response.status_code == 201
    assert response.headers["ETag"] == '"1"'
    assert response.headers["Location"] == f"{PROJECTS}/{response.json['id']}"
    assert response.content_type == "application/json"
    assert client.get(response.headers["Location"]).json == response.json


def test_location_leads_back_from_below_a_prefix(client):
    response = client.post(
        PROJECTS, json={}, environ_overrides={"SCRIPT_NAME": "/garden"}
    )
    assert response.headers["Location"].startswith(f"/garden{PROJECTS}/")


def test_project_holds_its_seven_members_in_order(client):
    assert list(json.loads(client.post(PROJECTS, json={}).data)) == [
        "id",
        "name",
        "created_at",
        "updated_at",
        "version",
        "postal_code",
        "location",
    ]


@pytest.mark.parametrize("type", ["application/json", "application/geo+json;charset=x"])
def test_json_of_any_kind_is_taken(client, type):
    assert client.post(PROJECTS, data="{}", content_type=type).status_code == 201


def test_get_gives_the_project_and_its_validator(client, project, url):
    response = client.get(url)
    assert (response.status_code, response.json) == (200, project)
    assert response.headers["ETag"] == '"1"'
    assert response.headers["Cache-Control"] == "private, no-cache"


@pytest.mark.parametrize("tag", ['"1"', 'W/"1"', '"0", "1"', "*"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_unchanged_project_is_not_sent_again(client, url, method, tag):
    response = client.open(url, method=method, headers={"If-None-Match": tag})
    assert (response.status_code, response.data) == (304, b"")
    assert response.headers["ETag"] == '"1"'
    assert response.headers["Cache-Control"] == "private, no-cache"
    assert "Content-Type" not in response.headers


@pytest.mark.parametrize("tag", ['"2"', "", '"01"', '"x"', "garbage", '""', '"", ""'])
def test_other_validators_get_the_whole_answer(client, project, url, tag):
    headers = {"If-None-Match": tag}
    assert client.get(url, headers=headers).json == project
    assert client.get(PROJECTS, headers=headers).json == [project]


def test_head_is_get_without_a_body(client, url):
    for address in (url, PROJECTS, f"{PROJECTS}?page=0"):
        head, get = client.head(address), client.get(address)
        assert (head.status_code, head.data) == (200, b"")
        assert dict(head.headers) == dict(get.headers)


def test_put_changes_the_given_members_only(client, project, url):
    response = client.put(url, json={"postal_code": "94117"})
    assert response.status_code == 200
    assert "ETag" not in response.headers
    changed = {"postal_code": "94117", "version": 2}
    assert response.json == project | changed | {
        "updated_at": response.json["updated_at"]
    }
    assert client.get(url).json == response.json


def test_fetched_project_can_be_sent_back_whole(client, project, url):
    response = client.put(url, json=project | {"name": "Wood", "version": 9, "id": "x"})
    assert (response.json["id"], response.json["version"]) == (project["id"], 2)
    assert response.json["name"] == "Wood"


def test_null_clears_a_member(client, url):
    assert client.put(url, json={"name": None}).json["name"] is None


def test_empty_put_is_an_update(client, url):
    assert client.put(url, json={}).json["version"] == 2


@pytest.mark.parametrize("tag", ['"2"', 'W/"1"', '"x"', "", ","])
@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_change_of_another_version_is_refused(client, project, url, method, tag):
    response = client.open(url, method=method, json={}, headers={"If-Match": tag})
    assert response.status_code == 412
    assert client.get(url).json == project


@pytest.mark.parametrize("tag", ['"1"', '"0", "1"', "*"])
@pytest.mark.parametrize("method, status", [("PUT", 200), ("DELETE", 204)])
def test_change_of_the_expected_version_is_made(client, url, method, status, tag):
    response = client.open(url, method=method, json={}, headers={"If-Match": tag})
    assert response.status_code == status


def test_deleted_project_is_gone(client, url):
    response = client.delete(url)
    assert (response.status_code, response.data) == (204, b"")
    assert client.get(url).status_code == client.delete(url).status_code == 404
    assert client.get(PROJECTS).json == []


def test_another_accounts_project_cannot_be_told_from_none(sign_in, project, url):
    stranger, owner = sign_in("bob"), sign_in("ann2")
    for method in ("GET", "PUT", "DELETE"):
        answers = [
            stranger.open(address, method=method, json={}, headers={"If-Match": '"7"'})
            for address in (url, MISSING)
        ]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].data == answers[1].data
        assert dict(answers[0].headers) == dict(answers[1].headers)
    assert owner.get(PROJECTS).json == stranger.get(PROJECTS).json == []


def test_list_is_an_array_oldest_first(client):
    projects = [client.post(PROJECTS, json={"name": str(n)}).json for n in range(3)]
    response = client.get(PROJECTS)
    assert (response.status_code, response.json) == (200, projects)
    assert response.headers["Cache-Control"] == "private, no-cache"
    assert response.content_type == "application/json"


@pytest.mark.parametrize("query", ["", "?page=0", "?size=1", "?page=3&size=1000"])
def test_unchanged_list_is_not_sent_again(client, url, query):
    def ask(tag):
        return client.get(PROJECTS + query, headers={"If-None-Match": tag})

    tag = ask("").headers["ETag"]
    for known in (tag, f"W/{tag}", f'"x", {tag}', "*"):
        response = ask(known)
        assert (response.status_code, response.data) == (304, b"")
        assert response.headers["ETag"] == tag
    client.put(url, json={})
    assert ask(tag).status_code == 200
    assert ask(tag).headers["ETag"] != tag


def test_page_is_wrapped(client):
    projects = [client.post(PROJECTS, json={}).json for _ in range(3)]
    response = client.get(f"{PROJECTS}?page=1&size=2")
    assert list(json.loads(response.data)) == ["projectList", "page", "size", "total"]
    assert response.json == {
        "projectList": projects[2:],
        "page": 1,
        "size": 2,
        "total": 3,
    }
    defaults = client.get(f"{PROJECTS}?page=0").json
    assert (defaults["projectList"], defaults["size"]) == (projects, 20)


NOT_JSON = {
    "empty": b"",
    "cut off": b'{"name": "Pa',
    "trailing comma": b'{"name": "Park",}',
    "invalid UTF-8": b'{"name": "\xff"}',
    "surrogate in UTF-8": b'{"name": "\xed\xa0\x80"}',
    "UTF-16": '{"name": "Park"}'.encode("utf-16"),
    "NaN": b'{"name": NaN}',
    "Infinity": b"[-Infinity]",
    "nested too deep": b"[" * 30_000,
    "nested objects": b'{"name":' * 8_000,
    "integer too long": b'{"name": 1' + b"0" * 5_000 + b"}",
    "two documents": b"{}{}",
}


@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON)
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_what_is_not_json_is_refused(client, url, method, body):
    address = PROJECTS if method == "POST" else url
    response = client.open(
        address, method=method, data=body, content_type="application/json"
    )
    assert response.status_code == 400
    assert response.json["detail"].startswith("The body is not JSON: ")


INVALID = {
    "array": ([], ["_schema"]),
    "number": (1, ["_schema"]),
    "typo": ({"nmae": "x"}, ["nmae"]),
    "surrogate": ({"name": "\ud800"}, ["name"]),
    "surrogate as a name": ({"\ud800": 1}, ["\ud800"]),
    "infinite": ({"location": POINT | {"coordinates": [1e999, 0]}}, ["location"]),
    "several": ({"name": 1, "postal_code": 2, "x": 3}, ["name", "postal_code", "x"]),
}


@pytest.mark.parametrize("body, members", INVALID.values(), ids=INVALID)
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_invalid_project_changes_nothing(client, project, url, method, body, members):
    address = PROJECTS if method == "POST" else url
    text = json.dumps(body).replace("Infinity", "1e999")
    response = client.open(
        address, method=method, data=text, content_type="application/json"
    )
    assert response.status_code == 422
    assert sorted(response.json["errors"]) == members
    assert client.get(PROJECTS).json == [project]


@pytest.mark.parametrize(
    "query", ["page=-1", "size=0", "size=1001", "page=x", "pgae=1"]
)
def test_wrong_query_is_refused(client, query):
    response = client.get(f"{PROJECTS}?{query}")
    assert response.status_code == 422
    assert list(response.json["errors"]) == [query.split("=")[0]]


@pytest.mark.parametrize("query, member", [("page=\xff", "page"), ("\xff", "\ufffd")])
def test_query_that_is_not_utf_8_is_refused(client, query, member):
    response = client.get(PROJECTS, environ_overrides={"QUERY_STRING": query})
    assert response.status_code == 422
    assert list(response.json["errors"]) == [member]


def test_body_over_64_kib_is_refused(client, url):
    def send(size):
        body = json.dumps({"name": ""})
        body = body.replace('""', f'"{"x" * (size - len(body))}"')
        return client.put(url, data=body, content_type="application/json").status_code

    assert [send(64 * 1024), send(64 * 1024 + 1)] == [200, 413]


ERRORS = [
    ("GET", "/", {}, 404),
    ("GET", "/api/v1/gardening", {}, 404),
    ("GET", f"{PROJECTS}/", {}, 404),
    ("GET", PROJECTS.replace("/v1", "//v1"), {}, 404),
    ("GET", f"{PROJECTS}/%00%ff", {}, 404),
    ("GET", f"{PROJECTS}/{'x' * 5000}", {}, 404),
    ("GET", MISSING, {}, 404),
    ("PUT", MISSING, {"json": {}}, 404),
    ("DELETE", MISSING, {}, 404),
    ("PATCH", PROJECTS, {}, 405),
    ("POST", MISSING, {}, 405),
    ("GET", f"{HELLO}/auth", {}, 405),
    ("POST", PROJECTS, {}, 415),
    ("POST", PROJECTS, {"data": "{}", "content_type": "text/plain"}, 415),
    ("POST", PROJECTS, {"data": "{", "content_type": "application/json"}, 400),
    ("POST", PROJECTS, {"json": {"x": 1}}, 422),
    ("POST", PROJECTS, {"json": {"name": "x" * 70_000}}, 413),
]


@pytest.mark.parametrize("method, target, options, status", ERRORS)
def test_error_is_a_problem_document(client, method, target, options, status):
    response = client.open(target, method=method, **options)
    assert response.status_code == status
    assert response.content_type == "application/problem+json"
    members = ["type", "title", "status", "detail"] + ["errors"] * (status == 422)
    assert list(json.loads(response.data)) == members
    assert (response.json["type"], response.json["status"]) == ("about:blank", status)
    assert response.json["title"] and response.json["detail"]


def test_wrong_method_is_told_the_right_ones(client):
    allowed = client.patch(PROJECTS).headers["Allow"]
    assert set(allowed.split(", ")) == {"GET", "HEAD", "POST"}


def test_token_is_checked_before_anything_else(app, url):
    stranger = app.test_client()
    for method, address in (("PUT", url), ("PUT", MISSING), ("POST", PROJECTS)):
        response = stranger.open(address, method=method, data=b"x" * 70_000)
        assert response.status_code == 401
        assert response.content_type == "application/problem+json"


def test_crash_shows_nothing_of_itself_but_in_the_log(app, caplog):
    app.add_url_rule("/crash", view_func=lambda: 1 / 0)
    response = app.test_client().get("/crash")
    assert response.status_code == response.json["status"] == 500
    assert response.content_type == "application/problem+json"
    assert "ZeroDivisionError" not in response.text
    assert "ZeroDivisionError" in caplog.text


def test_outage_says_when_to_retry_and_ends(client, project, url, path, caplog):
    lock = sqlite3.connect(path, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    response = client.put(url, json={"name": "Wood"})
    assert response.status_code == response.json["status"] == 503
    assert response.content_type == "application/problem+json"
    assert int(response.headers["Retry-After"]) > 0
    assert "database is locked" in caplog.text
    assert path not in response.text
    assert client.get(url).json == project
    lock.close()
    assert client.put(url, json={"name": "Wood"}).json["version"] == 2


def test_token_is_never_logged(client, url, caplog):
    caplog.set_level(0)
    authorization = client.environ_base["HTTP_AUTHORIZATION"]
    for target in (url, MISSING, "/nowhere"):
        client.get(target)
    client.get(PROJECTS, headers={"Authorization": authorization + "x"})
    assert authorization.split()[1] not in caplog.text


def test_config_goes_before_the_environment(tmp_path, monkeypatch):
    names = [str(tmp_path / name) for name in ("environment.db", "config.db")]
    monkeypatch.setenv("FLASK_DATABASE", names[0])
    create_app({"DATABASE": names[1]})
    assert [entry.name for entry in tmp_path.iterdir() if "-" not in entry.name] == [
        "config.db"
    ]
    create_app()
    assert (tmp_path / "environment.db").exists()


def test_apps_in_memory_are_apart():
    apps = [create_app({"DATABASE": ":memory:"}) for _ in range(2)]
    apps[0].store.create_project("ann", {})
    lists = [app.store.list_projects("ann", [])["document"] for app in apps]
    assert [len(json.loads(each)) for each in lists] == [1, 0]


def test_unusable_database_is_one_line_of_error(capsys):
    with pytest.raises(SystemExit) as caught:
        create_app({"DATABASE": "/no/such/folder/x.db"})
    assert caught.value.code == 4
    assert capsys.readouterr().err == (
        "Error: [Errno 2] No such file or directory: '/no/such/folder/x.db'\n"
    )
