"""The page /docs/, in a browser, alone and behind nginx; and what leads to it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from rigs.nginx import HOST, assert_problem, needs_nginx, proxy
from rigs.running import LIMIT, PROJECTS, Client, flask_run, port_of

from auth import digest

UNDER_A_PREFIX = pytest.param("under_a_prefix", marks=needs_nginx)


@pytest.fixture
def database(path):
    return path


@pytest.fixture
def upstream(gardening):
    return port_of(gardening.url)


@pytest.fixture
def client(upstream, gardening):
    """Past nginx and the browser."""
    with Client(upstream, gardening.token) as client:
        yield client


@pytest.fixture
def alone(gardening):
    return gardening.url


@pytest.fixture
def under_a_prefix(upstream, tmp_path):
    with proxy(tmp_path, upstream) as nginx:
        yield f"https://{HOST}:{nginx.port}/garden"


@pytest.fixture
def base(request):
    """The address of the service, without a slash at the end."""
    return request.getfixturevalue(getattr(request, "param", "alone"))


@pytest.fixture
def docs(page, base):
    """The page as a person finds it; fails if anything goes wrong in it, or outside."""
    pytest.importorskip("flask_swagger_ui")
    wrong = []

    def watch(event: str, is_wrong: Callable[[Any], bool] = lambda _: True) -> None:
        page.on(event, lambda seen: is_wrong(seen) and wrong.append(repr(seen)))

    watch("console", lambda message: message.type in ("error", "warning"))
    watch("pageerror")
    watch("request", lambda request: not request.url.startswith(f"{base}/"))
    watch("requestfailed")
    watch("response", lambda response: response.status >= 400)
    page.goto(f"{base}/")
    page.get_by_text("List your Projects").wait_for()
    yield page
    assert wrong == []


class Operation:
    """An operation on the page, opened to try it out."""

    def __init__(self, page: Any, name: str) -> None:
        self.block = page.locator(f"#operations-projects-{name}")
        self.head = self.block.get_by_role("button").first
        self.head.click()
        self.press("Try it out")

    def press(self, name: str) -> None:
        self.block.get_by_role("button", name=name, exact=True).click()

    def execute(self, body: object = None, **parameters: str) -> tuple[str, object]:
        """Status and JSON of the answer as the page shows them; closes the operation.

        The page draws all open ones anew at each step, which takes seconds.
        """
        for name, value in parameters.items():
            self.block.get_by_placeholder(name, exact=True).fill(value)
        if body is not None:
            self.block.get_by_role("textbox").last.fill(json.dumps(body))
        self.press("Execute")
        answer = self.block.locator(".live-responses-table")
        status = answer.locator("tbody .response-col_status").inner_text()
        code = answer.locator("h5:text('Response body') + * code")
        content = json.loads(code.inner_text()) if code.count() else None
        self.head.click()
        return status, content


def authorize(docs, token):
    docs.get_by_role("button", name="Authorize", exact=True).click()
    dialog = docs.locator(".dialog-ux")
    dialog.get_by_role("textbox").fill(token)
    dialog.get_by_role("button", name="Apply credentials").click()
    dialog.get_by_role("button", name="Close").last.click()


def make_project(docs, client):
    """What the page says of a Project that it made."""
    status, project = Operation(docs, "createProject").execute()
    found = client.call("GET", f"{PROJECTS}/{project['id']}")
    assert (status, found) == ("201", (200, project))
    return project


def test_address_leads_to_a_page_where_every_operation_works(
    docs, base, gardening, client
):
    assert docs.url == f"{base}/docs/"
    authorize(docs, gardening.token)
    project = make_project(docs, client)
    assert project["name"] == "Buena Vista Park,SF"
    project_url, id = f"{PROJECTS}/{project['id']}", project["id"]
    assert Operation(docs, "listProjects").execute() == ("200", [project])
    assert Operation(docs, "getProject").execute(projectId=id) == ("200", project)
    change = {"name": "Buena Vista"}
    status, changed = Operation(docs, "updateProject").execute(change, projectId=id)
    assert (status, client.call("GET", project_url)) == ("200", (200, changed))
    assert changed == project | change | {
        "version": 2,
        "updated_at": changed["updated_at"],
    }
    assert Operation(docs, "deleteProject").execute(projectId=id) == ("204", None)
    assert client.call("GET", PROJECTS) == (200, [])


@pytest.mark.parametrize("base", [UNDER_A_PREFIX], indirect=True)
def test_page_calls_the_service_under_its_prefix(docs, base, gardening, client):
    assert docs.url == f"{base}/docs/"
    authorize(docs, gardening.token)
    make_project(docs, client)


@pytest.fixture
def without_docs(environment, tmp_path):
    """The environment of a Python that cannot import flask-swagger-ui."""
    (tmp_path / "flask_swagger_ui.py").write_text("raise ImportError")
    return environment | {"PYTHONPATH": str(tmp_path)}


@pytest.fixture
def with_docs(environment):
    pytest.importorskip("flask_swagger_ui")
    return environment


@pytest.mark.parametrize(
    "setup, has_token, options",
    [
        ("with_docs", False, []),
        ("with_docs", True, ["--host=::1"]),
        ("with_docs", True, ["--host=0.0.0.0"]),
        ("without_docs", False, ["--host=0.0.0.0"]),
        ("without_docs", True, []),
    ],
)
def test_flask_run_prints_what_applies(setup, has_token, options, store, request):
    if has_token:
        store.add_token("ann", digest("x"))
    with flask_run(request.getfixturevalue(setup), *options) as (address, printed):
        text = "".join(printed)
        assert ("open /docs/ in a browser" in text) == (setup == "with_docs")
        if setup == "with_docs":
            with urlopen(f"{address}/docs/", timeout=LIMIT) as response:
                assert response.headers.get_content_type() == "text/html"
    assert text.count("token create ACCOUNT") == (not has_token)


def test_service_without_the_package_has_no_page(without_docs, token):
    with (
        flask_run(without_docs) as (address, _),
        Client(port_of(address), token) as client,
    ):
        for path in ("/", "/docs", "/docs/"):
            assert_problem(client.fetch("GET", path), 404)
        assert client.call("POST", PROJECTS, {})[0] == 201


def test_page_is_as_wide_as_a_phone(browser, alone):
    pytest.importorskip("flask_swagger_ui")
    phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True}
    with browser.new_page(**phone) as page:
        page.goto(f"{alone}/docs/")
        page.get_by_text("List your Projects").wait_for(timeout=20_000)
        assert page.evaluate("window.innerWidth") == 390


def test_every_file_of_the_page_is_served_with_its_policy(client):
    package = pytest.importorskip("flask_swagger_ui")
    folder = Path(package.__file__).parent / "dist"
    files = [f"files/{file.name}" for file in folder.iterdir()]
    for name in ["", "start.js", *files]:
        path = f"/docs/{name}"
        status, headers, content = client.fetch("GET", path, Authorization="")
        assert (status, bool(content)) == (200, True), name
        assert headers["Content-Security-Policy"] == (
            "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
            "object-src 'none'; base-uri 'none'; frame-ancestors 'none'"
        )
