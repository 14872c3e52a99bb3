import pytest

from app import create_app
from auth import digest
from store import Store

pytest_plugins = ["testing"]

PROJECTS = "/api/v1/gardening/projects"


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "gardening.db")


@pytest.fixture
def store(path):
    return Store(path)


@pytest.fixture
def app(path):
    return create_app({"DATABASE": path})


@pytest.fixture
def sign_in(app):
    """A test client with a token of the account."""

    def sign_in(account):
        token = f"gardening_of_{account}"
        app.store.add_token(account, digest(token))
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
