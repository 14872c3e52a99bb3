"""The same results, whatever the settings of a PostgreSQL server, database or role are."""

import pytest

from deployment.servers.pgserver import backends, execute
from engines.errors import Unavailable
from helpers.running import closing_store, store_on, wait_for
from helpers.stores import fails
from test_backup import file, source, target_store, test_restored_database_is_the_same_and_goes_on
from test_store import (
    test_every_double_is_kept_to_the_byte,
    test_one_of_many_conditional_updates_wins,
    test_order_of_creation_outlives_changes_of_the_rows,
    test_total_is_exact_however_many_writers_there_are,
)

SETTINGS = {
    "array_nulls": "off",
    "backslash_quote": "off",
    "bytea_output": "escape",
    "client_min_messages": "debug5",
    "DateStyle": "German",
    "default_transaction_deferrable": "on",
    "default_transaction_isolation": "serializable",
    "enable_indexscan": "off",
    "enable_nestloop": "off",
    "enable_seqscan": "off",
    "enable_sort": "off",
    "extra_float_digits": "-15",
    "idle_in_transaction_session_timeout": "3s",
    "IntervalStyle": "iso_8601",
    "lock_timeout": "1ms",
    "plan_cache_mode": "force_generic_plan",
    "quote_all_identifiers": "on",
    "search_path": "theirs",
    "standard_conforming_strings": "off",
    "synchronous_commit": "off",
    "TimeZone": "Asia/Kathmandu",
    "transform_null_equals": "on",
    "xmloption": "document",
}


def change(database, setting, value):
    """From the next session on."""
    name = database.rpartition("/")[2]
    execute(database, f"ALTER DATABASE {name} SET {setting} = '{value}'")


@pytest.fixture(params=SETTINGS.items(), ids=SETTINGS)
def database(request, postgresql):
    execute(postgresql, "CREATE SCHEMA theirs")
    change(postgresql, *request.param)
    return postgresql


@pytest.fixture
def target(request, database, another_postgresql):
    """Which has the same setting."""
    execute(another_postgresql, "CREATE SCHEMA theirs")
    change(another_postgresql, *request.node.callspec.params["database"])
    return another_postgresql


@pytest.fixture
def plain_store(postgresql):
    """A store on a database without any of these settings."""
    with closing_store(postgresql) as plain_store:
        plain_store.engine.open_database(creates=True)
        plain_store.engine.close()
        yield plain_store


def test_database_that_can_only_be_read_is_refused(postgresql):
    change(postgresql, "default_transaction_read_only", "on")
    with fails(Unavailable, "session is read-only"):
        store_on(postgresql).engine.open_database(creates=True)


def test_request_whose_transaction_the_server_ends_has_changed_nothing(plain_store, postgresql):
    change(postgresql, "idle_in_transaction_session_timeout", "100ms")
    with (
        fails(Unavailable, "idle-in-transaction timeout"),
        plain_store.engine.writer(in_transaction=True) as connection,
    ):
        wait_for(lambda: not backends(postgresql))
        connection.fetch("SELECT 1", {})


def test_transaction_of_a_command_may_be_idle(plain_store, postgresql):
    """As that of a backup while the copy is counted."""
    change(postgresql, "idle_in_transaction_session_timeout", "100ms")
    is_idle = "state = 'idle in transaction' AND state_change < now() - interval '300 ms'"
    with plain_store.engine.snapshot() as connection:
        wait_for(lambda: backends(postgresql, is_idle), limit=5)
        connection.fetch("SELECT 1", {})


def test_transaction_of_a_command_may_take_long(plain_store, postgresql):
    select = "SELECT 1 FROM pg_settings WHERE name = 'transaction_timeout'"
    if not execute(postgresql, select):
        pytest.skip("PostgreSQL 17 has brought this limit")
    change(postgresql, "transaction_timeout", "300ms")
    with plain_store.engine.snapshot() as connection:
        connection.fetch("SELECT pg_sleep(0.5)", {})
