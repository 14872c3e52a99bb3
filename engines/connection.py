"""What a connection does for the store: it binds the statements of its engine, and migrates."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from engines.errors import Unavailable
from engines.migrations import EMPTY, SCHEMA_VERSION, Migrations, incompatibility

Parameters = dict[str, Any]  # of a statement, by name
Rows = list[Any]
Columns = dict[str, object]  # some of a Project's, as they are stored
WriteLock = Callable[[], AbstractContextManager[None]]


class Project(NamedTuple):
    id: str
    etag: str  # made of version and updated_at
    document: bytes  # JSON


class KeyedProject(NamedTuple):
    project: Project
    fingerprint: bytes  # of the request that created it


class ProjectPage(NamedTuple):
    """A part of an account's list."""

    total: int | None  # all Projects of the account; None if it has no row
    next_after: int | None  # the seq of the last Project here, if more follow
    documents: bytes  # a JSON array


class Precondition(NamedTuple):
    """Which ETags a Project may have, for a change to be made (RFC 9110 13.1)."""

    if_match: Sequence[str] | None = None  # one of these; None: any
    if_none_match: Sequence[str] = ()  # none of these

    def allows(self, etag: str) -> bool:
        is_named = self.if_match is None or etag in self.if_match
        return is_named and etag not in self.if_none_match


class Connection(ABC):
    """A connection, used by one thread at a time.

    A statement names its parameters `:account`, `:id` and so on, and nothing else in it has that
    form. It has no `%`. It is a transaction of its own unless `begin` was called.
    """

    SCHEMA: str  # the name of the file with the tables
    MIGRATIONS: Migrations
    ALWAYS_IN_TRANSACTION = False  # whether even one statement that writes needs a transaction

    # GET, CREATE and UPDATE return the Project's id, ETag and document, or no row.
    GET: str
    # The columns of a ProjectPage: up to :size Projects with seq > :after, skipping :offset.
    LIST: str
    CREATE: str
    # <changes> stands for assignments to columns, each with a comma after it.
    UPDATE: str
    # Returns the id, or no row.
    DELETE: str

    def get_project(self, account: str, id: str) -> Project | None:
        # PostgreSQL refuses U+0000 in text. No id contains a "?", so this finds no Project.
        rows = self.fetch(self.GET, {"account": account, "id": id.replace("\0", "?")})
        return Project(*rows[0]) if rows else None

    def lock_account(self, account: str) -> None:
        """Let nobody else add or delete its Projects until the transaction ends.

        By default, nobody can: `begin` has locked them out.
        """

    def find_by_key(self, account: str, key: str) -> KeyedProject | None:
        """The account's Project that was created with this key. It is for a locked account."""
        rows = self.fetch(
            "SELECT id, fingerprint FROM project WHERE account = :account AND key = :key",
            {"account": account, "key": key},
        )
        if not rows:
            return None
        [(id, fingerprint)] = rows
        [project] = self.fetch(self.GET, {"account": account, "id": id})
        return KeyedProject(Project(*project), fingerprint)

    def list_projects(self, account: str, size: int, after: int, offset: int) -> ProjectPage:
        page = {"account": account, "size": size, "after": after, "offset": offset}
        [row] = self.fetch(self.LIST, page)
        return ProjectPage(*row)

    def create_project(
        self, account: str, id: str, columns: Columns, now: int, limit: int
    ) -> Project | None:
        """Add a Project with these columns.

        None if the account has `limit` Projects or more.
        """
        parameters = columns | {"account": account, "id": id, "now": now, "limit": limit}
        rows = self.fetch(self.CREATE, parameters)
        return Project(*rows[0]) if rows else None

    def update_project(
        self, account: str, id: str, columns: Columns, now: int, condition: Precondition
    ) -> Project | None:
        """Change these columns; None if the condition fails or there is no such Project."""
        changes = "".join(f"{name} = :{name}, " for name in columns)
        parameters = change_parameters(account, id, condition) | columns | {"now": now}
        rows = self.fetch(self.UPDATE.replace("<changes>", changes), parameters)
        return Project(*rows[0]) if rows else None

    def delete_project(self, account: str, id: str, condition: Precondition) -> bool:
        """False if the condition fails or there is no such Project."""
        return bool(self.fetch(self.DELETE, change_parameters(account, id, condition)))

    def scripts_for(self, version: int, creates: bool) -> list[str]:
        """One script that creates the tables, or the statements that migrate those of this version.

        Raises Unavailable for a version that this release cannot use, and for an empty database
        unless the caller `creates` the tables.
        """
        if version == EMPTY:
            if not creates:
                hint = "restore a backup, or run `init-db` for an empty database"
                raise Unavailable(f"the database has no tables: {hint}")
            return [Path(__file__).with_name(self.SCHEMA).read_text()]
        if reason := incompatibility(version):
            raise Unavailable(f"the database was {reason}")
        later = range(version + 1, SCHEMA_VERSION + 1)
        return [statement for each in later for statement in self.MIGRATIONS[each]]

    @abstractmethod
    def migrate(self, creates: bool, write_lock: WriteLock) -> int:
        """Bring the tables up to date, or with `creates` create them; leave alone what is not ours.

        On SQLite, the lock is taken if something changes. Returns the schema version that was found.
        Raises Unavailable: see scripts_for.
        """

    @abstractmethod
    def fetch(self, sql: str, parameters: Parameters) -> Rows:
        """Run a statement and return all its rows."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a transaction that writes."""

    @abstractmethod
    def commit(self) -> None:
        """Commit the transaction, if there is one."""

    @abstractmethod
    def close(self) -> None: ...

    def start_deadline(self) -> None:
        """Limit the time of what the connection is acquired for."""

    def is_usable(self) -> bool:
        """Whether an idle connection can serve another request."""
        return True

    def extend_timeouts(self) -> None:
        """Let the transaction take as long as an operator may wait. By default, nothing limits it."""

    # For commands alone:

    @abstractmethod
    def begin_snapshot(self) -> None:
        """Begin a long transaction that sees the database as it is at its first statement.

        On a cluster, each account is seen as it is at a moment of its own.
        """

    @abstractmethod
    def stream(self, sql: str) -> Generator[Any]:
        """The rows of a statement, one by one, without holding all of them in memory."""

    def lock_out_writers(self) -> None:
        """Let nobody else add anything until the transaction ends. By default, nobody can."""

    @abstractmethod
    def insert(self, table: str, columns: Iterable[str], rows: Iterable[Any]) -> None:
        """Add the rows to a table."""

    def advance_token_sequence(self) -> None:
        """Let the ids of tokens go on after those that were inserted."""


def change_parameters(account: str, id: str, condition: Precondition) -> Parameters:
    if_match, if_none_match = condition
    return {
        "account": account,
        "id": id.replace("\0", "?"),  # as in get_project
        "if_match": None if if_match is None else json.dumps(if_match),
        # None, so that the database parses nothing.
        "if_none_match": json.dumps(if_none_match) if if_none_match else None,
    }
