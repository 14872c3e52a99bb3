"""PostgreSQL passes the tests of tests/test_store.py."""

import pytest

from test_store import *


@pytest.fixture
def database(postgresql):
    return postgresql
