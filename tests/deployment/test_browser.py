"""The page /docs/ in a browser, alone and below a prefix of another site."""

import json
import shutil

import pytest
from playwright.sync_api import sync_playwright

from deployment.servers.nginx import HOST, another_site, proxy
from helpers.running import PROJECTS, Client, gunicorn

# The headless shell is the same browser without its windows, and takes less time.
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")


@pytest.fixture
def upstream(environment):
    with gunicorn(environment) as (_, port):
        yield port


@pytest.fixture
def base(request, upstream, tmp_path):
    """The address of the service, without a slash at the end."""
    if request.param == "alone":
        yield f"http://127.0.0.1:{upstream}"
    else:
        with another_site(tmp_path, upstream) as port:
            yield f"http://{HOST}:{port}/garden"


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, whose requests do not leave the machine."""
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

    def watch(event, is_wrong=lambda _: True):
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


@pytest.mark.parametrize("base", ["alone", "below a prefix"], indirect=True)
def test_address_leads_to_a_page_that_calls_the_service(docs, base, token, upstream):
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
    with Client(upstream, token) as direct:
        assert direct.call("GET", PROJECTS) == (200, [json.loads(shown)])


READ_HEADERS = """async ([url, method]) => {
    const response = await fetch(url, { method, headers: { Authorization: "Bearer x" } });
    return [response.status, Object.fromEntries(response.headers)];
}"""


def test_page_of_a_named_origin_reads_what_a_report_needs(tab, upstream, tmp_path):
    folders = tmp_path / "site", tmp_path / "service"
    for folder in folders:
        folder.mkdir()
    with another_site(folders[0], upstream) as port:
        origin = f"http://{HOST}:{port}"
        tab.goto(origin)
        with proxy(folders[1], upstream, origin=origin) as nginx:
            url = f"https://{HOST}:{nginx.port}{PROJECTS}"
            for method, status, name in [("GET", 401, "www-authenticate"), ("PUT", 405, "allow")]:
                found, headers = tab.evaluate(READ_HEADERS, [url, method])
                assert (found, {"x-request-id", name} <= {*headers}) == (status, True)
