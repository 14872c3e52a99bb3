"""The members of a Project, the tables that keep them, and the SQL that engines share.

Every key and every constraint holds the account, so that a cluster of PostgreSQL servers
can keep each account on one of them. The tables are written with SQLite's types. In a statement, `:name` is a parameter, and `%`
is not allowed: see engines.postgres.as_psycopg.
"""
# Tested in tests/test_layouts.py.

TEXT, INTEGER, JSON = "text", "integer", "JSON"
# The members of a Project, in the order of its document. To the database, JSON is text.
MEMBERS = {
    "id": TEXT,
    "name": TEXT,
    "created_at": INTEGER,
    "updated_at": INTEGER,
    "version": INTEGER,
    "postal_code": TEXT,
    "location": JSON,
}
READ_ONLY = ("id", "created_at", "updated_at", "version")  # set by the service
SETTABLE = {name: kind for name, kind in MEMBERS.items() if name not in READ_ONLY}
# The columns of each table; `project` precedes `part`, which refers to it.
COLUMNS = {
    "account": ("name", "revision", "created", "projects"),
    "token": ("id", "account", "digest", "created_at", "expires_at"),
    "project": (*MEMBERS, "account", "seq"),
    # The specification has no paths for it yet.
    "part": ("id", "project", "kind", "account"),
    "idempotency_key": ("account", "key", "digest", "project"),
}
APPLICATION_ID = 0x67617264  # "gard": the database is ours
LAYOUT = 4  # of the tables
KEY_TABLE = """
CREATE TABLE idempotency_key (                      -- outlives its Project: it is spent
    account     TEXT    NOT NULL,
    key         TEXT    NOT NULL,
    digest      BLOB    NOT NULL,                   -- SHA-256 of the members
    project     TEXT    NOT NULL,
    PRIMARY KEY (account, key)
) STRICT, WITHOUT ROWID;
"""
COMMON_TABLES = f"""
CREATE TABLE account (
    name        TEXT    PRIMARY KEY,
    -- Validates the account's lists. It is random, since a counter would return to
    -- earlier values when a backup is restored.
    revision    TEXT    NOT NULL,
    created     INTEGER NOT NULL DEFAULT 0,         -- Projects ever: the last one's seq
    projects    INTEGER NOT NULL DEFAULT 0          -- Projects now
) STRICT;
CREATE TABLE token (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,  -- a late revoke hits no newer token
    account     TEXT    NOT NULL,
    digest      BLOB    NOT NULL UNIQUE,            -- SHA-256
    created_at  INTEGER NOT NULL,                   -- all times in epoch milliseconds
    expires_at  INTEGER                             -- NULL: never
) STRICT;
CREATE TABLE project (
    id          TEXT    NOT NULL,
    account     TEXT    NOT NULL,
    seq         INTEGER NOT NULL,                   -- the account's order of creation
    name        TEXT,
    created_at  INTEGER NOT NULL,
    updated_at  INTEGER NOT NULL,
    version     INTEGER NOT NULL DEFAULT 1,
    postal_code TEXT,
    location    TEXT,                               -- JSON: a REAL shows 15 digits only
    PRIMARY KEY (account, seq),
    UNIQUE (account, id)
) STRICT, WITHOUT ROWID;  -- kept in the order of its key, so a list is one range of it
{KEY_TABLE}
CREATE TABLE part (                                 -- a region, zone, parcel, controller
    id          TEXT    NOT NULL,
    project     TEXT    NOT NULL,
    kind        TEXT    NOT NULL,
    account     TEXT    NOT NULL,
    PRIMARY KEY (account, id),
    FOREIGN KEY (account, project) REFERENCES project (account, id) ON DELETE CASCADE
) STRICT;
-- Without this index, deleting a Project would scan the account's parts.
CREATE INDEX part_project ON part (account, project);
"""
# The account's counters. `created` is only raised: its last Projects may be gone.
COUNT_CREATED = """UPDATE account SET created =
    (SELECT max(seq) FROM project WHERE project.account = account.name)
    WHERE created < (SELECT max(seq) FROM project WHERE project.account = account.name)"""
COUNT_PROJECTS = """UPDATE account SET projects =
    (SELECT count(*) FROM project WHERE project.account = account.name)"""
# After a restore. An account whose row is missing gets one. Without WHERE, SQLite would
# take ON for that of a join.
RECOUNT = (
    """INSERT INTO account (name, revision)
    SELECT DISTINCT account, '' FROM project WHERE true
    ON CONFLICT (name) DO NOTHING""",
    COUNT_CREATED,
    COUNT_PROJECTS,
    "UPDATE account SET revision = :revision",
)

REVISION = "SELECT revision FROM account WHERE name = :account"
# Returns the first claim of the key. The update changes nothing: it makes the statement
# return that row, and lock it until the transaction ends.
CLAIM_KEY = """INSERT INTO idempotency_key (account, key, digest, project)
    VALUES (:account, :key, :digest, :project)
    ON CONFLICT (account, key) DO UPDATE SET digest = idempotency_key.digest
    RETURNING project, digest"""
ADD_TOKEN = """INSERT INTO token (account, digest, created_at, expires_at)
    VALUES (:account, :digest, :now, :expires_at)
    RETURNING id"""
FIND_TOKEN = """SELECT account, id FROM token
    WHERE digest = :digest AND (expires_at IS NULL OR expires_at > :now)"""
TOKENS = "SELECT id, created_at, expires_at, account FROM token ORDER BY id"
REVOKE_TOKEN = "DELETE FROM token WHERE id = :id RETURNING id"
REVOKE_TOKENS = "DELETE FROM token WHERE account = :account RETURNING id"
KNOWN = "(SELECT name FROM account UNION SELECT account FROM token) AS known"
FIND_ACCOUNT = f"SELECT name FROM {KNOWN} WHERE name = :name"
ACCOUNTS = f"""SELECT known.name, coalesce(projects, 0), coalesce(tokens, 0), changed_at
    FROM {KNOWN}
    LEFT JOIN account ON account.name = known.name
    LEFT JOIN (SELECT account, max(updated_at) AS changed_at
        FROM project GROUP BY account) AS p ON p.account = known.name
    LEFT JOIN (SELECT account, count(*) AS tokens
        FROM token GROUP BY account) AS t ON t.account = known.name
    ORDER BY known.name"""
# The account comes first: its row is where its writers wait for each other.
DELETE_ACCOUNT = (
    "DELETE FROM account WHERE name = :name",
    "DELETE FROM project WHERE account = :name",
    "DELETE FROM token WHERE account = :name",
    "DELETE FROM idempotency_key WHERE account = :name",
)
