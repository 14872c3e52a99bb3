"""The page /docs/, in a browser, alone and behind proxies; and what leads to it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flask_swagger_ui
import pytest
from playwright.sync_api import sync_playwright

from deployment.servers.nginx import HOST, assert_problem
from deployment.servers.proxies import PROXIES, start_proxy
from helpers.running import (
    BIN,
    PROJECTS,
    Client,
    flask_run,
    gunicorn,
    hold_port,
    port_of,
    run,
)

# The headless shell is the same browser without its windows, and takes less time.
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")


@pytest.fixture
def upstream(environment):
    with gunicorn(environment | {"GARDENING_PREFIX": "/garden"}) as (_, port):
        yield port


@pytest.fixture
def direct(upstream, token):
    """Past the proxy and the browser."""
    with Client(upstream, token) as client:
        yield client


@pytest.fixture
def base(request, upstream, tmp_path):
    """The address of the service, without a slash at the end."""
    if request.param == "alone":
        yield f"http://127.0.0.1:{upstream}"
    else:
        with start_proxy(request.param, tmp_path, upstream) as proxy:
            yield f"https://{HOST}:{proxy.port}/garden"


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, whose requests do not leave the machine."""
    if not CHROMIUM:
        pytest.skip("chromium is not installed")
    try:
        run(BIN / "playwright", "--version")
    except AssertionError as error:  # on Debian 12, for want of libatomic1
        pytest.skip(str(error).splitlines()[0])
    resolver = "--host-resolver-rules=MAP * 127.0.0.1"
    options = ["--no-sandbox", "--ignore-certificate-errors", resolver]
    with (
        sync_playwright() as driver,
        driver.chromium.launch(executable_path=CHROMIUM, args=options) as browser,
    ):
        yield browser


@pytest.fixture
def tab(browser):
    """An empty tab as wide as a phone; every wait has a limit."""
    phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True}
    with browser.new_page(**phone) as tab:
        tab.set_default_timeout(20_000)
        yield tab


@pytest.fixture
def docs(tab, base):
    """The page as a person finds it; fails if anything goes wrong in it, or outside."""
    wrong = []

    def watch(event: str, is_wrong: Callable[[Any], bool] = lambda _: True) -> None:
        tab.on(event, lambda seen: is_wrong(seen) and wrong.append(repr(seen)))

    watch("console", lambda message: message.type in ("error", "warning"))
    watch("pageerror")
    watch("request", lambda request: not request.url.startswith(f"{base}/"))
    watch("requestfailed")
    watch("response", lambda response: response.status >= 400)
    tab.goto(f"{base}/")
    tab.get_by_text("List your Projects").wait_for()
    yield tab
    assert wrong == []


@pytest.mark.parametrize("base", ["alone", *PROXIES], indirect=True)
def test_address_leads_to_a_page_that_calls_the_service(docs, base, token, direct):
    assert docs.url == f"{base}/docs/"
    assert docs.evaluate("window.innerWidth") == 390
    docs.get_by_role("button", name="Authorize", exact=True).click()
    dialog = docs.locator(".dialog-ux")
    dialog.get_by_role("textbox").fill(token)
    dialog.get_by_role("button", name="Apply credentials").click()
    dialog.get_by_role("button", name="Close").last.click()
    create = docs.locator("#operations-projects-createProject")
    create.get_by_role("button").first.click()
    for name in ("Try it out", "Execute"):
        create.get_by_role("button", name=name, exact=True).click()
    response = create.locator(".live-responses-table")
    assert response.locator("tbody .response-col_status").inner_text() == "201"
    shown = response.locator("h5:text('Response body') + * code").inner_text()
    assert direct.call("GET", PROJECTS) == (200, [json.loads(shown)])


@pytest.fixture
def without_docs(environment, tmp_path):
    """The environment of a Python that cannot import flask-swagger-ui."""
    (tmp_path / "flask_swagger_ui.py").write_text("raise ImportError")
    return environment | {"PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize("python", ["environment", "without_docs"])
def test_flask_run_names_the_page_that_there_is(python, request):
    environment = request.getfixturevalue(python)
    with hold_port() as holder:
        port = holder.getsockname()[1]
        with flask_run(environment, f"--port={port}") as (_, printed):
            has_page = python == "environment"
            assert (f"    http://127.0.0.1:{port}/docs/\n" in printed) == has_page
    with flask_run(environment) as (_, printed):  # the port is not known yet
        assert "/docs/" not in "".join(printed)


def test_service_without_the_package_has_no_page(without_docs, token):
    with (
        flask_run(without_docs) as (address, _),
        Client(port_of(address), token) as client,
    ):
        for path in ("/", "/docs", "/docs/"):
            assert_problem(client.fetch("GET", path), 404)
        assert client.call("POST", PROJECTS, {})[0] == 201


def test_every_file_of_the_page_is_served_with_its_policy(direct):
    folder = Path(flask_swagger_ui.__file__).parent / "dist"
    files = [f"files/{file.name}" for file in folder.iterdir()]
    for name in ["", "start.js", *files]:
        path = f"/docs/{name}"
        status, headers, content = direct.fetch("GET", path, Authorization="")
        assert (status, bool(content)) == (200, True), name
        assert headers["Content-Security-Policy"] == (
            "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
            "object-src 'none'; base-uri 'none'; frame-ancestors 'none'"
        )
