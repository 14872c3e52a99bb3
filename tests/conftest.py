import http.client
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from conformance import check_response
from flask.testing import FlaskClient

from app import create_app
from auth import digest
from store import SQLiteStore

pytest_plugins = ["testing"]

PROJECTS = "/api/v1/gardening/projects"
POINT = {"type": "Point", "coordinates": [-122.4410896675, 37.768361565]}
ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
LIMIT = 60  # seconds for a thread or a process to end, however slow the machine
CHROMIUM = shutil.which("chromium")
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


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def database(request):
    """The path or URL of an empty database, one of each engine."""
    if request.param == "SQLite":
        yield request.getfixturevalue("path")
    else:
        server = request.getfixturevalue("server")
        url = server.create_database()
        yield url
        server.drop_database(url)


@pytest.fixture
def open_store(database):
    """Opens a store on the database, and closes it after the test."""
    with ExitStack() as stores:

        def open_store(clock=time.time):
            engine = SQLiteStore
            if database.startswith("postgresql://"):
                from postgres import PostgresStore as engine
            store = engine(database, clock=clock)
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


@pytest.fixture
def token(environment):
    return flask("token", "create", "ann", environment=environment).strip()


def flask(*arguments, environment):
    """What the command prints."""
    return subprocess.check_output(
        [BIN / "flask", *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        timeout=LIMIT,
    )


@contextmanager
def gunicorn(environment, *options, stdout=subprocess.DEVNULL):
    """gunicorn with its own settings, and these: its process and its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # As gunicorn does for a socket of its own.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = listener.getsockname()[1]
        command = [BIN / "gunicorn", "--bind", f"fd://{listener.fileno()}"]
        process = subprocess.Popen(
            [*command, "--workers=2", "--log-level=warning", *options],
            cwd=ROOT,
            env=environment,
            pass_fds=[listener.fileno()],
            stdout=stdout,
            start_new_session=True,
        )
    try:
        yield process, port
    finally:
        process.terminate()
        process.wait(LIMIT)


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


class Client(http.client.HTTPConnection):
    """A connection that is kept alive, with a token."""

    def __init__(self, port, token):
        super().__init__("127.0.0.1", port, timeout=LIMIT)
        self.authorization = {"Authorization": f"Bearer {token}"}

    def call(self, method, path, body=None):
        """Status and JSON of the answer."""
        status, _, content = self.ask(method, path, body)
        return status, json.loads(content) if content else None

    def ask(self, method, path, body=None):
        """Status, headers and content of the answer."""
        headers = self.authorization | {"Content-Type": "application/json"}
        self.request(method, path, None if body is None else json.dumps(body), headers)
        response = self.getresponse()
        content = response.read()
        route = path.removeprefix("/garden").split("?")[0]
        check_response(method, route, response.status, response.headers, content)
        return response.status, response.headers, content

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def at_once(work, count=8, errors=()):
    """What `work(number)` returns in each of so many threads, or which of the errors."""
    results, start = [None] * count, threading.Barrier(count)

    def run(number):
        start.wait(LIMIT)
        try:
            results[number] = work(number)
        except errors as error:
            results[number] = error

    threads = [
        threading.Thread(target=run, args=(number,), daemon=True)
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    return results
