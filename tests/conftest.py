import os
from contextlib import ExitStack, closing, contextmanager
from wsgiref.validate import validator

import pytest

# Settings of a developer must not meet the tests, nor the tests a developer's database. First,
# since the modules below copy the environment as they are imported.
SETTINGS = (
    *("FLASK_", "GARDENING_", "GUNICORN_", "WEB_CONCURRENCY", "PORT", "PG", "PYTHON"),
    *("RES_OPTIONS", "PYTEST_ADDOPTS", "PY_COLORS", "FORCE_COLOR"),
)
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
for name in list(os.environ):
    if name.lower() == "https_proxy":  # nothing else that the tests call is far away
        os.environ["PIP_PROXY"] = os.environ[name]
    if name.startswith(SETTINGS) or name.lower() in PROXIES:
        del os.environ[name]

# What fails in them is shown as in a test.
pytest.register_assert_rewrite("deployment.servers", "helpers")

from app import create_app
from auth import digest
from helpers.openapi import CheckedClient
from helpers.running import MEMORY, PROJECTS, closing_store, environment_of, token_on
from helpers.stores import is_sqlite, plain_sql_on

pytest_plugins = ["testservice.gardening_service.fixtures"]
if MEMORY:  # a third of the time of tests that write
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)


@pytest.fixture
def database(tmp_path):
    """The path of a database that is not there yet.

    Files in tests/deployment put the URL of a PostgreSQL database in its place.
    """
    return str(tmp_path / "gardening.db")


@pytest.fixture
def another_database(tmp_path):
    return str(tmp_path / "another.db")


@pytest.fixture
def open_store(database):
    """Creates the database, or brings it up to date, and opens a store on it."""
    with ExitStack() as stores:

        def open_store(database=database, **options):
            store = stores.enter_context(closing_store(database, **options))
            store.engine.open_database(creates=True)
            store.engine.close()
            return store

        yield open_store


@pytest.fixture
def store(open_store):
    return open_store()


@pytest.fixture
def park(store):
    return store.create_project("ann", {"name": "Park"})


@pytest.fixture
def plain_sql(database):
    """A connection of another program, for plain SQL on the same database."""
    with closing(plain_sql_on(database)) as plain_sql:
        yield plain_sql


@pytest.fixture
def foreign_lock(plain_sql):
    """A context in which another program lets no account that there is change anything."""

    @contextmanager
    def foreign_lock():
        if is_sqlite(plain_sql):
            plain_sql.execute("BEGIN IMMEDIATE")
        else:
            plain_sql.execute("BEGIN")
            plain_sql.execute("SELECT FROM account FOR UPDATE")
            plain_sql.execute("SELECT FROM project FOR UPDATE")
        try:
            yield
        finally:
            plain_sql.execute("ROLLBACK")

    return foreign_lock


@pytest.fixture
def app(database):
    app = create_app({"DATABASE": database})
    app.test_client_class = CheckedClient
    app.wsgi_app = validator(app.wsgi_app)  # PEP 3333
    app.extensions["store"].engine.open_database(creates=True)
    yield app
    app.extensions["store"].engine.close()


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
def project_url(project):
    return f"{PROJECTS}/{project['id']}"


@pytest.fixture
def environment(database):
    """The environment of a process that serves the database, which it creates."""
    with closing_store(database) as store:
        store.engine.open_database(creates=True)
    return environment_of(database)


@pytest.fixture
def token(database):
    return token_on(database)
