"""Who may call: bearer tokens, checked by a decorator, issued on the command line.

It knows no Projects and no SQL. A token is seen by its holder alone: the store gets
its SHA-256 digest.
"""

import functools
import hashlib
import secrets
import sys
from collections.abc import Callable

import click
from flask import current_app, request
from flask.cli import AppGroup
from werkzeug.exceptions import Unauthorized

from store import Store, Unavailable

MAX_DAYS = 1_000_000  # 2,700 years; dates end with the year 9999
PREFIX = "gardening_"  # by which a secret scanner knows a leaked token
CHALLENGE = 'Bearer realm="gardening"'


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def token_required(view: Callable) -> Callable:
    """Give the view the account of the caller's token, or answer 401 (RFC 6750, 3)."""

    @functools.wraps(view)
    def guarded(**arguments: str) -> object:
        # Not by request.authorization, which fails for "Basic é" with a ValueError.
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            detail = "Send the header Authorization: Bearer <ACCESS_TOKEN>."
            raise Unauthorized(detail, www_authenticate=[CHALLENGE])
        account = current_app.store.find_account(digest(token.strip()))
        if account is None:
            detail = "The token is unknown, expired or revoked: use another one."
            challenge = f'{CHALLENGE}, error="invalid_token"'
            raise Unauthorized(detail, www_authenticate=[challenge])
        return view(account, **arguments)

    return guarded


class OneLineErrors(AppGroup):
    """Commands that say what is wrong in one line, without usage or traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (click.UsageError, Unavailable) as error:
            raise click.ClickException(str(error)) from error


token_commands = OneLineErrors("token", help="Issue, list and revoke access tokens.")


@token_commands.command("create")
@click.argument("account")
@click.option("--days", type=click.IntRange(1, MAX_DAYS), help="Default: for ever.")
def create_token(account: str, days: int | None) -> None:
    """Print a new token for ACCOUNT; it cannot be shown again."""
    if not account.strip() or not account.isprintable():
        raise click.UsageError("ACCOUNT must be printable text.")
    token = PREFIX + secrets.token_urlsafe(32)
    current_app.store.add_token(account, digest(token), days)
    click.echo(token)


@token_commands.command("list")
def list_tokens() -> None:
    """Show the ID, times and account of every token."""
    header = ("ID", "CREATED (UTC)", "EXPIRES (UTC)", "ACCOUNT")
    for row in [header, *current_app.store.list_tokens()]:
        click.echo("{:>4}  {:16}  {:16}  {}".format(*row))


@token_commands.command("revoke")
@click.argument("id", type=click.IntRange(1, 2**63 - 1))
def revoke_token(id: int) -> None:
    """Make the token with this ID, as `list` shows it, invalid at once."""
    if not current_app.store.revoke_token(id):
        raise click.UsageError(f"There is no token with the ID {id}.")


def suggest_first_token(store: Store) -> None:
    """On `flask run` without any token, say what to do next."""
    command = click.get_current_context(silent=True)
    if command and command.info_name == "run" and not store.list_tokens():
        click.echo("No access token yet. In another terminal, in this folder, run:")
        click.echo(f"    {sys.argv[0]} token create ACCOUNT")
