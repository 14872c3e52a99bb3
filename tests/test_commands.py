"""The command line: what is printed, and what is refused."""

import os
import time
from datetime import date

import pytest
from conftest import on_sqlite

from commands import utc


def test_create_prints_the_token_alone(command):
    result = command("token", "create", "ann", "--days", "30")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("gardening_")
    assert len(result.stdout.split()) == 1 and len(result.stdout) > 50
    assert command("token", "create", "ann").stdout != result.stdout


def test_list_shows_every_token_but_not_itself(command):
    accounts = ["ann", "bob", "ann"]
    tokens = [
        command("token", "create", account).stdout.strip() for account in accounts
    ]
    header, *lines = command("token", "list").stdout.splitlines()
    assert header.split() == ["ID", "CREATED", "(UTC)", "EXPIRES", "(UTC)", "ACCOUNT"]
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert [line.split()[3:] for line in lines] == [
        ["never", each] for each in accounts
    ]
    assert not any(token in line for token in tokens for line in lines)


def test_any_token_can_be_revoked(command):
    for _ in range(11):
        command("token", "create", "ann")
    assert command("token", "revoke", "11").exit_code == 0
    assert command("token", "revoke", "1").exit_code == 0
    ids = [line.split()[0] for line in command("token", "list").stdout.splitlines()[1:]]
    assert ids == [str(id) for id in range(2, 11)]


@pytest.mark.parametrize(
    "words",
    [
        ["create", ""],
        ["create", "  "],
        ["create", "a\nb"],
        ["create", "\ud800"],
        ["create"],
        ["create", "ann", "--days", "0"],
        ["create", "ann", "--days", "-1"],
        ["create", "ann", "--days", "x"],
        ["create", "ann", "--days", "1000001"],
        ["create", "ann", "--days", "9" * 30],
        ["revoke", "1"],
        ["revoke", "x"],
        ["revoke", "0"],
        ["revoke", str(2**63 - 1)],
        ["revoke", str(2**63)],
        ["revoke", "9" * 30],
        ["revoke"],
        ["no-such-command"],
    ],
)
def test_wrong_input_is_one_line_of_error(command, words):
    result = command("token", *words)
    assert result.exit_code != 0
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert command("token", "list").stdout.count("\n") == 1


@pytest.mark.parametrize("days", ["1", "2", "1000000"])
def test_lifetime_is_shown_with_its_end(command, days):
    assert command("token", "create", "ann", "--days", days).exit_code == 0
    created, expires = command("token", "list").stdout.splitlines()[1].split()[1:4:2]
    if days == "1000000":
        assert 4000 < int(expires[:4]) < 9999
    else:
        lifetime = date.fromisoformat(expires) - date.fromisoformat(created)
        assert lifetime.days == int(days)


@on_sqlite
@pytest.mark.parametrize("words", [["create", "ann"], ["list"], ["revoke", "1"]])
def test_lost_database_is_one_line_of_error(command, path, words):
    os.remove(path)
    result = command("token", *words)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: unable to open database file: {path}\n"


def test_account_may_be_any_printable_text(command):
    assert command("token", "create", "Ann O'Neill <ann@example.org> 😀").exit_code == 0
    assert command("token", "list").stdout.endswith(
        "  Ann O'Neill <ann@example.org> 😀\n"
    )


@pytest.fixture
def elsewhere(monkeypatch):
    """A machine whose local time is nine hours ahead."""
    with monkeypatch.context() as environment:
        for name in ("TZ", "PGTZ"):
            environment.setenv(name, "JST-9")
        time.tzset()
        yield
    time.tzset()


def test_times_are_shown_in_utc(elsewhere):
    assert utc(1_700_000_000_123) == "2023-11-14 22:13"
    assert utc(None) == "never"
