"""Who may call: bearer tokens, checked by a decorator, issued on the command line.

It contains no SQL and nothing about Projects. Only the holder has the token; the store
keeps its SHA-256 digest.
"""

import hashlib
import secrets
from collections.abc import Callable
from functools import wraps
from typing import Any

import click
from flask import current_app, request
from flask.cli import AppGroup
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import Unauthorized

from store import Store, Unavailable

MAX_DAYS = 1_000_000  # 2,700 years; dates end with the year 9999
PREFIX = "gardening_"  # by which a secret scanner recognizes a leaked token
View = Callable[..., ResponseReturnValue]


def current_store() -> Store:
    store: Store = current_app.extensions["store"]
    return store


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def token_required(view: View) -> View:
    """Give the view the account of the caller's token, or answer 401 (RFC 6750 3)."""

    @wraps(view)
    def guarded(**arguments: str) -> ResponseReturnValue:
        # request.authorization raises ValueError for "Basic é".
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise unauthorized("Send the header Authorization: Bearer <ACCESS_TOKEN>.")
        account = current_store().find_account(digest(token.strip()))
        if account is None:
            detail = "The token is unknown, expired or revoked: use another one."
            raise unauthorized(detail, ', error="invalid_token"')
        request.environ["REMOTE_USER"] = account  # for the access log (RFC 3875 4.1.11)
        return view(account, **arguments)

    return guarded


def unauthorized(detail: str, error: str = "") -> Unauthorized:
    # Plain text, because Werkzeug's WWWAuthenticate drops the quotes around the realm.
    challenge: Any = f'Bearer realm="gardening"{error}'
    return Unauthorized(detail, www_authenticate=[challenge])


class OneLineErrors(AppGroup):
    """Commands that say what is wrong in one line, without usage or traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.UsageError, Unavailable) as error:
            raise click.ClickException(str(error)) from error


token_commands = OneLineErrors("token", help="Issue, list and revoke access tokens.")


@token_commands.command("create")
@click.argument("account")
@click.option("--days", type=click.IntRange(1, MAX_DAYS), help="Default: no expiry.")
def create_token(account: str, days: int | None) -> None:
    """Print a new token for ACCOUNT; it cannot be shown again."""
    click.echo(issue_token(current_store(), account, days))


def issue_token(store: Store, account: str, days: int | None = None) -> str:
    """Store a new token; with `days=0` it has already expired. Raises UsageError."""
    if not account.strip() or not account.isprintable():
        raise click.UsageError("ACCOUNT must be printable text.")
    token = PREFIX + secrets.token_urlsafe(32)
    store.add_token(account, digest(token), days)
    return token


@token_commands.command("list")
def list_tokens() -> None:
    """Show the ID, times and account of every token."""
    header = ("ID", "CREATED (UTC)", "EXPIRES (UTC)", "ACCOUNT")
    for row in [header, *current_store().list_tokens()]:
        click.echo("{:>4}  {:16}  {:16}  {}".format(*row))


@token_commands.command("revoke")
@click.argument("id", type=click.IntRange(1, 2**63 - 1))
def revoke_token(id: int) -> None:
    """Make the token with this ID, as `list` shows it, invalid at once."""
    if not current_store().revoke_token(id):
        raise click.UsageError(f"There is no token with the ID {id}.")
