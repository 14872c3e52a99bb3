"""PostgreSQL passes the tests of tests/test_migrations.py."""

import pytest

from test_migrations import *


@pytest.fixture
def database(postgresql):
    return postgresql


@pytest.fixture
def another_database(another_postgresql):
    return another_postgresql
