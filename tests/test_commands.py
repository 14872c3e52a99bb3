"""The command line: what is printed, and what is refused."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from datetime import date
from unicodedata import normalize

import click
import pytest
from click.testing import CliRunner

from app import create_app
from commands import END_SIGNALS, TokenID, ignore_end_signals, interrupt
from engines.backup import COLUMNS
from helpers.openapi import API
from helpers.running import BIN, LIMIT, ROOT, flask_run, run
from helpers.stores import is_sqlite
from helpers.testservice import copy_service


def test_list_shows_ids_and_times_but_no_token(command):
    accounts = ["ann", "bob", "ann"]
    tokens = [command("token", "create", each).stdout.strip() for each in accounts]
    header, *lines = command("token", "list").stdout.splitlines()
    assert header == "  ID  CREATED (UTC)     EXPIRES (UTC)     ACCOUNT  NOTE"
    time = r"20\d\d-\d\d-\d\d \d\d:\d\d"
    for number, (account, line) in enumerate(zip(accounts, lines, strict=True), 1):
        assert re.fullmatch(f"   {number}  {time}  never             {account}", line)
    assert not any(token in line for token in tokens for line in lines)


def test_any_token_can_be_revoked(command):
    for _ in range(11):
        command("token", "create", "ann")
    assert command("token", "revoke", "11").exit_code == 0
    assert command("token", "revoke", "1").exit_code == 0
    listed = command("token", "list").stdout
    assert re.findall(r"(?m)^ +(\d+)", listed) == [str(id) for id in range(2, 11)]
    for id in ("1", str(2**63 - 1)):
        refused = command("token", "revoke", id)
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert refused.stderr == f"Error: There is no token with the ID {id}.\n"


HINT = "restore a backup, or run `init-db` for an empty database"
MISSING = f"^Error: .*(no database at .*|the database has no tables): {HINT}$"


@pytest.mark.parametrize(
    "words",
    [
        ["token", "create", "ann"],
        ["token", "list"],
        ["token", "revoke", "1"],
        ["token", "revoke", "--account", "ann"],
        ["token", "revoke", "--expired"],
        ["account", "list"],
        ["account", "delete", "ann", "--yes"],
        ["backup", "backup.db"],
    ],
    ids=" ".join,
)
def test_command_creates_no_database(database, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    commands = create_app({"DATABASE": database}).test_cli_runner()
    for _ in range(2):  # as if the first refusal had created something
        refused = commands.invoke(args=words)
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert re.search(MISSING, refused.stderr) and refused.stderr.count("\n") == 1
        is_file = database in refused.stderr
        assert is_file or database.startswith("postgresql://")
    assert list(tmp_path.iterdir()) == []


def test_database_is_created_on_purpose_and_said(database):
    app = create_app({"DATABASE": database})
    with closing(app.extensions["store"].engine) as engine:
        commands = app.test_cli_runner()
        created = commands.invoke(args=["init-db"])
        assert (created.exit_code, created.stdout) == (0, "")
        assert created.stderr == f"A new database: {engine.name}\n"
        again = commands.invoke(args=["init-db"])
        assert (again.exit_code, again.output) == (0, "")
        assert commands.invoke(args=["token", "create", "ann"]).exit_code == 0


UNKNOWN = "\u0378"  # to every Python, as today's newest emoji is to those of yesterday


def test_note_is_shown_with_its_token(command):
    for account, *note in [
        ("bob", "--note", "é" * 100),
        ("a long name",),
        ("bob", "--note", f"x {UNKNOWN}"),
    ]:
        assert command("token", "create", account, *note).exit_code == 0
    header, *lines = command("token", "list").stdout.splitlines()
    columns = header.index("ACCOUNT"), header.index("NOTE")
    accounts = [line[slice(*columns)].rstrip() for line in lines]
    assert accounts == ["bob", "a long name", "bob"]
    assert [line[columns[1] :] for line in lines] == ["é" * 100, "", f"x {UNKNOWN}"]


def test_tokens_of_one_account_are_listed(command):
    for account in ("Zoe\u0308", "bob", "Zo\xeb"):
        command("token", "create", account)
    listed = command("token", "list", "Zoe\u0308").stdout
    assert re.findall(r"(?m)^ +(\d+)", listed) == ["1", "3"]
    refused = command("token", "list", "bo")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr == "Error: The account bo has no tokens.\n"


@pytest.mark.parametrize("note", ["", "x" * 101, "a\nb", "a\x1bb", "\ud800"])
def test_note_that_is_not_printable_text_of_a_line_is_refused(command, store, note):
    refused = command("token", "create", "ann", "--note", note)
    assert (refused.exit_code, refused.stdout) == (1, "")
    what = "A note must be 1 to 100 printable characters, without a line break."
    assert refused.stderr == f"Error: {what}\n"
    assert store.list_tokens() == []


def test_time_that_only_an_edited_backup_can_hold_is_listed(command, plain_sql):
    command("token", "create", "ann")
    plain_sql.execute(f"UPDATE token SET created_at = {2**62}")
    assert "out of range" in command("token", "list").stdout


USAGE = [["create"], ["revoke"], ["no-such-command"], ["revoke", "1", "--account", "a"]]
USAGE += [["revoke", "--expired", *other] for other in (["1"], ["--account", "a"])]
DAYS = ["0", "x", "1000001"]
USAGE += [["create", "ann", "--days", days] for days in DAYS]
USAGE += [["revoke", id] for id in ("x", "1_0", " 1", "+1", "１", "0", str(2**63))]


@pytest.mark.parametrize("words", USAGE)
def test_wrong_input_is_refused_with_usage(command, words):
    result = command("token", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    *usage, error = result.stderr.splitlines()
    assert usage and error.startswith("Error: ")
    assert "--days" not in words or "Invalid value for '--days': " in error
    assert command("token", "list").stdout.count("\n") == 1


ESCAPE = "\x1b[2J\x9b"  # clears a terminal


def test_escape_sequence_is_not_printed(command, plain_sql, tmp_path):
    """Whoever wrote it into the database, as no command would."""
    command("token", "create", "ann", "--note", "phone")
    plain_sql.execute(f"UPDATE token SET account = '{ESCAPE}', note = '{ESCAPE}'")
    plain_sql.execute(f"INSERT INTO account (name) VALUES ('{ESCAPE}')")
    missing = create_app({"DATABASE": str(tmp_path / f"{ESCAPE}\n.db")}).test_cli_runner()
    tokens, accounts = (command(each, "list").stdout for each in ("token", "account"))
    error, created = (missing.invoke(args=each).stderr for each in (["token", "list"], ["init-db"]))
    for printed in (tokens, accounts, error, created):
        assert "?[2J?" in printed
        assert printed.replace("\n", "").isprintable()
    assert "?[2J? .db" in error and "?[2J??.db" in created  # on one line


@pytest.mark.parametrize("days", [1, 2, 1_000_000])
def test_lifetime_is_shown_with_its_end(command, days):
    assert command("token", "create", "ann", "--days", str(days)).exit_code == 0
    created, expires = command("token", "list").stdout.splitlines()[1].split()[1:4:2]
    lifetime = date.fromisoformat(expires) - date.fromisoformat(created)
    assert lifetime.days == days


def test_times_are_shown_in_utc():
    """Wherever the machine is: here, nine hours ahead."""
    show = "import commands; print(commands.utc(1_700_000_000_123))"
    ended = run(sys.executable, "-c", show, environment=os.environ | {"TZ": "JST-9"})
    assert ended.stdout == "2023-11-14 22:13\n"


def test_id_and_new_account_are_named_on_standard_error(command, store):
    for account, message in [
        ("ann", "The token's ID is 1.\nann is a new account.\n"),
        ("ann", "The token's ID is 2.\n"),
        ("An", "The token's ID is 3.\nAn is a new account.\n"),
    ]:
        result = command("token", "create", account)
        assert result.stdout.startswith("gardening_") and result.stderr == message
    store.create_project("bob", {})
    assert "new" not in command("token", "create", "bob").stderr


NAMES = {"shortest": "é", "accent": "Zoë", "longest": "é" * 255, "inner spaces": "a  b"}
NAMES["unknown"] = UNKNOWN


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_account_name_is_normalized(command, store, name):
    for form, is_new in [("NFC", True), ("NFD", False)]:
        created = command("token", "create", normalize(form, name))
        assert ("new" in created.stderr) == is_new
    assert [account.name for account in store.list_accounts()] == [name]
    deletion = command("account", "delete", normalize("NFD", name), "--yes")
    assert (deletion.exit_code, store.list_accounts()) == (0, [])


def test_accounts_that_only_look_alike_are_two(command, store):
    for name in ("Area 2", "Area ²", "ﬁr", "fir"):
        message = command("token", "create", name).stderr
        assert message.endswith(f"\n{name} is a new account.\n")
    assert len(store.list_accounts()) == 4


# The categories Cc, Cs, Cf, Co, Zl, Zp and Zs.
UNPRINTABLE = ["a\0b", "\ud800", "a\u200bb", "\ue000", "a\u2028b", "a\u2029b", "a\xa0b"]


@pytest.mark.parametrize("name", ["", " a", "a ", "x" * 256, *UNPRINTABLE])
def test_invalid_account_name_is_refused(command, store, name):
    for words in (["token", "create", name], ["account", "delete", name, "--yes"]):
        result = command(*words)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("Error: An account name must be 1 to 255 printable")
    assert store.list_accounts() == []


def test_accounts_are_listed_with_their_numbers(command, store, plain_sql):
    store.create_project("ann", {})
    id = store.create_project("ann", {"name": "Park"}).id
    store.update_project("ann", id, {})
    plain_sql.execute("UPDATE project SET created_at = created_at - 1")
    store.delete_project("bob", store.create_project("bob", {}).id)
    for account in ("eve", "ann", "eve"):
        command("token", "create", account)
    header, *lines = command("account", "list").stdout.splitlines()
    assert header.split() == ["PROJECTS", "TOKENS", "CHANGED", "(UTC)", "ACCOUNT"]
    rows = [line.split() for line in lines]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("2", "1", "ann"),
        ("0", "0", "bob"),
        ("0", "2", "eve"),
    ]
    assert [row[2] == "never" for row in rows] == [False, True, True]
    changed = json.loads(store.get_project("ann", id).document)["updated_at"]
    assert store.list_accounts()[0].changed_at == changed


def test_account_is_deleted_with_all_its_rows(command, store, plain_sql):
    kept = store.create_project("bob", {}, key="k")
    command("token", "create", "bob")
    id = store.create_project("ann", {}, key="k").id
    plain_sql.execute(f"INSERT INTO part VALUES ('p', '{id}', 'zone', 'ann')")
    command("token", "create", "ann")
    store.delete_project("ann", store.create_project("ann", {}, key="spent").id)

    def has_rows_of_ann(table):
        return "ann" in str(plain_sql.execute(f"SELECT * FROM {table}").fetchall())

    assert [*filter(has_rows_of_ann, COLUMNS)] == [*COLUMNS]
    result = command("account", "delete", "ann", "--yes")
    assert (result.exit_code, result.output) == (0, "")
    assert [*filter(has_rows_of_ann, COLUMNS)] == []
    assert [account.name for account in store.list_accounts()] == ["bob"]
    assert store.create_project("bob", {}, key="k") == kept


def test_account_is_deleted_only_after_a_yes(app, store):
    store.create_project("ann", {})
    words = ["account", "delete", "ann"]
    for typed, accounts in [("n\n", 1), ("", 1), ("y\n", 0)]:
        result = app.test_cli_runner().invoke(args=words, input=typed)
        asked = "Delete the account ann with its Projects (1) and tokens (0)? [y/N]: "
        assert result.stdout.startswith(asked)
        assert (result.exit_code, len(store.list_accounts())) == (accounts, accounts)


def test_account_is_not_deleted_if_nobody_can_be_asked(environment, store):
    store.create_project("ann", {})
    script = f"{BIN}/flask account delete ann <&-"
    refused = run("sh", "-c", script, environment=environment, status=1)
    reason = "Nobody can be asked: a stream is closed. Use --yes."
    assert (refused.stdout, refused.stderr) == ("", f"Error: {reason}\n")
    assert len(store.list_accounts()) == 1


def test_unknown_account_is_refused_before_any_question(command):
    refused = command("account", "delete", "ann")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr == "Error: There is no account ann.\n"


@pytest.mark.parametrize("words", ["token list", "token create ann", "account delete ann"])
def test_defect_keeps_its_traceback_but_prints_no_line_of_the_database(command, plain_sql, words):
    """A name in the database is in the message of the error."""
    assert command("token", "list").exit_code == 0
    plain_sql.execute("ALTER TABLE token RENAME TO renamed")
    name = f"{ESCAPE}\nTo go back: rm -rf /\u2028"
    if is_sqlite(plain_sql):
        plain_sql.execute(f'CREATE VIEW token AS SELECT * FROM "{name}"')
    else:
        plain_sql.execute(f'CREATE VIEW token AS SELECT 1 AS "{name}"')
    result = command(*words.split())
    first, second, *lines = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (1, "")
    assert (first, second) == (
        "Error: a bug in the service",
        "    Traceback (most recent call last):",
    )
    assert all(line.startswith("    ") and line.isprintable() for line in lines)
    assert "rm -rf" in result.stderr or not is_sqlite(plain_sql)


def test_all_tokens_of_an_account_or_all_that_have_expired_are_revoked(command, store):
    for account in ("Zoe\u0308", "bob", "Zo\xeb"):
        command("token", "create", account)
    assert command("token", "revoke", "--account", "Zoe\u0308").exit_code == 0
    assert [token.account for token in store.list_tokens()] == ["bob"]
    refused = command("token", "revoke", "--account", "Zo\xeb")
    assert refused.stderr == "Error: The account Zo\xeb has no tokens.\n"
    store.add_token("eve", b"expired", days=0)
    for _ in range(2):  # a timer may run it, so it is no error that nothing has expired
        ended = command("token", "revoke", "--expired")
        assert (ended.exit_code, ended.output) == (0, "")
        assert [token.account for token in store.list_tokens()] == ["bob"]
    refused = command("token", "revoke", "bob")
    assert refused.stderr.endswith(f"'bob' is not a valid {TokenID.name}.\n")
    assert len(store.list_tokens()) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no such device")
def test_token_that_cannot_be_printed_can_be_revoked(environment, store):
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [BIN / "flask", "token", "create", "ann"],
            cwd=ROOT,
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    assert ended.returncode != 0
    reason = "Error: [Errno 28] No space left on device\n"
    assert ended.stderr.startswith(f"The token's ID is 1.\nann is a new account.\n{reason}")
    assert store.revoke_token(1)


def test_signal_whose_exception_was_swallowed_ends_a_restore_before_the_change():
    """SQLite overlooks errors as it reads statistics."""
    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    try:
        for ended in (interrupt, ignore_end_signals):
            with pytest.raises(KeyboardInterrupt):
                ended()
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def test_output_that_nobody_reads_is_no_bug(environment):
    assert run("sh", "-c", f"{BIN}/flask token list | true", environment=environment).stderr == ""


def test_another_programs_command_may_be_called_run(tmp_path):
    @click.command("run")
    @click.option("--host")
    def other(host):
        create_app({"DATABASE": str(tmp_path / "new.db")})

    assert CliRunner().invoke(other).output == ""
    assert list(tmp_path.iterdir()) == []


def test_hint_of_flask_run_works_in_a_folder_without_the_service(tmp_path):
    clone, folder = tmp_path / "a clone", tmp_path / "elsewhere"
    for each in (clone, folder):
        each.mkdir()
    copy_service(clone)
    run_flask = BIN / "flask", "--app", clone / "app"
    with flask_run(os.environ, folder=folder, flask=run_flask) as (_, printed):
        [hint] = [line for line in printed if "token create" in line]
    assert run("sh", "-c", hint, folder=folder).stdout.startswith("gardening_")
    with flask_run(os.environ, folder=folder, flask=run_flask) as (_, printed):
        assert not any("token create" in line for line in printed)


def test_version_is_the_release_and_the_commit_that_deploy_gardening_py_names():
    def version(**environment):
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
        command = [sys.executable, "-Pm", "app", "--version"]
        return run(*command, folder="/", environment=environment).stdout

    release = f"gardening {API['info']['version']}"
    assert version() == f"{release}\n"
    assert version(CLONE_COMMIT="5f0c") == f"{release}, commit 5f0c\n"
