"""What a connection to a database does, and its statements that the engines write differently."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

from engines.errors import HOW_TO_BEGIN, Unavailable
from engines.migrations import EMPTY, SCHEMA_VERSION, Migrations, incompatibility

Parameters = dict[str, Any]  # of a statement, by name
Rows = list[Any]


def get_sql(project: str) -> str:
    """GET, with the engine's SQL of a Project's id, ETag and document."""
    return f"SELECT {project} FROM project WHERE id = :id AND account = :account"


def list_sql(documents: str) -> str:
    """LIST, with the engine's SQL of the JSON array of its rows' documents."""
    return f"""
        SELECT (SELECT project_count FROM account WHERE name = :account) AS total,
            (SELECT last_seq FROM account WHERE name = :account) AS last_seq,
            -- The last seq of this page, unless it is the last one of all.
            nullif(max(seq), (SELECT max(seq) FROM project WHERE account = :account))
                AS next_after,
            {documents} AS document
        FROM (SELECT * FROM project WHERE account = :account
            -- OFFSET reads whatever it skips: here only numbers, in an index.
            AND seq >= (SELECT seq FROM project WHERE account = :account AND seq > :after
                ORDER BY seq LIMIT 1 OFFSET :offset)
            ORDER BY seq LIMIT :size) AS page"""


class Connection(ABC):
    """A connection, used by one thread at a time.

    A statement names its parameters `:account`, `:id` and so on, and nothing else in it has that
    form. It has no `%`, which psycopg would take for a parameter. It is a transaction of its own
    unless `begin` was called.
    """

    SCHEMA: str  # the name of the file with the tables
    MIGRATIONS: Migrations
    ALWAYS_IN_TRANSACTION = False  # whether even one statement that writes needs a transaction

    # The statements, each with its parameters. GET, CREATE and UPDATE return the Project's id, ETag
    # and document, or no row.

    # :account, :id
    GET: str

    # :account, :size, :after, :offset. `document`, a JSON array, has up to :size Projects with
    # seq > :after, skipping :offset; `next_after` is the seq of the last one, if more follow.
    # `total`, the number of Projects, and `last_seq` are the account's, or null if it has no row.
    LIST: str

    # :account, :id, :key, :fingerprint, :now, :limit, and each field that a caller sets
    CREATE: str

    # :account, :id, :if_match, :if_none_match, :now, and the fields to change, for each of which
    # <assignments> stands for `name = :name, `
    UPDATE: str

    # :account, :id, :if_match, :if_none_match. Returns the key, which may be null, or no row.
    DELETE: str

    @abstractmethod
    def fetch(self, sql: str, parameters: Parameters) -> Rows:
        """Run a statement and return all its rows."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a transaction that writes."""

    @abstractmethod
    def commit(self) -> None:
        """Commit the transaction, if there is one. Each engine inherits it from its driver."""

    @abstractmethod
    def close(self) -> None: ...

    def start_deadline(self) -> None:
        """Limit how long this use of the connection may take."""

    def is_usable(self) -> bool:
        """Whether an idle connection can serve another request."""
        return True

    @abstractmethod
    def lock_account(self, account: str) -> None:
        """Let nobody else add or delete its Projects until the transaction ends."""

    def create(self, parameters: Parameters) -> Rows:
        """Add the Project, and count it. Returns no row if the account is full."""
        return self.fetch(self.CREATE, parameters)

    def extend_timeouts(self) -> None:
        """Let the transaction take as long as an operator waits, if anything limits it."""

    @abstractmethod
    def migrate(self, creates: bool) -> int:
        """Bring the tables up to date, or with `creates` create them; leave alone what is not ours.

        Returns the schema version that was found. Raises Unavailable: see scripts_for.
        """

    def scripts_for(self, version: int, creates: bool) -> list[str]:
        """One script that creates the tables, or the statements that migrate those of this version.

        Raises Unavailable for a version that this release cannot use, and for an empty database
        unless the caller `creates` the tables.
        """
        if version == EMPTY:
            if not creates:
                raise Unavailable(f"the database has no tables: {HOW_TO_BEGIN}")
            return [Path(__file__).with_name(self.SCHEMA).read_text()]
        if reason := incompatibility(version):
            raise Unavailable(f"the database was {reason}")
        later = range(version + 1, SCHEMA_VERSION + 1)
        return [statement for each in later for statement in self.MIGRATIONS[each]]

    # For commands alone:

    @abstractmethod
    def begin_snapshot(self) -> None:
        """Begin a long transaction that sees the database as it is at its first statement.

        On a cluster, each account is seen as it is at a moment of its own.
        """

    @abstractmethod
    def stream(self, sql: str) -> Generator[Any]:
        """The rows of a statement, one by one, without holding all of them in memory."""

    @abstractmethod
    def lock_out_writers(self) -> None:
        """Let nobody else add anything until the transaction ends."""

    @abstractmethod
    def insert(self, table: str, columns: Iterable[str], rows: Iterable[Any]) -> None:
        """Add the rows to a table."""

    def advance_token_sequence(self) -> None:
        """Let the ids of tokens go on after those that are there, if the database does not."""
