"""Projects and access tokens: what the service guarantees about them, and the rules.

Threads and processes may share a database. When a method returns, what it wrote is on the disk,
unless the database is in memory.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from engines.base import (
    COMMAND_TIMEOUT,
    REQUEST_TIMEOUT,
    Acquisition,
    Columns,
    Connection,
    Engine,
    Precondition,
    Project,
    Unavailable,
)
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
    """The account is at or over its limit of Projects, which is the argument."""


class ProjectList(NamedTuple):
    etag: str
    document: bytes  # JSON
    next_after: int | None  # `after` of the next page, if there is one


class Page(NamedTuple):
    """The part of a list that a caller asks for."""

    number: int  # from 0; with `after`, the response only repeats it
    size: int  # Projects
    after: int | None = None  # the seq of the Project after which the page begins


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


Fields = Mapping[str, object]  # what a caller sets: some fields of a Project, or all
DAY = 86_400_000  # milliseconds
MAX_PROJECTS = 10_000  # of an account, unless a setting says otherwise
KEY_LIFETIME = 7 * DAY  # the minimum for an idempotency key
FIELDS_OF_1_2 = ("name", "postal_code", "location")
ALWAYS = Precondition()
WHOLE = Page(0, 2**63 - 1)  # the list as one page; no database takes a larger LIMIT
# A change may miss a Project that another writer has just changed, or that Citus is moving.
ATTEMPTS = 2


class Store:
    """The rules, for any engine.

    Any method may raise engines.base.Unavailable, and one that writes may raise OutcomeUnknown.
    Each change checks and writes in one statement or transaction, so that no other change comes
    between.
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

    def check(self) -> None:
        """Raises Unavailable if the database cannot be read now."""
        self.engine.check()

    def create_project(self, account: str, fields: Fields, key: str | None = None) -> Project:
        """Add a Project, or return the one that the account made with the same key.

        Raises AccountFull, KeyReused, KeySpent.
        """
        id = secrets.token_hex(12)
        columns = dict.fromkeys(SETTABLE) | as_columns(fields)
        if key is not None:
            return self._create_once(account, id, columns, key)
        with self.engine.writer() as connection:
            project = connection.create_project(
                account, id, columns, self._now(), self._max_projects
            )
        if project is None:
            raise AccountFull(self._max_projects)
        return project

    def _create_once(self, account: str, id: str, columns: Columns, key: str) -> Project:
        """Add the Project if its key is new. Otherwise return the one that has the key."""
        now = self._now()
        claim = {
            "account": account,
            "key": key,
            "fingerprint": fingerprint_of(columns),
            "project": id,
            "now": now,
        }
        with self.engine.writer(REQUEST_TIMEOUT) as connection:
            # The Project first: every change locks the account before any other row.
            project = connection.create_project(account, id, columns, now, self._max_projects)
            # The update changes nothing. But unlike DO NOTHING, it returns the row that is there.
            [(first_id, first_fingerprint)] = connection.fetch(
                """INSERT INTO idempotency_key
                    (account, key, fingerprint, project, created_at)
                VALUES (:account, :key, :fingerprint, :project, :now)
                ON CONFLICT (account, key)
                    DO UPDATE SET fingerprint = idempotency_key.fingerprint
                RETURNING project, fingerprint""",
                claim,
            )
            if first_id != id:
                project = None  # a request with this key was first
            if project is None:
                connection.rollback()  # an error raised here would close the connection
            else:
                delete_old_keys(connection, account, before=now - KEY_LIFETIME)
        if project is not None:
            return project
        if first_id == id:
            raise AccountFull(self._max_projects)
        # A key whose Project is gone is spent, whatever fields come with it.
        try:
            project = self.get_project(account, first_id)
        except NotFound:
            raise KeySpent from None
        if first_fingerprint != claim["fingerprint"]:
            raise KeyReused
        return project

    def get_project(self, account: str, id: str) -> Project:
        """Raises NotFound."""
        with Acquisition(self.engine) as connection:
            project = connection.get_project(account, id)
        if project is None:
            raise NotFound
        return project

    def update_project(
        self, account: str, id: str, fields: Fields, condition: Precondition = ALWAYS
    ) -> Project:
        """Change these fields and raise the version by 1. Raises NotFound, Stale."""
        columns = as_columns(fields)
        for _ in range(ATTEMPTS):
            with self.engine.writer() as connection:
                project = connection.update_project(account, id, columns, self._now(), condition)
            if project is not None:
                return project
            self._raise_if_refused(account, id, condition)
        raise Unavailable("the Project could not be changed")

    def delete_project(self, account: str, id: str, condition: Precondition = ALWAYS) -> None:
        """Delete a Project and all that belongs to it. Raises NotFound, Stale."""
        for _ in range(ATTEMPTS):
            with self.engine.writer() as connection:
                is_deleted = connection.delete_project(account, id, condition)
            if is_deleted:
                return
            self._raise_if_refused(account, id, condition)
        raise Unavailable("the Project could not be deleted")

    def _raise_if_refused(self, account: str, id: str, condition: Precondition) -> None:
        """Raises NotFound or Stale, unless the change should be tried once more."""
        if not condition.allows(self.get_project(account, id).etag):
            raise Stale

    def list_etag(self, account: str, page: Page | None = None) -> str:
        """The ETag of what `list_projects` returns, without rendering the Projects.

        Any change gives the account's lists new ETags, and no old one comes back. There is one
        exception: an account without a row, be it new or deleted, always has the same ETags.
        """
        rows = self.engine.read(
            "SELECT list_revision FROM account WHERE name = :account", {"account": account}
        )
        return etag_of(rows[0][0] if rows else None, page)

    def list_projects(self, account: str, page: Page | None = None) -> ProjectList:
        """All Projects, oldest first, or one page of them."""
        number, size, after = page or WHOLE
        offset = number * size if after is None else 0
        with Acquisition(self.engine) as connection:
            found = connection.list_projects(account, size, after or 0, offset)
        etag = etag_of(found.list_revision, page)
        if page is None:
            return ProjectList(etag, found.documents, None)
        numbers = f'"page":{number},"size":{size},"total":{found.total or 0}'.encode()
        document = b'{"projectList":%b,%b}' % (found.documents, numbers)
        return ProjectList(etag, document, found.next_after)

    def add_token(self, account: str, digest: bytes, days: int | None = None) -> int:
        """Let a token act for the account for this many days, or for ever.

        Returns the token's id.
        """
        now = self._now()
        token = {
            "account": account,
            "digest": digest,
            "now": now,
            "expires_at": None if days is None else now + days * DAY,
        }
        with self.engine.writer() as connection:
            [(id,)] = connection.fetch(
                """INSERT INTO token (account, digest, created_at, expires_at)
                VALUES (:account, :digest, :now, :expires_at)
                RETURNING id""",
                token,
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
        with self.engine.writer() as connection:
            return bool(connection.fetch(delete, {"id": id}))

    def revoke_tokens(self, account: str) -> bool:
        """Make all tokens of the account invalid; False if it has none."""
        delete = "DELETE FROM token WHERE account = :account RETURNING id"
        with self.engine.writer() as connection:
            return bool(connection.fetch(delete, {"account": account}))

    def find_account(self, name: str) -> Account | None:
        """The account, if `list_accounts` has it."""
        # Two statements: on a cluster, the second one asks the account's node alone.
        [(tokens,)] = self.engine.read(
            "SELECT count(*) FROM token WHERE account = :name", {"name": name}
        )
        rows = self.engine.read(
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
        # An account gets its row with its first Project. Until then, only tokens name it.
        rows = self.engine.read(
            """SELECT names.name, coalesce(project_count, 0), coalesce(tokens, 0),
                changed_at
            FROM (SELECT name FROM account UNION SELECT account FROM token) AS names
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
        with self.engine.writer(COMMAND_TIMEOUT) as connection:
            for sql in (
                # Locks the account's row, as every change does first. It may have none yet.
                """INSERT INTO account (name, list_revision) VALUES (:name, '')
                ON CONFLICT (name) DO UPDATE SET list_revision = account.list_revision""",
                "DELETE FROM project WHERE account = :name",
                "DELETE FROM token WHERE account = :name",
                "DELETE FROM idempotency_key WHERE account = :name",
                "DELETE FROM account WHERE name = :name",
            ):
                connection.fetch(sql, {"name": name})

    def _now(self) -> int:
        return int(self._clock() * 1000)


def delete_old_keys(connection: Connection, account: str, before: int) -> None:
    """Delete the ten oldest keys from before this time: each request adds only one."""
    connection.fetch(
        """DELETE FROM idempotency_key WHERE account = :account AND key IN
            (SELECT key FROM idempotency_key
            WHERE account = :account AND created_at < :before
            ORDER BY created_at LIMIT 10)""",
        {"account": account, "before": before},
    )


def etag_of(revision: str | None, page: Page | None) -> str:
    """The ETag of a list, made of the account's revision and the page that was asked for."""
    numbers = [str(number) for number in page or [] if number is not None]
    return f"{revision or ''}-{'-'.join(numbers)}"


def as_columns(fields: Fields) -> dict[str, object]:
    """The fields as they are stored. Raises KeyError for one that a caller cannot set."""
    columns = dict(fields)
    for name, value in fields.items():
        if SETTABLE[name] == JSON and value is not None:
            columns[name] = json.dumps(value, separators=(",", ":"))  # as on the wire
    return columns


def fingerprint_of(columns: Columns) -> bytes:
    """A SHA-256 digest of the fields, to compare requests with the same key.

    It is the same in every release. So a field that came after 1.2.0 counts only if it is not null,
    and the order of the fields never changes: new ones are last in FIELDS.
    """
    compared = {
        name: value for name, value in columns.items() if name in FIELDS_OF_1_2 or value is not None
    }
    return hashlib.sha256(json.dumps(compared).encode()).digest()
