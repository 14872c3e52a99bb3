"""The engine on a PostgreSQL server or a Citus cluster, for a service on several machines."""

import re
import select
import time
from collections.abc import Generator, Iterable, Mapping
from functools import cache
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from engines import migrations
from engines.connection import Connection, Parameters, Rows, get_sql, list_sql
from engines.database_file import NoFile
from engines.engine import Engine
from engines.errors import OutcomeUnknown, Unavailable
from engines.fields import FIELDS, SETTABLE, TEXT

REQUEST_TIMEOUT = 4.5  # seconds for a statement or transaction of a request, once connected
COMMAND_TIMEOUT = 3600  # seconds for what an operator asks for
CONNECT_TIMEOUT = 2  # seconds for each host; libpq takes no less
STATEMENT_TIMEOUT = 4  # seconds, after which the server itself ends a statement
ROW_LOCK_TIMEOUT = 1  # seconds that a statement may wait for a lock
STILL_ARRIVING = 50  # milliseconds between two parts of a response on a slow network, at most
DEFAULTS: dict[str, Any] = {  # what the parameters of a URL override
    "connect_timeout": CONNECT_TIMEOUT,
    "target_session_attrs": "read-write",
    # Firewalls and load balancers forget a connection that was idle for four minutes or longer.
    "keepalives_idle": 60,  # seconds
    "keepalives_interval": 10,  # seconds
}
# Prefixes of SQLSTATEs. A statement that fails with one has changed nothing, but for 40003 and a
# COMMIT on a cluster, which `translate_error` handles first.
OUTAGES = (
    "2200H",  # the IDs of tokens are used up
    "25006",  # the server is a standby
    "25P03",  # a transaction idled, or took, longer than the server lets it
    "25P04",
    "3F000",  # no schema
    "40",  # contention
    "42501",  # a missing privilege
    "42P01",  # no such table
    "42P07",  # a table or view of another program has the name of ours
    "53",  # resources
    "54000",  # no transaction IDs are left
    "55P03",  # a lock
    "57",  # shutdown, or statement_timeout
    "58",  # I/O
    "XX001",  # damage
    "XX002",
)
# Citus's message when a node has lost a session that it needs. Its SQLSTATE, XX000, is also that of
# a bug.
LOST_SESSION = "failure on connection marked as essential"
# The comment on the table of Projects, which marks a database as ours.
MARK = "gardening-project-service, schema version "
# The encoding, the mark, and whether there is any table but those of extensions.
INSPECT = """
SELECT current_setting('server_encoding'),
    coalesce(obj_description(to_regclass('project'), 'pg_class'), ''),
    EXISTS (SELECT FROM pg_class
        WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema())
            AND relkind IN ('r', 'p')
            AND NOT EXISTS (SELECT FROM pg_depend
                WHERE classid = 'pg_class'::regclass AND objid = pg_class.oid AND deptype = 'e'))
"""
# Whatever the server, the database or the role sets:
SETTINGS = f"""
SET statement_timeout = '{STATEMENT_TIMEOUT}s';
SET lock_timeout = '{ROW_LOCK_TIMEOUT}s';
-- Writers of an account wait for each other, instead of failing.
SET default_transaction_isolation = 'read committed';
-- Otherwise psycopg would write a bytea with two backslashes, and COPY would keep both.
SET standard_conforming_strings = on;
-- A commit waits for the disk, and for the synchronous standby.
SELECT set_config('synchronous_commit', 'on', false)
WHERE current_setting('synchronous_commit') IN ('off', 'local');
"""
IS_ON_CLUSTER = "SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus')"


def document_sql() -> str:
    """The SQL of a Project's JSON document: byte for byte what SQLite makes.

    It is concat('{', '"id":', coalesce(to_json(id)::text, 'null'), ',', '"name":', ..., '}').
    """
    parts = []
    for name, field in FIELDS.items():
        value = f"to_json({name})" if field.type == TEXT else name
        parts.append(f"""'"{name}":', coalesce({value}::text, 'null')""")
    separator = ", ',', "
    return f"concat('{{', {separator.join(parts)}, '}}')"


DOCUMENT = document_sql()
ETAG = "(version::text || '-' || updated_at::text)"
PROJECT = f"id, {ETAG}, convert_to({DOCUMENT}, 'UTF8')"
ETAG_IS_ALLOWED = f"""(:if_match::jsonb IS NULL OR :if_match::jsonb ? {ETAG})
    AND (:if_none_match::jsonb IS NULL OR NOT :if_none_match::jsonb ? {ETAG})"""
COUNT_PROJECT = """
    INSERT INTO account AS present (name, last_seq, project_count)
    VALUES (:account, 1, 1)
    ON CONFLICT (name) DO UPDATE SET last_seq = present.last_seq + 1,
        project_count = present.project_count + 1
    WHERE present.project_count < :limit
    RETURNING name, last_seq"""


class ServerTimeout(psycopg.OperationalError):
    """The server did not respond in time."""


class PostgreSQLConnection(psycopg.Connection[tuple[Any, ...]], Connection):
    """A connection that gives up at its deadline, even while a commit waits for a standby."""

    SCHEMA = "postgresql.sql"
    MIGRATIONS = migrations.POSTGRESQL
    GET = get_sql(PROJECT)
    LIST = list_sql(
        f"convert_to(concat('[', string_agg({DOCUMENT}, ',' ORDER BY seq), ']'), 'UTF8')"
    )
    # What adds or deletes Projects locks the account's row first, so that no two can deadlock. An
    # update locks its Project alone.
    CREATE = f"""
        WITH counted AS ({COUNT_PROJECT})
        INSERT INTO project (id, account, seq, key, fingerprint, created_at, updated_at,
            {", ".join(SETTABLE)})
        SELECT :id, name, last_seq, :key, :fingerprint, :now, :now, :{", :".join(SETTABLE)}
        FROM counted
        RETURNING {PROJECT}"""
    UPDATE = f"""
        WITH changed AS (
            UPDATE project
            SET <assignments> version = version + 1,
                updated_at = greatest(updated_at, :now)
            WHERE id = :id AND account = :account AND {ETAG_IS_ALLOWED}
            RETURNING project.*)
        -- Not in RETURNING: there, Citus takes only immutable functions. (Of INSERT ... SELECT, as
        -- in CREATE, it takes any.)
        SELECT {PROJECT} FROM changed"""
    DELETE = f"""
        WITH locked AS (
            -- Only if the condition holds, since a deletion that is refused should lock nothing.
            SELECT name FROM account
            WHERE name = :account AND EXISTS (SELECT FROM project
                WHERE id = :id AND account = :account AND {ETAG_IS_ALLOWED})
            FOR UPDATE),
        deleted AS (
            -- While the statement waited for the lock, the Project may have changed. This tests the
            -- condition on its newest version (READ COMMITTED).
            DELETE FROM project USING locked
            WHERE id = :id AND account = :account AND {ETAG_IS_ALLOWED}
            RETURNING key),
        counted AS (
            UPDATE account SET project_count = project_count - 1
            FROM deleted WHERE name = :account)
        SELECT key FROM deleted"""

    deadline: float  # on the clock of time.monotonic()
    is_on_cluster: bool

    def fetch(self, sql: str, parameters: Parameters) -> Rows:
        cursor = self.execute(to_pyformat(sql), parameters, binary=True)
        return cursor.fetchall() if cursor.description else []

    def begin(self) -> None:
        self.execute("BEGIN")

    def start_deadline(self) -> None:
        self.deadline = time.monotonic() + REQUEST_TIMEOUT

    def is_usable(self) -> bool:
        # Input that nobody asked for nearly always means that the server has closed the connection.
        return not self._has_input(0)

    def extend_timeouts(self) -> None:
        self.deadline = time.monotonic() + COMMAND_TIMEOUT
        for limit in ("lock_timeout", "statement_timeout"):
            self.execute(f"SET LOCAL {limit} = '{COMMAND_TIMEOUT}s'")
        self.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        # This one is new in PostgreSQL 17. A transaction can end it, but not extend it.
        self.execute("""SELECT set_config('transaction_timeout', '0', true)
            WHERE current_setting('transaction_timeout', true) IS NOT NULL""")

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        # Once connected, psycopg waits for the server here, by default without a limit.
        kwargs["timeout"] = max(0.0, self.deadline - time.monotonic())
        try:
            return super().wait(*args, **kwargs)
        except psycopg.OperationalError as error:
            if time.monotonic() < self.deadline:
                raise  # it is no timeout
            # A server whose long list is still arriving over a slow network is not silent, so this
            # must not open the breaker. (One that still computes has normally ended the statement
            # by now, after STATEMENT_TIMEOUT.)
            if self._has_input(STILL_ARRIVING):
                raise psycopg.OperationalError("the response is too long") from error
            raise ServerTimeout("no response before the deadline") from error

    def _has_input(self, milliseconds: int) -> bool:
        """Whether the server has sent something, or does so within this time."""
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(milliseconds))

    def migrate(self, creates: bool) -> int:
        with self.transaction():
            self.execute(f"SELECT pg_advisory_xact_lock({migrations.APPLICATION_ID})")
            [(encoding, mark, has_tables)] = self.execute(INSPECT).fetchall()
            if encoding != "UTF8":
                raise Unavailable(f"the database is in {encoding}, not in UTF8")
            found = version_in(mark, has_tables)
            scripts = self.scripts_for(found, creates)
            if scripts:
                self.require_coordinator()
                self.extend_timeouts()
                # Citus takes the file with the tables as one script, since no table is spread yet.
                for script in [
                    *scripts,
                    f"COMMENT ON TABLE project IS '{MARK}{migrations.SCHEMA_VERSION}'",
                ]:
                    self.execute(script)
        if scripts:
            self.mark_workers()
            self.start_deadline()  # a request's again
        return found

    def lock_account(self, account: str) -> None:
        # Before its first Project, an account has no row.
        self.fetch(
            """INSERT INTO account (name) VALUES (:account)
            ON CONFLICT (name) DO UPDATE SET last_seq = account.last_seq""",
            {"account": account},
        )

    def require_coordinator(self) -> None:
        """On a cluster, raises Unavailable at a worker, where the tables cannot be changed."""

    def mark_workers(self) -> None:
        """On a cluster, let the workers know the schema version, too."""

    def begin_snapshot(self) -> None:
        self.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        self.extend_timeouts()

    def stream(self, sql: str) -> Generator[Any]:
        # Because the cursor has a name, the rows stay on the server and come in parts.
        with self.cursor("stream") as cursor:
            yield from cursor.execute(sql)

    def lock_out_writers(self) -> None:
        # Whoever adds a Project writes its account first.
        self.execute("LOCK TABLE account, token IN SHARE ROW EXCLUSIVE MODE")

    def insert(self, table: str, columns: Iterable[str], rows: Iterable[Any]) -> None:
        copy = f"COPY {table} ({', '.join(columns)}) FROM STDIN"
        with self.cursor().copy(copy) as stream:
            for row in rows:
                stream.write_row(row)

    def advance_token_sequence(self) -> None:
        self.execute("SELECT setval('token_id_seq', max(id)) FROM token")


class ClusterConnection(PostgreSQLConnection):
    """A connection to any node of a Citus cluster.

    Every write is in a transaction, so that only the outcome of its COMMIT can be unknown: see
    docs/design.md.
    """

    ALWAYS_IN_TRANSACTION = True
    CREATE = f"""
        -- With RETURNING, Citus refuses INSERT INTO ... SELECT without the alias. The account's
        -- name comes from its row, so that Citus sees a join by account, which one node can do.
        INSERT INTO project AS made (id, account, seq, key, fingerprint, created_at, updated_at,
            {", ".join(SETTABLE)})
        SELECT :id, name, last_seq, :key, :fingerprint, :now, :now, :{", :".join(SETTABLE)}
        FROM account WHERE name = :account
        RETURNING {PROJECT}"""

    def create(self, parameters: Parameters) -> Rows:
        # Within CREATE, counting would make a two-phase commit on every node.
        return super().create(parameters) if self.fetch(COUNT_PROJECT, parameters) else []

    def mark_workers(self) -> None:
        # Citus copies no comment to the workers. A worker that cannot be reached now gets it from
        # deploy/citus.sql.
        self.execute("""SELECT run_command_on_workers(
            format('COMMENT ON TABLE project IS %L',
                obj_description('project'::regclass, 'pg_class')))""")

    def advance_token_sequence(self) -> None:
        # Node n has the IDs from n << 48 on, as deploy/citus.sql has it. The maximum of its
        # sequence is the first ID of the next node, so BETWEEN seqmin AND seqmax would be wrong.
        self.execute("""SELECT setval('token_id_seq', max(id)) FROM token, pg_sequence
            WHERE seqrelid = 'token_id_seq'::regclass AND id >> 48 = seqmin >> 48""")

    def require_coordinator(self) -> None:
        [(found,)] = self.execute("SELECT citus_is_coordinator()")
        if not found:
            hint = "if it did that already, run citus.sql on it again"
            raise Unavailable(f"connect to the coordinator to change the tables; {hint}")


class PostgreSQL(Engine):
    """A database on a server, or on a cluster of them."""

    ERROR = psycopg.Error
    TIMEOUT_CLOSES_IDLE = True

    def __init__(self, url: str) -> None:
        """Raises ValueError for a malformed URL."""
        super().__init__(NoFile())
        parsed = parse(url)
        self.name = f"postgresql://{addresses(parsed)}/{parsed.get('dbname', '')}"
        self._parameters = DEFAULTS | parsed | {"client_encoding": "UTF8"}
        self._connect_timeout = max(CONNECT_TIMEOUT, int(self._parameters["connect_timeout"] or 0))
        # ClusterConnection, once a first connection has shown that this is a cluster.
        self._connection_class = PostgreSQLConnection

    def open_connection(self) -> PostgreSQLConnection:
        connection = self._open()
        if connection.is_on_cluster and not isinstance(connection, ClusterConnection):
            connection.close()
            self._connection_class = ClusterConnection
            connection = self._open()
        return connection

    def _open(self) -> PostgreSQLConnection:
        """Connect. If a host is silent on the way, the first one is tried last from now on."""
        # Read once, as another thread may reorder the hosts.
        started, parameters = time.monotonic(), self._parameters
        try:
            connection = self._connection_class.connect(
                autocommit=True,  # each statement is a transaction
                **parameters,
            )
        except (psycopg.Error, UnicodeError) as error:  # the latter for the host "a..b"
            kind = ServerTimeout if self._has_met_silence(started) else Unavailable
            raise kind(one_line(error)) from error
        if self._has_met_silence(started):  # of the first host, most likely
            self._parameters = parameters | first_host_last(parameters)
        connection.start_deadline()
        try:
            connection.execute(SETTINGS)
            [(connection.is_on_cluster,)] = connection.execute(IS_ON_CLUSTER)
        except BaseException:
            connection.close()
            raise
        return connection

    def _has_met_silence(self, started: float) -> bool:
        """Whether a host was silent. Only the time tells: the error is that of the last host."""
        return time.monotonic() - started >= self._connect_timeout

    def is_timeout(self, error: BaseException) -> bool:
        return isinstance(error, ServerTimeout)

    def translate_error(self, error: BaseException, may_have_committed: bool) -> Unavailable | None:
        if not isinstance(error, psycopg.Error):
            return None
        # A COMMIT on a cluster may have reached some nodes, whatever the error.
        is_on_cluster = self._connection_class is ClusterConnection
        if may_have_committed and (is_on_cluster or is_lost(error)):
            return OutcomeUnknown(one_line(error))
        is_outage = (error.sqlstate or "").startswith(OUTAGES) or LOST_SESSION in str(error)
        return Unavailable(one_line(error)) if is_outage or is_lost(error) else None


def parse(url: str) -> dict[str, Any]:
    """The parameters in a URL. Raises ValueError for a malformed one, without quoting it.

    psycopg quotes what it takes for the host and the port. If the password holds an "@", "/", "?"
    or "#" that is not percent-encoded, that is a part of the password.
    """
    try:
        if not re.fullmatch("postgresql://([^@/?#]*@)?[^@]*", url):
            raise ValueError
        parameters = conninfo_to_dict(url)
        int(parameters.get("connect_timeout") or 0)
        for port in str(parameters.get("port", 0)).split(","):
            int(port or 0)
    except (psycopg.ProgrammingError, ValueError):
        hint = "write postgresql://…, percent-encode the password, and use only libpq's parameters"
        raise ValueError(f"malformed URL of a database: {hint}") from None
    return parameters


def addresses(parameters: Mapping[str, Any]) -> str:
    """The hosts with those of their ports that the URL names."""
    hosts = str(parameters.get("host", "")).split(",")
    ports = str(parameters.get("port", "")).split(",")
    if len(ports) == 1:
        ports *= len(hosts)
    pairs = zip(hosts, ports, strict=False)  # libpq refuses lists of different lengths
    return ",".join(f"{host}:{port}" if port else host for host, port in pairs)


def first_host_last(parameters: Mapping[str, Any]) -> dict[str, str]:
    """The parameters that name the hosts, so that the first one comes last."""
    rotated = {}
    for name in {"host", "hostaddr", "port"} & parameters.keys():
        first, *others = str(parameters[name]).split(",")  # a single port is for all hosts
        rotated[name] = ",".join([*others, first])
    return rotated


def version_in(mark: str, has_tables: bool) -> int:
    """The schema version of a database, or EMPTY, or FOREIGN."""
    if found := re.fullmatch(f"{MARK}([1-9][0-9]*)", mark):
        return int(found[1])
    return migrations.FOREIGN if has_tables else migrations.EMPTY


@cache
def to_pyformat(sql: str) -> bytes:
    """The statement with parameters as %(name)s in place of :name."""
    return re.sub(r"(?<!:):(\w+)", r"%(\1)s", sql).encode()


def is_lost(error: psycopg.Error) -> bool:
    """Whether the connection was lost, or the outcome is unknown (SQLSTATE 40003)."""
    if not isinstance(error, psycopg.OperationalError):
        return False
    state = error.sqlstate
    return state is None or state.startswith("08") or state == "40003"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
