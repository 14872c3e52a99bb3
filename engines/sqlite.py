"""The engine on one SQLite file, or in memory."""

import errno
import os
import re
import secrets
import sqlite3
import weakref
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import Any

from engines import migrations
from engines.connection import Connection, Parameters, Rows, get_sql, list_sql
from engines.database_file import DatabaseFile, NoFile
from engines.engine import Engine
from engines.errors import OutcomeUnknown, Unavailable
from engines.fields import FIELDS, JSON, SETTABLE
from engines.write_lock import WriteLock

OLDEST_SQLITE = (3, 37)  # the first with STRICT tables
WRITE_TIMEOUT = 2.5  # seconds that a writer waits for others of the service
BUSY_TIMEOUT = 1.0  # seconds that anybody waits for another program's lock
MEMORY_TIMEOUT = 60.0  # seconds, in place of both: in memory, whoever reads keeps writers out
OUTAGE = re.compile(  # what an operator can fix, or a retry can get past
    "SQLITE_(BUSY|LOCKED|READONLY|IOERR|CORRUPT|FULL|CANTOPEN|PROTOCOL|NOTADB)"
)


def document_sql() -> str:
    """The SQL of a Project's JSON document."""
    parts = []
    for name, field in FIELDS.items():
        value = f"json({name})" if field.type == JSON else name
        parts.append(f"'{name}', {value}")
    return f"json_object({', '.join(parts)})"


DOCUMENT = document_sql()
ETAG = "(version || '-' || updated_at)"
PROJECT = f"id, {ETAG}, CAST({DOCUMENT} AS BLOB)"
ETAG_IS_ALLOWED = f"""(:if_match IS NULL
        OR {ETAG} IN (SELECT value FROM json_each(:if_match)))
    AND (:if_none_match IS NULL
        OR {ETAG} NOT IN (SELECT value FROM json_each(:if_none_match)))"""


class SQLiteConnection(sqlite3.Connection, Connection):
    """A connection to one file, or to the database in memory."""

    SCHEMA = "sqlite.sql"
    MIGRATIONS = migrations.SQLITE
    GET = get_sql(PROJECT)
    # json_group_array keeps the order of the rows of its subquery.
    LIST = list_sql(f"CAST(json_group_array({DOCUMENT}) AS BLOB)")
    # For CREATE and DELETE, the triggers of sqlite.sql count the Projects of the account.
    CREATE = f"""
        INSERT INTO project (id, account, seq, key, fingerprint, created_at, updated_at,
            {", ".join(SETTABLE)})
        SELECT :id, :account,
            coalesce((SELECT last_seq FROM account WHERE name = :account), 0) + 1,
            :key, :fingerprint, :now, :now, :{", :".join(SETTABLE)}
        WHERE coalesce((SELECT project_count FROM account WHERE name = :account), 0)
            < :limit
        RETURNING {PROJECT}"""
    UPDATE = f"""
        UPDATE project
        SET <assignments> version = version + 1, updated_at = max(updated_at, :now)
        WHERE id = :id AND account = :account AND {ETAG_IS_ALLOWED}
        RETURNING {PROJECT}"""
    DELETE = f"""
        DELETE FROM project
        WHERE id = :id AND account = :account AND {ETAG_IS_ALLOWED}
        RETURNING key"""

    def __init__(
        self, file: DatabaseFile | NoFile, lock: WriteLock, uri: str, timeout: float
    ) -> None:
        """Raises sqlite3.Error, and Unavailable as the file's methods do."""
        # Before SQLite reads it: it would apply the -wal of the old file to a new one.
        file.check_identity()
        file.add_connection()
        self._file, self._lock = file, lock
        try:
            super().__init__(
                uri,
                uri=True,
                timeout=timeout,
                isolation_level=None,  # each statement is a transaction
                check_same_thread=False,  # any thread takes a connection that is idle
            )
        except BaseException:
            file.remove_connection()
            raise
        try:
            self.execute("PRAGMA foreign_keys = ON")  # off by default
            self.execute("PRAGMA temp_store = MEMORY")  # a container may have no /tmp
            self.execute("PRAGMA journal_size_limit = 4194304")  # or the -wal would never shrink
        except BaseException:
            self.close()
            raise

    def fetch(self, sql: str, parameters: Parameters) -> Rows:
        # A statement that returns rows commits only once all are fetched.
        return self.execute(sql, parameters).fetchall()

    def begin(self) -> None:
        self.execute("BEGIN IMMEDIATE")

    def close(self) -> None:
        try:
            self._file.check_identity()
        except Unavailable:
            # SQLite would leave the -wal of a file that has lost its name, and apply it to the next
            # file with this name. This moves its contents into the old file.
            with suppress(sqlite3.Error):
                self.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        super().close()
        self._file.remove_connection()

    def migrate(self, creates: bool) -> int:
        found = version_of(self)
        [(mode,)] = self.execute("PRAGMA journal_mode")
        if not self.scripts_for(found, creates) and mode == "wal":  # raises before any change
            return found
        with self._lock.hold():
            self.execute("PRAGMA journal_mode = WAL")  # which no transaction can set
            found = version_of(self)  # again: another process may have been first
            script = (
                "BEGIN IMMEDIATE",
                *self.scripts_for(found, creates),
                f"PRAGMA application_id = {migrations.APPLICATION_ID}",
                f"PRAGMA user_version = {migrations.SCHEMA_VERSION}",
                "COMMIT",
            )
            self.executescript(";".join(script))
        return found

    # BEGIN IMMEDIATE has locked all others out.

    def lock_account(self, account: str) -> None: ...

    def lock_out_writers(self) -> None: ...

    def begin_snapshot(self) -> None:
        self.execute("BEGIN")

    def stream(self, sql: str) -> Generator[Any]:
        yield from self.execute(sql)

    def insert(self, table: str, columns: Iterable[str], rows: Iterable[Any]) -> None:
        names = list(columns)
        values = f"({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
        self.executemany(f"INSERT INTO {table} {values}", rows)


def version_of(connection: sqlite3.Connection) -> int:
    """The schema version, or EMPTY, or FOREIGN. All is on the first page; no schema is read."""
    changes, application, version = (
        # In this order, since another process may create the tables meanwhile.
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("schema_version", "application_id", "user_version")
    )
    if not changes and application in (0, migrations.APPLICATION_ID):
        return migrations.EMPTY
    is_ours = application == migrations.APPLICATION_ID and version > 0
    return int(version) if is_ours else migrations.FOREIGN


def raise_if_full(error: sqlite3.Error, path: str) -> None:
    """Raises Unavailable if the copy's disk is full: SQLite does not say which disk it means."""
    if error.sqlite_errorname == "SQLITE_FULL":
        raise Unavailable(f"no space left in {os.path.dirname(path)}") from error


class SQLite(Engine):
    """One file, or a private database in memory."""

    ERROR = sqlite3.Error

    def __init__(self, path: str, page_size: int = 4096) -> None:
        """On the file at `path`; `:memory:` is a private database, which has its tables.

        A new file gets pages of this size, in bytes. Raises ValueError if SQLite is too old.
        """
        self._page_size = page_size
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            found, needed = sqlite3.sqlite_version, ".".join(map(str, OLDEST_SQLITE))
            raise ValueError(f"this Python has SQLite {found}; the service needs {needed} or later")
        super().__init__(NoFile() if path == ":memory:" else DatabaseFile(path))
        if isinstance(self.file, NoFile):
            self._lock = WriteLock(self.file, MEMORY_TIMEOUT)
            self._busy_timeout = MEMORY_TIMEOUT
            self.name = "the database in memory"
            self._uri = self._uri_to_read = f"file:/{secrets.token_hex(8)}?vfs=memdb"
            # The database lasts as long as one connection to it.
            kept = sqlite3.connect(self._uri, uri=True, check_same_thread=False)
            weakref.finalize(self, kept.close)
            self.open_database(creates=True)
        else:
            self._lock = WriteLock(self.file, WRITE_TIMEOUT)
            self._busy_timeout = BUSY_TIMEOUT
            self.name = self.file.path
            uri = Path(self.file.target).as_uri()  # even if the link leads elsewhere by then
            # rw: SQLite must not put an empty file in the place of a lost one.
            self._uri, self._uri_to_read = f"{uri}?mode=rw", f"{uri}?mode=ro"

    def open_connection(self) -> SQLiteConnection:
        connection = self.open_unread()
        try:
            connection.execute("PRAGMA synchronous = FULL")  # NORMAL may lose commits
            connection.execute(f"PRAGMA page_size = {self._page_size}")  # if the file is empty
        except BaseException:
            connection.close()
            raise
        return connection

    def open_unread(self) -> SQLiteConnection:
        """A connection that has not read the schema, which may be damaged."""
        return SQLiteConnection(self.file, self._lock, self._uri, self._busy_timeout)

    def open_to_read(self) -> SQLiteConnection:
        """A connection through which SQLite cannot write, and so follows no -journal.

        Otherwise, a -journal could name a backup for the nightly backup to delete.
        """
        return SQLiteConnection(self.file, self._lock, self._uri_to_read, self._busy_timeout)

    def write_lock(self) -> AbstractContextManager[None]:
        return self._lock.hold()

    def save(self, path: str) -> None:
        """Copy the database to this empty file, without migrating it."""
        # `vfs=unix`, or the copy of a database in memory would be in memory, too.
        uri = f"{Path(path).absolute().as_uri()}?vfs=unix"
        try:
            with closing(self.open_to_read()) as connection:
                # Raises, unless it is one of ours.
                connection.scripts_for(version_of(connection), creates=False)
                connection.fetch("VACUUM INTO :uri", {"uri": uri})
        except sqlite3.Error as error:
            raise_if_full(error, path)
            if error.sqlite_errorname == "SQLITE_READONLY_ROLLBACK":
                raise Unavailable("the database has a -journal: restart the service") from error
            self.raise_if_outage(error)
            raise

    def is_timeout(self, error: BaseException) -> bool:
        name = getattr(error, "sqlite_errorname", "")
        return name.startswith("SQLITE_BUSY") or isinstance(error, TimeoutError)

    def translate_error(self, error: BaseException, may_have_committed: bool) -> Unavailable | None:
        name = getattr(error, "sqlite_errorname", "")
        is_of_file = isinstance(error, OSError)  # or a TimeoutError of the lock
        if not is_of_file and not OUTAGE.match(name):
            return None
        # After a crash, SQLite may still find a commit that could not be synced.
        is_unknown = may_have_committed and (is_of_file or name.startswith("SQLITE_IOERR"))
        return (OutcomeUnknown if is_unknown else Unavailable)(self._explain(error, name))

    def _explain(self, error: BaseException, name: str) -> str:
        """What an operator reads of an outage: the reason, and the file."""
        if isinstance(error, OSError):
            is_lock = str(error.filename).endswith("-lock")
            return f"{error.strerror or error}: {error.filename if is_lock else self.name}"
        if name.startswith("SQLITE_CANTOPEN") and (file := self.file.unreadable()):
            return f"{os.strerror(errno.EACCES)}: {file}"
        is_unwritable = self.file.folder and not os.access(self.file.folder, os.W_OK)
        if is_unwritable and name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY_DIRECTORY")):
            return f"its folder cannot be written to: {self.name}"
        if name in ("SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE"):  # the latter at a start
            return f"{error} (is the disk full, or a quota used up?): {self.name}"
        return f"{error}: {self.name}"
