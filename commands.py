"""The commands of `flask`, and what `flask run` says at its start."""

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from traceback import format_exception
from typing import Any

import click
from flask import Flask, current_app
from flask.cli import AppGroup, FlaskGroup, ScriptInfo, run_command
from werkzeug.serving import is_running_from_reloader

from auth import current_store, issue_token
from engines.backup import BadBackup, backup, restore
from engines.engine import Engine
from engines.errors import OutcomeUnknown, Unavailable
from engines.names import BadName, BadNote, account_name, is_printable
from store import Store

PROGRAM = "gardening"  # on a server
END_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
MAX_DAYS = 1_000_000  # 2,700 years; Python's dates end with the year 9999


class WrongSetting(click.ClickException, ValueError):
    """A setting that the service cannot use; `flask` prints it as one line."""


class Command(click.Command):
    """Says what went wrong as it ran: in one line, or a bug with its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        with failures():
            return super().invoke(ctx)


class Group(AppGroup):
    command_class = Command


@contextmanager
def failures() -> Iterator[None]:
    """Let `flask` print what went wrong in the block. Raises click.ClickException."""
    try:
        yield
    except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
        raise  # click knows these
    except (BadName, BadNote, BadBackup, Unavailable, OSError) as error:
        line = " ".join(str(error)[:2000].splitlines())  # it may quote a file
        if isinstance(error, OutcomeUnknown):
            line += "; the change may have been made, or not"
        raise click.ClickException(printable(line)) from error
    except Exception as error:
        raise click.ClickException(f"a bug in the service\n{traceback_of(error)}") from error


def traceback_of(error: BaseException) -> str:
    """Its lines, indented and printable, since the error may quote a caller or the database."""
    lines = "".join(format_exception(error)).splitlines()
    return "\n".join(f"    {printable(line)}" for line in lines)


def printable(line: str) -> str:
    """Without escape sequences, which the terminal would obey, whoever wrote them into the file."""
    return "".join(each if is_printable(each) else "?" for each in line)


def echo(line: str, err: bool = False) -> None:
    click.echo(printable(line), err=err)


account_commands = Group("account", help="List and delete accounts.")
token_commands = Group("token", help="Issue, list and revoke access tokens.")
all_commands = Group(commands=[account_commands, token_commands])


@token_commands.command("create")
@click.argument("account")
@click.option("--days", type=click.IntRange(1, MAX_DAYS), help="Default: no expiry.")
@click.option("--note", help="Shown by `list`, for whoever revokes it.")
def create_token(account: str, days: int | None, note: str | None) -> None:
    """Print a new token for ACCOUNT; it cannot be shown again."""
    store, account = current_store(), account_name(account)
    is_new = store.find_account(account) is None
    token, id = issue_token(store, account, days, note)
    # First, so that a token that cannot be printed can be revoked.
    click.echo(f"The token's ID is {id}.", err=True)
    if is_new:
        click.echo(f"{account} is a new account.", err=True)
    click.echo(token)


@token_commands.command("list")
@click.argument("account", required=False)
def list_tokens(account: str | None) -> None:
    """Show all tokens, or those of ACCOUNT: ID, times, account and note."""
    name = None if account is None else account_name(account)
    tokens = current_store().list_tokens(name)
    if name and not tokens:
        raise click.ClickException(f"The account {name} has no tokens.")
    id_width = max([4, *(len(str(token.id)) for token in tokens)])
    account_width = max([7, *(len(token.account) for token in tokens)])
    line = f"{{:>{id_width}}}  {{:16}}  {{:16}}  {{:{account_width}}}  {{}}"
    click.echo(line.format("ID", "CREATED (UTC)", "EXPIRES (UTC)", "ACCOUNT", "NOTE"))
    for token in tokens:
        times = utc(token.created_at), utc(token.expires_at)
        echo(line.format(token.id, *times, token.account, token.note or "").rstrip())


def utc(time: int | None) -> str:
    """Epoch milliseconds as a date and a time of day; `never` for none."""
    if time is None:
        return "never"
    try:
        return f"{datetime.fromtimestamp(time // 1000, UTC):%Y-%m-%d %H:%M}"
    except (OverflowError, ValueError):  # only an edited backup can hold such a time
        return "out of range"


class TokenID(click.IntRange):
    # What click puts into its error: "'bob' is not a valid …".
    name = "ID of a token; --account revokes all tokens of an account"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Raises BadParameter, also for other forms of an integer, such as "1_0"."""
        if not re.fullmatch("[0-9]+", str(value)):
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)
        return super().convert(value, param, ctx)


@token_commands.command("revoke")
@click.argument("id", type=TokenID(1, 2**63 - 1), required=False)
@click.option("--account", help="Revoke all tokens of this account.")
@click.option("--expired", is_flag=True, help="Remove what has expired from `list`.")
def revoke_token(id: int | None, account: str | None, expired: bool) -> None:
    """Make the token with this ID, as `list` shows it, invalid at once."""
    store = current_store()
    if [id is not None, account is not None, expired].count(True) != 1:
        raise click.UsageError("Give one of these: the ID of a token, --account, --expired.")
    if expired:
        store.revoke_expired_tokens()
    if id is not None and not store.revoke_token(id):
        raise click.ClickException(f"There is no token with the ID {id}.")
    if account is not None and not store.revoke_tokens(account_name(account)):
        raise click.ClickException(f"The account {account} has no tokens.")


@account_commands.command("list")
def list_accounts() -> None:
    """Show every account, how many Projects and tokens it has, and when a Project last changed."""
    accounts = current_store().list_accounts()
    line = "{:>8}  {:>6}  {:16}  {}"
    click.echo(line.format("PROJECTS", "TOKENS", "CHANGED (UTC)", "ACCOUNT"))
    for name, projects, tokens, changed_at in accounts:
        echo(line.format(projects, tokens, utc(changed_at), name))


@account_commands.command("delete")
@click.argument("account")
@click.option("--yes", is_flag=True, help="Delete it without asking.")
def delete_account(account: str, yes: bool) -> None:
    """Delete ACCOUNT and all that it owns.

    Requests under way may still add Projects. If so, `account list` shows the account again: delete
    it again.
    """
    store, name = current_store(), account_name(account)
    found = store.find_account(name)
    if found is None:
        raise click.ClickException(f"There is no account {name}.")
    if not yes:
        if None in (sys.stdin, sys.stdout, sys.stderr):
            raise click.ClickException("Nobody can be asked: a stream is closed. Use --yes.")
        _, projects, tokens, _ = found
        # Somebody may have put text there.
        numbers = printable(f"Projects ({projects}) and tokens ({tokens})")
        click.confirm(f"Delete the account {name} with its {numbers}?", abort=True)
    store.delete_account(name)


@all_commands.command("init-db")
def create_database() -> None:
    """Create the database unless there is one, and bring it up to date."""
    engine = current_store().engine
    report_if_new(engine, engine.open_database(creates=True))


@all_commands.command("open-db", hidden=True)
def open_database() -> None:
    """Bring the database up to date: for gunicorn."""
    current_store().engine.open_database()


def report_if_new(engine: Engine, is_new: bool) -> None:
    """Say that a database was created: the old one may be lost, or the path mistyped."""
    if is_new:
        echo_success(f"A new database: {engine.name}", err=True)


def is_program() -> bool:
    """Whether this command is the whole process, unlike in a test."""
    return isinstance(click.get_current_context().find_root().command, FlaskGroup)


def end_like_ctrl_c() -> None:
    """Let SIGTERM and SIGHUP end the program as Ctrl-C does: it removes what it has begun."""
    for number in END_SIGNALS if is_program() else ():
        # Unless something else has chosen an action for it, as nohup does.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, interrupt)


def interrupt(*_: object) -> None:
    for number in END_SIGNALS:
        signal.signal(number, pass_over)
    raise KeyboardInterrupt


def pass_over(*_: object) -> None:
    """A second signal must not stop the cleanup."""


def ignore_end_signals() -> None:
    """Raises KeyboardInterrupt if there was a signal, and SQLite has swallowed its exception."""
    for number in END_SIGNALS:
        if signal.signal(number, signal.SIG_IGN) == pass_over:
            raise KeyboardInterrupt


def show_progress(rows: Generator[Any], count: int, table: str) -> Generator[Any]:
    """Pass the rows on, while a terminal at standard error shows how many have passed."""
    progress_bar = click.progressbar(
        rows,
        count,
        table,
        show_pos=True,
        hidden=not (sys.stderr and sys.stderr.isatty()),  # None if it was closed
        file=sys.stderr,
        update_min_steps=max(1, count // 1000),
    )
    with progress_bar as shown:
        yield from shown


@all_commands.command("backup")
@click.argument("file", type=click.Path())
def write_backup(file: str) -> None:
    """Write a copy of the database to FILE, a new SQLite file, while the service runs."""
    end_like_ctrl_c()
    backup(current_store().engine, file, show_progress)


@all_commands.command("restore")
@click.argument("file", type=click.Path(readable=False, allow_dash=True))
@click.option("--name", default="standard input", hidden=True)
def restore_backup(file: str, name: str) -> None:
    """Put the backup FILE, or the standard input (-), in the place of the database.

    The old contents of an SQLite file are kept beside it. A database on PostgreSQL must be empty.

    On a server, `gardening restore --newest` takes the newest of the nightly backups.
    """
    end_like_ctrl_c()
    engine = current_store().engine
    # Once it has succeeded, the program must not fail.
    committing = ignore_end_signals if is_program() else lambda: None
    restored = restore(engine, file, show_progress, committing, name)
    accounts, projects, tokens = restored.numbers
    echo_success(f"Restored: accounts {accounts}, Projects {projects}, tokens {tokens}.")
    if restored.kept:
        echo_success(f"To go back: {command_line(current_app, 'restore', restored.kept)}")
    report_if_new(engine, restored.is_new)


def echo_success(line: str, err: bool = False) -> None:
    """Print it. It is no failure of the command if nobody reads it."""
    try:
        echo(line, err)
    except (OSError, UnicodeError):
        # Or Python would flush it again as it exits, fail, and end with status 120.
        setattr(sys, "stderr" if err else "stdout", StringIO())


def command_line(app: Flask, *words: str) -> str:
    """The command with these words, which can be pasted in the same folder."""
    context = click.get_current_context().find_root()
    if context.info_name == PROGRAM:
        return shlex.join([PROGRAM, *words])
    engine = app.extensions["store"].engine
    setting = ""
    if app.config["DATABASE"] and engine.file.folder:  # a URL may hold a password
        setting = f"GARDENING_DATABASE={shlex.quote(engine.name)} "
    import_path = context.ensure_object(ScriptInfo).app_import_path  # --app
    option = ["--app", import_path] if import_path else []
    return setting + shlex.join([sys.executable, "-m", "flask", *option, *words])


def add_to(app: Flask) -> None:
    """Add the commands, and welcome whoever starts `flask run`."""
    for command in all_commands.commands.values():
        app.cli.add_command(command)
    # Nothing else says that a server starts: Flask has no hook or signal for it, and does not let
    # an application replace its `run`.
    context = click.get_current_context(silent=True)
    if context and context.command is run_command and not is_running_from_reloader():
        with failures():
            welcome(app, **context.params)


def welcome(app: Flask, host: str, port: int, cert: object, **_: object) -> None:
    """Create the database, and say what to do next, or what is wrong."""
    store: Store = app.extensions["store"]
    engine = store.engine
    report_if_new(engine, engine.open_database(creates=True))
    if not store.list_tokens():
        place = "in this folder"
        if engine.file.folder is None:
            place += " and with the same GARDENING_DATABASE"
        click.echo(f"No access token yet. In another terminal, {place}, run:")
        echo(f"    {command_line(app, 'token', 'create', 'ACCOUNT')}")
    page = app.extensions.get("docs")
    # With port 0, only Flask's own line will name it. No browser opens a Unix socket.
    if page and port and not host.startswith("unix://"):
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        scheme = "https" if cert else "http"
        click.echo("To read about the API and try it, open in a browser:")
        click.echo(f"    {scheme}://{address}{page}")


def main(create_app: Callable[[], Flask]) -> None:
    """The program on a server: the commands of this module alone."""
    group = FlaskGroup(add_default_commands=False, create_app=create_app, add_version_option=False)
    description = json.loads(Path(__file__).with_name("openapi.json").read_bytes())
    version = f"{PROGRAM} {description['info']['version']}"
    if commit := os.environ.get("CLONE_COMMIT"):  # from deploy/gardening.py
        version += f", commit {commit}"
    group.params = []  # --app and others of Flask
    click.version_option(version, message="%(version)s", help="Show release and commit.")(group)
    group.main(prog_name=PROGRAM)
