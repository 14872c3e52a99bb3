"""Projects and access tokens: what the service guarantees about them, and the rules.

It does not import Flask, validate a Project, or depend on a particular engine. SQL that is the
same on every engine is here. An engine has the rest, and renders a Project as the JSON that is
sent. Threads and processes may share a database. When a method returns, what it wrote is on the
disk, unless the database is in memory.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from engines.base import COMMAND_TIMEOUT, Engine, Parameters
from engines.fields import JSON, SETTABLE


class NotFound(Exception):
    """The account has no such Project."""


class Stale(Exception):
    """The Project's ETag does not satisfy If-Match or If-None-Match."""


class KeyReused(Exception):
    """The account made a Project with the same key and other fields."""


class KeySpent(Exception):
    """The Project that the account made with the same key has been deleted."""


class AccountFull(Exception):
    """The account has as many Projects as it may have. Its argument is their number."""


class Project(NamedTuple):
    id: str
    etag: str  # version and updated_at: never the same for other content, even after a restore
    document: bytes  # JSON


class ProjectList(NamedTuple):
    etag: str
    document: bytes  # JSON
    next_after: int | None  # `after` of the next page, if there is one


class Page(NamedTuple):
    """The part of a list that a caller asks for."""

    number: int  # from 0
    size: int  # Projects
    # Start behind this Project (its seq). `number` then only appears in the response.
    after: int | None = None


class Precondition(NamedTuple):
    """Which ETags a Project may have, for a change to be made (RFC 9110 13.1)."""

    if_match: Sequence[str] | None = None  # one of these; None: any
    if_none_match: Sequence[str] = ()  # none of these


class Caller(NamedTuple):
    account: str
    token_id: int


class Account(NamedTuple):
    name: str
    projects: int
    tokens: int
    # The last change of those Projects, in epoch milliseconds; None without Projects.
    changed_at: int | None


class Token(NamedTuple):
    id: int
    created_at: int  # epoch milliseconds
    expires_at: int | None  # None: never
    account: str


Fields = Mapping[str, object]  # some or all of those that a caller can set
DAY = 86_400_000  # milliseconds
MAX_PROJECTS = 100_000  # of an account, unless a setting says otherwise
FIELDS_OF_1_2 = ("name", "postal_code", "location")
ALWAYS = Precondition()
WHOLE = Page(0, 2**63 - 1)  # the list as one page; no database takes a larger LIMIT
# An account gets its row with its first Project. Until then, only tokens name it.
ACCOUNT_NAMES = "(SELECT name FROM account UNION SELECT account FROM token) AS names"


class Store:
    """The rules, for any engine.

    Any method may raise engines.base.Unavailable, and one that writes may raise
    OutcomeUnknown. Each change checks and writes in one statement or transaction, so that no
    other change comes between.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float] = time.time,
        max_projects: int = MAX_PROJECTS,
    ) -> None:
        """`clock` returns epoch seconds. An account may have `max_projects` at most."""
        self.engine = engine
        self._clock = clock
        self._max_projects = max_projects

    def close(self) -> None:
        """Close the idle connections. The store can still be used, and opens new ones."""
        self.engine.close()

    def create_database(self) -> bool:
        """Bring the database up to date, or create it; True if it was created."""
        return self.engine.create_database()

    def open_database(self) -> bool:
        """The same, but create only the default database, which no setting names."""
        return self.engine.open_database()

    def check(self) -> None:
        """Raises Unavailable if the database cannot be read now."""
        self.engine.check()

    def create_project(
        self, account: str, fields: Fields, key: str | None = None
    ) -> Project:
        """Add a Project, or return the one that the account made with the same key.

        A key is kept as long as its account. Raises AccountFull, KeyReused, KeySpent.
        """
        values = {"account": account, "id": secrets.token_hex(12), "now": self._now()}
        values |= dict.fromkeys(SETTABLE) | as_columns(fields)
        values |= {"list_revision": new_revision(), "max_projects": self._max_projects}
        if key is not None:
            return self._create_once(key, values)
        with self.engine.writer() as connection:
            rows = connection.create(values)
        if not rows:
            raise AccountFull(self._max_projects)
        return Project(*rows[0])

    def _create_once(self, key: str, values: Parameters) -> Project:
        """Add the Project if its key is new. Otherwise return the one that has the key."""
        account, id = values["account"], values["id"]
        fingerprint = fingerprint_of({name: values[name] for name in SETTABLE})
        with self.engine.transaction() as connection:
            # The update changes nothing. But unlike DO NOTHING, it returns the row that is there,
            # and locks it until the transaction ends.
            [(first_id, first_fingerprint)] = connection.fetch(
                """INSERT INTO idempotency_key (account, key, fingerprint, project)
                VALUES (:account, :key, :fingerprint, :project)
                ON CONFLICT (account, key)
                    DO UPDATE SET fingerprint = idempotency_key.fingerprint
                RETURNING project, fingerprint""",
                {
                    "account": account,
                    "key": key,
                    "fingerprint": fingerprint,
                    "project": id,
                },
            )
            if first_id == id:
                rows = connection.create(values)
                if not rows:
                    raise AccountFull(self._max_projects)  # the key stays free
                return Project(*rows[0])
        # A key whose Project is gone is spent, whatever fields come with it.
        try:
            project = self.get_project(account, first_id)
        except NotFound:
            raise KeySpent from None
        if first_fingerprint != fingerprint:
            raise KeyReused
        return project

    def get_project(self, account: str, id: str) -> Project:
        """Raises NotFound."""
        rows = self.engine.read(self.engine.GET, project_parameters(account, id))
        if not rows:
            raise NotFound
        return Project(*rows[0])

    def update_project(
        self, account: str, id: str, fields: Fields, condition: Precondition = ALWAYS
    ) -> Project:
        """Change these fields and raise the version by 1. Raises NotFound, Stale."""
        columns = as_columns(fields)
        values = self._change_parameters(account, id, condition) | columns
        with self.engine.writer() as connection:
            rows = connection.update(columns, values)
        if not rows:
            self._refuse(account, id)
        return Project(*rows[0])

    def delete_project(
        self, account: str, id: str, condition: Precondition = ALWAYS
    ) -> None:
        """Delete a Project and all that belongs to it. Raises NotFound, Stale."""
        values = self._change_parameters(account, id, condition)
        if not self.engine.write(self.engine.DELETE, values):
            self._refuse(account, id)

    def list_etag(self, account: str, page: Page | None = None) -> str:
        """The ETag of what `list_projects` returns, without rendering the Projects.

        Any change gives the account's lists new ETags, and no old one comes back. There is one
        exception: an account without a row, be it new or deleted, always has the same ETags.
        """
        rows = self.engine.read(
            "SELECT list_revision FROM account WHERE name = :account",
            {"account": account},
        )
        return etag_of(rows[0][0] if rows else None, page)

    def list_projects(self, account: str, page: Page | None = None) -> ProjectList:
        """All Projects, oldest first, or one page of them."""
        number, size, after = page or WHOLE
        values = {"account": account, "size": size, "after": after or 0}
        values["offset"] = number * size if after is None else 0
        [row] = self.engine.read(self.engine.LIST, values)
        revision, total, next_after, projects = row
        etag = etag_of(revision, page)
        if page is None:
            return ProjectList(etag, projects, None)
        numbers = f'"page":{number},"size":{size},"total":{total or 0}'.encode()
        document = b'{"projectList":%b,%b}' % (projects, numbers)
        return ProjectList(etag, document, next_after)

    def add_token(self, account: str, digest: bytes, days: int | None = None) -> int:
        """Let a token act for the account for this many days, or for ever.

        Returns the token's id.
        """
        now = self._now()
        [(id,)] = self.engine.write(
            """INSERT INTO token (account, digest, created_at, expires_at)
            VALUES (:account, :digest, :now, :expires_at)
            RETURNING id""",
            {
                "account": account,
                "digest": digest,
                "now": now,
                "expires_at": None if days is None else now + days * DAY,
            },
        )
        return int(id)

    def find_caller(self, digest: bytes) -> Caller | None:
        """Who calls with this token; None if it is unknown or has expired."""
        rows = self.engine.read(
            """SELECT account, id FROM token
            WHERE digest = :digest AND (expires_at IS NULL OR expires_at > :now)""",
            {"digest": digest, "now": self._now()},
        )
        return Caller(*rows[0]) if rows else None

    def list_tokens(self) -> list[Token]:
        """Every token, in the order of the ids."""
        rows = self.engine.read(
            "SELECT id, created_at, expires_at, account FROM token ORDER BY id", {}
        )
        return [Token(*row) for row in rows]

    def revoke_token(self, id: int) -> bool:
        """Make a token invalid; False if there is none with this id."""
        delete = "DELETE FROM token WHERE id = :id RETURNING id"
        return bool(self.engine.write(delete, {"id": id}))

    def revoke_tokens(self, account: str) -> bool:
        """Make all tokens of the account invalid; False if it has none."""
        delete = "DELETE FROM token WHERE account = :account RETURNING id"
        return bool(self.engine.write(delete, {"account": account}))

    def has_account(self, name: str) -> bool:
        """Whether `list_accounts` has it."""
        select = f"SELECT name FROM {ACCOUNT_NAMES} WHERE name = :name"
        return bool(self.engine.read(select, {"name": name}))

    def list_accounts(self) -> list[Account]:
        """Every account, sorted by name."""
        rows = self.engine.read(
            f"""SELECT names.name, coalesce(project_count, 0), coalesce(tokens, 0),
                changed_at
            FROM {ACCOUNT_NAMES}
            LEFT JOIN account ON account.name = names.name
            LEFT JOIN (SELECT account, max(updated_at) AS changed_at
                FROM project GROUP BY account) AS p ON p.account = names.name
            LEFT JOIN (SELECT account, count(*) AS tokens
                FROM token GROUP BY account) AS t ON t.account = names.name
            ORDER BY names.name""",
            {},
        )
        return [Account(*row) for row in rows]

    def delete_account(self, name: str) -> None:
        """Delete the account and all that it owns, if there is such an account."""
        with self.engine.transaction(COMMAND_TIMEOUT) as connection:
            for sql in (
                # Locks the account's row, as every change of a Project does first: see
                # engines/postgres.py. It makes the row if only tokens have the account.
                """INSERT INTO account (name, list_revision) VALUES (:name, '')
                ON CONFLICT (name) DO UPDATE SET list_revision = account.list_revision""",
                "DELETE FROM project WHERE account = :name",
                "DELETE FROM token WHERE account = :name",
                # No deadlock with _create_once, which locks its key first: nobody can see a new
                # key yet, and the holder of an old one waits for nothing.
                "DELETE FROM idempotency_key WHERE account = :name",
                "DELETE FROM account WHERE name = :name",
            ):
                connection.fetch(sql, {"name": name})

    def _change_parameters(
        self, account: str, id: str, condition: Precondition
    ) -> Parameters:
        """For a statement that changes a Project if the condition allows it."""
        if_match, if_none_match = condition
        return project_parameters(account, id) | {
            "now": self._now(),
            "list_revision": new_revision(),
            "if_match": None if if_match is None else json.dumps(if_match),
            # None, so that the database parses nothing.
            "if_none_match": json.dumps(if_none_match) if if_none_match else None,
        }

    def _refuse(self, account: str, id: str) -> NoReturn:
        """Say why a change was not made. Raises NotFound, or Stale if there is the Project."""
        self.get_project(account, id)
        raise Stale

    def _now(self) -> int:
        return int(self._clock() * 1000)


def project_parameters(account: str, id: str) -> Parameters:
    # PostgreSQL refuses text with U+0000. No id has a "?", so it is not found with one.
    return {"account": account, "id": id.replace("\0", "?")}


def new_revision() -> str:
    """A new revision of an account's lists. On SQLite, triggers make another one."""
    return secrets.token_hex(8)


def etag_of(revision: str | None, page: Page | None) -> str:
    """The ETag of a list, made of the account's revision and the page that was asked for."""
    numbers = [str(number) for number in page or [] if number is not None]
    return f"{revision or ''}-{'-'.join(numbers)}"


def as_columns(fields: Fields) -> Parameters:
    """The fields as they are stored. Raises KeyError for one that a caller cannot set."""
    columns = dict(fields)
    for name, value in fields.items():
        if SETTABLE[name] == JSON and value is not None:
            columns[name] = json.dumps(value, separators=(",", ":"))  # as on the wire
    return columns


def fingerprint_of(columns: Parameters) -> bytes:
    """A SHA-256 digest of the fields, to compare requests with the same key.

    It is the same in every release. So a field that came after 1.2.0 counts only if it is
    not null, and the order of the fields never changes: new ones are last in FIELDS.
    """
    compared = {
        name: value
        for name, value in columns.items()
        if name in FIELDS_OF_1_2 or value is not None
    }
    return hashlib.sha256(json.dumps(compared).encode()).digest()
