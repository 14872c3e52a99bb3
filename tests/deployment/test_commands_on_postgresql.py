"""PostgreSQL passes the tests of tests/test_commands.py."""

import pytest

from test_commands import *


@pytest.fixture
def database(postgresql):
    return postgresql
