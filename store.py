"""Projects and access tokens: what the service guarantees about them, and the rules.

Threads and processes may share a database. When a method returns, what it wrote is on the disk,
unless the database is in memory.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from engines.connection import Connection, Parameters
from engines.engine import Engine
from engines.errors import Unavailable
from engines.fields import JSON, SETTABLE


class NotFound(Exception):
    """The account has no such Project."""


class Stale(Exception):
    """The Project's ETag does not satisfy If-Match or If-None-Match."""


class KeyReused(Exception):
    """The account has a Project that was made with the same key and other fields."""


class KeySpent(Exception):
    """The Project that was made with the same key has been deleted."""


class AccountFull(Exception):
    """The account is at or over its limit of Projects, which is the argument."""


class Project(NamedTuple):
    id: str
    etag: str  # made of version and updated_at
    document: bytes  # JSON


class Precondition(NamedTuple):
    """Which ETags a Project may have, for a change to be made (RFC 9110 13.1)."""

    if_match: Sequence[str] | None = None  # one of these; None: any
    if_none_match: Sequence[str] = ()  # none of these

    def allows(self, etag: str) -> bool:
        is_named = self.if_match is None or etag in self.if_match
        return is_named and etag not in self.if_none_match


class ProjectList(NamedTuple):
    etag: str
    document: bytes  # JSON
    next_after: int | None  # `after` of the next page, if there is one


class Page(NamedTuple):
    """The part of a list that a caller asks for."""

    number: int  # from 0; with `after`, the response only repeats it
    size: int  # Projects
    after: int | None = None  # the seq of the Project after which the page begins


class KeyUse(NamedTuple):
    """The Project that a key has created. Both are None once it is deleted."""

    id: str | None
    fingerprint: bytes | None  # of its fields at the creation


class Caller(NamedTuple):
    account: str
    token_id: int


class Account(NamedTuple):
    name: str
    projects: int
    tokens: int
    # When one of its present Projects last changed, in epoch milliseconds. None: it has none.
    changed_at: int | None


class Token(NamedTuple):
    id: int
    created_at: int  # epoch milliseconds
    expires_at: int | None  # None: never
    account: str
    note: str | None


Fields = Mapping[str, object]  # what a caller sets: some fields of a Project, or all
DAY = 86_400_000  # milliseconds
MAX_PROJECTS = 10_000  # of an account, unless a setting says otherwise
KEY_MEMORY = 10_000  # how many Projects an account creates before it forgets a spent key
ALWAYS = Precondition()
WHOLE = Page(0, 2**63 - 1)  # the whole list: the largest LIMIT that a database takes
ATTEMPTS = 2  # at a change of a Project; `_check_condition` has the reasons


class Store:
    """The rules, for any engine.

    Any method may raise engines.errors.Unavailable, and one that writes may raise OutcomeUnknown.
    Each change checks and writes in one statement or transaction, so that no other change comes
    between.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float] = lambda: time.time(),  # freezegun replaces time.time
        max_projects: int = MAX_PROJECTS,
    ) -> None:
        """`clock` returns epoch seconds. An account may have `max_projects` at most."""
        self.engine = engine
        self._clock = clock
        self._max_projects = max_projects

    def check(self) -> None:
        """Raises Unavailable if the database cannot be read now."""
        self.engine.check()

    def create_project(self, account: str, fields: Fields, key: str | None = None) -> Project:
        """Add a Project, or return the account's Project that has this key.

        Raises AccountFull, KeyReused, KeySpent.
        """
        columns = dict.fromkeys(SETTABLE) | as_columns(fields)
        fingerprint = None if key is None else fingerprint_of(columns)
        parameters = columns | {
            "account": account,
            "id": secrets.token_hex(12),
            "key": key,
            "fingerprint": fingerprint,
            "now": self._now(),
            "limit": self._max_projects,
        }
        with self.engine.writer(in_transaction=key is not None) as connection:
            use = None
            if key is not None:
                connection.lock_account(account)  # so that nobody else uses the key meanwhile
                use = find_key(connection, account, key)
            if use is None:
                rows = connection.create(parameters)
            else:  # a deleted Project has no row
                rows = connection.fetch(connection.GET, {"account": account, "id": use.id})
        # Only now, since an exception within the block would close the connection.
        if not rows:
            raise KeySpent if use else AccountFull(self._max_projects)
        if use and use.fingerprint != fingerprint:
            raise KeyReused
        return Project(*rows[0])

    def get_project(self, account: str, id: str) -> Project:
        """Raises NotFound."""
        with self.engine.reader() as connection:
            rows = connection.fetch(connection.GET, {"account": account, "id": without_null(id)})
        if not rows:
            raise NotFound
        return Project(*rows[0])

    def update_project(
        self, account: str, id: str, fields: Fields, condition: Precondition = ALWAYS
    ) -> Project:
        """Change these fields and raise the version by 1. Raises NotFound, Stale."""
        columns = as_columns(fields)
        assignments = "".join(f"{name} = :{name}, " for name in columns)
        parameters = columns | condition_parameters(account, id, condition)
        for _ in range(ATTEMPTS):
            with self.engine.writer() as connection:
                update = connection.UPDATE.replace("<assignments>", assignments)
                rows = connection.fetch(update, parameters | {"now": self._now()})
            if rows:
                return Project(*rows[0])
            self._check_condition(account, id, condition)
        raise Unavailable("the Project could not be changed")

    def delete_project(self, account: str, id: str, condition: Precondition = ALWAYS) -> None:
        """Delete a Project and all that belongs to it. Raises NotFound, Stale.

        Its key is spent, at least until the account has created KEY_MEMORY more Projects.
        """
        parameters = condition_parameters(account, id, condition)
        for _ in range(ATTEMPTS):
            with self.engine.writer(in_transaction=True) as connection:
                rows = connection.fetch(connection.DELETE, parameters)
                for (key,) in rows:  # one, or none
                    if key is not None:
                        spend_key(connection, account, key)
            if rows:
                return
            self._check_condition(account, id, condition)
        raise Unavailable("the Project could not be deleted")

    def _check_condition(self, account: str, id: str, condition: Precondition) -> None:
        """Raises NotFound, or Stale if the condition rules out the Project's ETag.

        If it returns, try the change again: the Project has changed since, or Citus has missed it
        while its account moved to another node.
        """
        if not condition.allows(self.get_project(account, id).etag):
            raise Stale

    def list_projects(self, account: str, page: Page | None = None) -> ProjectList:
        """All Projects, oldest first, or one page of them."""
        number, size, after = page or WHOLE
        offset = number * size if after is None else 0
        with self.engine.reader() as connection:
            [(total, last_seq, next_after, document)] = connection.fetch(
                connection.LIST,
                {"account": account, "size": size, "after": after or 0, "offset": offset},
            )
        if page is not None:
            numbers = f'"page":{number},"size":{size},"total":{total or 0}'.encode()
            document = b'{"projectList":%b,%b}' % (document, numbers)
        digest = hashlib.sha256(document)
        # Two pages may differ in their Link alone. Without last_seq, a creation and a deletion
        # would bring an old ETag back: a client that has added the new Project to its copy would
        # keep it.
        digest.update(f"{next_after} {last_seq}".encode())
        return ProjectList(digest.hexdigest(), document, next_after)

    def add_token(
        self, account: str, digest: bytes, days: int | None = None, note: str | None = None
    ) -> int:
        """Let a token act for the account for this many days, or for ever.

        Returns the token's id.
        """
        now = self._now()
        token = {
            "account": account,
            "digest": digest,
            "now": now,
            "expires_at": None if days is None else now + days * DAY,
            "note": note,
        }
        insert = """INSERT INTO token (account, digest, created_at, expires_at, note)
            VALUES (:account, :digest, :now, :expires_at, :note)
            ON CONFLICT (id) DO NOTHING
            RETURNING id"""
        with self.engine.writer(in_transaction=True) as connection:
            rows = connection.fetch(insert, token)
            if not rows:  # PostgreSQL's logical replication has copied the tokens, but no sequence
                connection.advance_token_sequence()
                rows = connection.fetch(insert, token)
        if not rows:
            raise Unavailable("another token was issued at the same moment: try again")
        return int(rows[0][0])

    def find_caller(self, digest: bytes) -> Caller | None:
        """Who calls with this token; None if it is unknown or has expired."""
        with self.engine.reader() as connection:
            rows = connection.fetch(
                """SELECT account, id FROM token
                WHERE digest = :digest AND (expires_at IS NULL OR expires_at > :now)""",
                {"digest": digest, "now": self._now()},
            )
        return Caller(*rows[0]) if rows else None

    def list_tokens(self, account: str | None = None) -> list[Token]:
        """The account's tokens, or those of every account, in the order of the ids."""
        select = """SELECT id, created_at, expires_at, account, note FROM token
            WHERE account = coalesce(:account, account)  -- null: every account
            ORDER BY id"""
        with self.engine.snapshot() as connection:
            return [Token(*row) for row in connection.fetch(select, {"account": account})]

    def revoke_token(self, id: int) -> bool:
        """Make a token invalid; False if there is none with this id."""
        delete = "DELETE FROM token WHERE id = :id RETURNING id"
        with self.engine.writer() as connection:
            return bool(connection.fetch(delete, {"id": id}))

    def revoke_tokens(self, account: str) -> bool:
        """Make all tokens of the account invalid; False if it has none."""
        delete = "DELETE FROM token WHERE account = :account RETURNING id"
        with self.engine.writer() as connection:
            return bool(connection.fetch(delete, {"account": account}))

    def revoke_expired_tokens(self) -> None:
        """Delete the tokens of every account that have expired."""
        delete = "DELETE FROM token WHERE expires_at <= :now"
        with self.engine.writer() as connection:
            connection.fetch(delete, {"now": self._now()})

    def find_account(self, name: str) -> Account | None:
        """The account, if `list_accounts` has it."""
        with self.engine.snapshot() as connection:
            # Two statements: on a cluster, the second one asks the account's node alone.
            [(tokens,)] = connection.fetch(
                "SELECT count(*) FROM token WHERE account = :name", {"name": name}
            )
            rows = connection.fetch(
                """SELECT project_count,
                    (SELECT max(updated_at) FROM project WHERE account = :name)
                FROM account WHERE name = :name""",
                {"name": name},
            )
        if not rows and not tokens:
            return None
        projects, changed_at = rows[0] if rows else (0, None)
        return Account(name, projects, tokens, changed_at)

    def list_accounts(self) -> list[Account]:
        """Every account, sorted by name."""
        # Before its first Project, an account may have tokens, but no row.
        select = """SELECT names.name, coalesce(project_count, 0), coalesce(tokens, 0),
                changed_at
            FROM (SELECT name FROM account UNION SELECT account FROM token) AS names
            LEFT JOIN account ON account.name = names.name
            LEFT JOIN (SELECT account, max(updated_at) AS changed_at
                FROM project GROUP BY account) AS p ON p.account = names.name
            LEFT JOIN (SELECT account, count(*) AS tokens
                FROM token GROUP BY account) AS t ON t.account = names.name
            ORDER BY names.name"""
        with self.engine.snapshot() as connection:
            return [Account(*row) for row in connection.fetch(select, {})]

    def delete_account(self, name: str) -> None:
        """Delete the account and all that it owns, if there is such an account."""
        with self.engine.writer(in_transaction=True) as connection:
            connection.extend_timeouts()
            connection.lock_account(name)
            for sql in (
                "DELETE FROM project WHERE account = :name",
                "DELETE FROM spent_key WHERE account = :name",
                "DELETE FROM token WHERE account = :name",
                "DELETE FROM account WHERE name = :name",
            ):
                connection.fetch(sql, {"name": name})

    def _now(self) -> int:
        return int(self._clock() * 1000)


def find_key(connection: Connection, account: str, key: str) -> KeyUse | None:
    """What the account has used the key for; None if the key is free."""
    rows = connection.fetch(
        """SELECT id, fingerprint FROM project WHERE account = :account AND key = :key
        UNION ALL
        SELECT NULL, NULL FROM spent_key WHERE account = :account AND key = :key""",
        {"account": account, "key": key},
    )
    return KeyUse(*rows[0]) if rows else None


def spend_key(connection: Connection, account: str, key: str) -> None:
    """Remember the key of a Project that was just deleted, and forget the oldest ones."""
    parameters = {"account": account, "key": key, "memory": KEY_MEMORY}
    connection.fetch(
        """INSERT INTO spent_key (account, key, seq)
        SELECT name, :key, last_seq FROM account WHERE name = :account""",
        parameters,
    )
    connection.fetch(
        """DELETE FROM spent_key
        WHERE account = :account
            AND seq < (SELECT last_seq FROM account WHERE name = :account) - :memory""",
        parameters,
    )


def condition_parameters(account: str, id: str, condition: Precondition) -> Parameters:
    """What UPDATE and DELETE take: which Project, and which ETags it may have."""
    if_match, if_none_match = condition
    return {
        "account": account,
        "id": without_null(id),
        "if_match": None if if_match is None else json.dumps(if_match),
        # None, so that the database parses nothing.
        "if_none_match": json.dumps(if_none_match) if if_none_match else None,
    }


def without_null(id: str) -> str:
    """PostgreSQL refuses U+0000 in text. No id has a "?", so this finds no Project."""
    return id.replace("\0", "?")


def as_columns(fields: Fields) -> dict[str, object]:
    """The fields as they are stored. Raises KeyError for one that a caller cannot set."""
    columns = dict(fields)
    for name, value in fields.items():
        if SETTABLE[name] == JSON and value is not None:
            columns[name] = json.dumps(value, separators=(",", ":"))  # as on the wire
    return columns


def fingerprint_of(columns: Fields) -> bytes:
    """A SHA-256 digest of the fields that are not null, to compare requests with the same key.

    It is the same in every release that takes these fields.
    """
    given = {name: value for name, value in columns.items() if value is not None}
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).digest()
