"""PostgreSQL passes the tests of tests/test_commands.py that read or write a database."""

import pytest

from test_commands import (
    test_account_is_deleted_with_all_that_is_its_own,
    test_account_is_one_name_however_it_is_typed,
    test_accounts_are_listed_with_their_numbers,
    test_accounts_that_only_look_alike_are_two,
    test_all_tokens_of_an_account_are_revoked,
    test_any_token_can_be_revoked,
    test_command_that_fills_a_database_creates_it,
    test_command_that_fills_nothing_creates_no_database,
    test_defect_keeps_its_traceback,
    test_id_and_new_account_are_named_on_standard_error,
    test_lifetime_is_shown_with_its_end,
    test_list_shows_every_token_but_not_itself,
)


@pytest.fixture
def database(postgresql):
    return postgresql
