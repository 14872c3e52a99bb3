"""Projects and access tokens: what the service guarantees about them, and the rules.

It imports no Flask, validates no Project, and depends on no engine. An engine runs the
statements, and renders a Project as the JSON that goes over the wire. Threads and processes
may share a database. Unless it is in memory, what a method has written is on the disk when
it returns.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from engines import tables
from engines.base import LONG, Engine, Values


class NotFound(Exception):
    """The account has no such Project."""


class Stale(Exception):
    """The Project's ETag does not satisfy If-Match or If-None-Match."""


class KeyReused(Exception):
    """The account made a Project with the same key, and with other members."""


class KeySpent(Exception):
    """The account made a Project with the same key, and has deleted it."""


class Project(NamedTuple):
    id: str
    etag: str  # version and updated_at: it does not recur after a backup is restored
    document: bytes  # JSON


class ProjectList(NamedTuple):
    etag: str
    document: bytes | None  # JSON; None if the caller knows this ETag
    next_after: int | None  # `after` of the next page, if there is one


class Page(NamedTuple):
    """The part of a list that a caller asks for."""

    number: int  # from 0
    size: int  # Projects
    # Start behind this Project (its seq). `number` then only appears in the response.
    after: int | None = None


class Caller(NamedTuple):
    account: str
    token: int  # its id


class Account(NamedTuple):
    name: str
    projects: int
    tokens: int
    # The last change of any of its Projects, in epoch milliseconds; None without Projects.
    changed_at: int | None


class Token(NamedTuple):
    id: int
    created_at: int  # epoch milliseconds
    expires_at: int | None  # None: never
    account: str


Members = Mapping[str, object]  # some or all of those that a caller can set
Etags = Collection[str]
DAY = 86_400_000  # milliseconds
KINDS = {name: tables.MEMBERS[name] for name in tables.SETTABLE}
MEMBERS_OF_1_2 = ("name", "postal_code", "location")


class Store:
    """The rules, for any engine.

    Any method may raise engines.base.Unavailable, and one that writes OutcomeUnknown. Each
    change checks and writes in one statement or transaction, so no other comes between.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns epoch seconds."""
        self.engine = engine
        self._clock = clock

    def close(self) -> None:
        """Close the idle connections; the store can go on, with new ones."""
        self.engine.close()

    def check(self) -> None:
        """Raises Unavailable if the database cannot be read now."""
        self.engine.check()

    def create_project(
        self, account: str, members: Members, key: str | None = None
    ) -> Project:
        """Add a Project, or return the one that the account made with the same key.

        A key is remembered for good. Raises KeyReused, KeySpent.
        """
        columns = dict.fromkeys(tables.SETTABLE) | as_columns(members)
        id = secrets.token_hex(12)
        values = {"account": account, "id": id, "now": self._now(), **columns}
        if key is None:
            return Project(*self.engine.write(self.engine.CREATE, values)[0])
        digest = digest_of(columns)
        claim = {"account": account, "key": key, "digest": digest, "project": id}
        with self.engine.transaction(account) as execute:
            [(first_id, first_digest)] = execute(tables.CLAIM_KEY, claim)
            if first_id == id:
                return Project(*execute(self.engine.CREATE, values)[0])
        # A key whose Project is gone is spent, whatever members come with it.
        try:
            project = self.get_project(account, first_id)
        except NotFound:
            raise KeySpent from None
        if first_digest != digest:
            raise KeyReused
        return project

    def get_project(self, account: str, id: str) -> Project:
        """Raises NotFound."""
        rows = self.engine.read(self.engine.GET, identity(account, id))
        if not rows:
            raise NotFound
        return Project(*rows[0])

    def update_project(
        self,
        account: str,
        id: str,
        members: Members,
        if_match: Etags | None = None,
        if_none_match: Etags | None = None,
    ) -> Project:
        """Change these members and raise the version by 1. Raises NotFound, Stale.

        The two conditions are those of RFC 9110 13.1; None asks nothing.
        """
        columns = as_columns(members)
        changes = "".join(f"{name} = :{name}, " for name in columns)
        sql = self.engine.UPDATE.replace("{changes}", changes)
        values = identity(account, id) | columns
        return Project(*self._change(sql, values, if_match, if_none_match))

    def delete_project(
        self,
        account: str,
        id: str,
        if_match: Etags | None = None,
        if_none_match: Etags | None = None,
    ) -> None:
        """Delete a Project and all that belongs to it. Raises NotFound, Stale."""
        values = identity(account, id)
        self._change(self.engine.DELETE, values, if_match, if_none_match)

    def list_projects(
        self, account: str, known: Etags, page: Page | None = None
    ) -> ProjectList:
        """All Projects, oldest first, or one page of them.

        `known` are the ETags of lists that the caller has. Any change gives the account's
        lists new ETags, and old ones never return. The exception: before its first
        Project and after its deletion, an account has the same ETags.
        """
        values: Values = {"account": account, "known": as_list(known)}
        if page is None:
            values["etag_suffix"] = "-"
            [(etag, document)] = self.engine.read(self.engine.LIST, values)
            return ProjectList(etag, document, None)
        values |= {"page": page.number, "size": page.size, "after": page.after or 0}
        values["offset"] = page.number * page.size if page.after is None else 0
        start = "" if page.after is None else f"-{page.after}"
        values["etag_suffix"] = f"-{page.number}-{page.size}{start}"
        [(etag, document)] = self.engine.read(self.engine.LIST_PAGE, values)
        if document is None:
            return ProjectList(etag, None, None)
        next_after, _, document = document.partition(b"\n")
        return ProjectList(etag, document, int(next_after) if next_after else None)

    def add_token(self, account: str, digest: bytes, days: int | None = None) -> int:
        """Let a token act for the account: for this many days, or without a limit.

        Returns the token's id.
        """
        now = self._now()
        values = {"account": account, "digest": digest, "now": now}
        values["expires_at"] = None if days is None else now + days * DAY
        [(id,)] = self.engine.write(tables.ADD_TOKEN, values)
        return int(id)

    def find_caller(self, digest: bytes) -> Caller | None:
        """Who calls with this token; None if it is unknown or has expired."""
        values = {"digest": digest, "now": self._now()}
        rows = self.engine.read(tables.FIND_TOKEN, values)
        return Caller(*rows[0]) if rows else None

    def list_tokens(self) -> list[Token]:
        """Every token, in the order of the ids."""
        return [Token(*row) for row in self.engine.read(tables.TOKENS, {})]

    def revoke_token(self, id: int) -> bool:
        """Make a token invalid; False if there is none with this id."""
        return bool(self.engine.write(tables.REVOKE_TOKEN, {"id": id}))

    def has_account(self, name: str) -> bool:
        """Whether `list_accounts` has it."""
        return bool(self.engine.read(tables.FIND_ACCOUNT, {"name": name}))

    def list_accounts(self) -> list[Account]:
        """Every account, in the order of the names."""
        return [Account(*row) for row in self.engine.read(tables.ACCOUNTS, {})]

    def delete_account(self, name: str) -> bool:
        """Delete the account and all that is its own; False if there is none."""
        with self.engine.transaction(name, LONG) as execute:
            deleted = [execute(sql, {"name": name}) for sql in tables.DELETE_ACCOUNT]
        return any(deleted)

    def _change(
        self,
        sql: str,
        values: Values,
        if_match: Etags | None,
        if_none_match: Etags | None,
    ) -> Any:
        values["now"] = self._now()
        values["if_match"] = None if if_match is None else as_list(if_match)
        values["if_none_match"] = as_list(if_none_match) if if_none_match else None
        rows = self.engine.write(sql, values)
        if rows:
            return rows[0]
        if if_match is None and not if_none_match:
            raise NotFound
        # This raises NotFound, unless it is only the ETag that did not match.
        self.get_project(values["account"], values["id"])
        raise Stale

    def _now(self) -> int:
        return int(self._clock() * 1000)


def identity(account: str, id: str) -> Values:
    # PostgreSQL refuses U+0000. No id has a "?", so this one is not found, either.
    return {"account": account, "id": id.replace("\0", "?")}


def as_list(etags: Etags) -> str:
    """The ETags as JSON, without any that holds U+0000: PostgreSQL would refuse it."""
    return json.dumps([etag for etag in etags if "\0" not in etag])


def as_columns(members: Members) -> Values:
    """The members as they are stored. Raises KeyError for one that cannot be set."""
    return {
        name: compact(value)
        if KINDS[name] == tables.JSON and value is not None
        else value
        for name, value in members.items()
    }


def compact(value: object) -> str:
    """JSON as it goes over the wire."""
    return json.dumps(value, separators=(",", ":"))


def digest_of(columns: Values) -> bytes:
    """A SHA-256 digest of the members, to compare requests with the same key.

    It is the same in every release: a null member that 1.2.0 did not have is left out.
    """
    compared = {
        name: value
        for name, value in columns.items()
        if name in MEMBERS_OF_1_2 or value is not None
    }
    return hashlib.sha256(json.dumps(compared).encode()).digest()
