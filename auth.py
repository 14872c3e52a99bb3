"""Who may call: bearer tokens, issued to accounts and checked by a decorator.

Only the holder has the token; the store keeps its SHA-256 digest.
"""

import hashlib
import secrets
from collections.abc import Callable
from functools import wraps
from typing import Any

from flask import current_app, request
from werkzeug.exceptions import Unauthorized

from engines.names import check_note
from store import Store

TOKEN_PREFIX = "gardening_"  # by which a secret scanner recognizes a leaked token
View = Callable[..., Any]


def issue_token(
    store: Store, account: str, days: int | None = None, note: str | None = None
) -> tuple[str, int]:
    """Issue a token that expires after this many days, or never; with 0, it has expired.

    `account` is a name that account_name returned. Returns the token and its id. Raises BadNote.
    """
    if note is not None:
        check_note(note)
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    return token, store.add_token(account, digest(token), days, note)


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def current_store() -> Store:
    """The store of the application that serves the request or runs the command."""
    store: Store = current_app.extensions["store"]
    return store


def bearer_token(authorization: str) -> str:
    """The token in the value of the header Authorization, or "" if it holds none."""
    scheme, _, token = authorization.partition(" ")
    # Spaces and tabs only: deploy/nginx.conf counts requests by the first word after the scheme.
    return token.strip(" \t") if scheme.lower() == "bearer" else ""


def token_required(view: View) -> View:
    """Call the view with the account of the caller's token as its first argument.

    Without a valid token, the response is 401 (RFC 6750 3).
    """

    @wraps(view)
    def guarded(**arguments: str) -> Any:
        # request.authorization raises ValueError for "Basic é".
        token = bearer_token(request.headers.get("Authorization", ""))
        if not token:
            raise unauthorized("Send the header Authorization: Bearer <ACCESS_TOKEN>.")
        caller = current_store().find_caller(digest(token))
        if caller is None:
            detail = "The token is unknown, expired or revoked: use another one."
            raise unauthorized(detail, ', error="invalid_token"')
        # For the access log (RFC 3875 4.1.11): gunicorn.conf.py reads it.
        request.environ["REMOTE_USER"] = f"{caller.account}/{caller.token_id}"
        return view(caller.account, **arguments)

    return guarded


def unauthorized(detail: str, error: str = "") -> Unauthorized:
    # As text, although Unauthorized is typed for Werkzeug's WWWAuthenticate: that drops the quotes
    # around the realm, without which some clients fail (RFC 9110 11.2).
    challenge: Any = f'Bearer realm="gardening"{error}'
    return Unauthorized(detail, www_authenticate=[challenge])
