"""A backup moves a database from SQLite to PostgreSQL, and back."""

import pytest

from test_backup import (
    file,
    source,
    target_store,
    test_restored_database_is_the_same_and_goes_on,
)


@pytest.fixture(params=["to PostgreSQL", "from PostgreSQL"])
def pair(request, postgresql, tmp_path):
    """The database to back up, and the one to fill."""
    file = str(tmp_path / "gardening.db")
    return (file, postgresql) if request.param == "to PostgreSQL" else (postgresql, file)


@pytest.fixture
def database(pair):
    return pair[0]


@pytest.fixture
def target(pair):
    return pair[1]
