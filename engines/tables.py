"""The fields of a Project, and the tables that keep them.

Every key and every constraint includes the account, so that a cluster of PostgreSQL servers
can keep each account on one of them. The tables are written with SQLite's types.
"""
# Tested in tests/test_layouts.py.

TEXT, INTEGER, JSON = "text", "integer", "JSON"
# The fields of a Project, in the order of its document. To the database, JSON is text.
FIELDS = {
    "id": TEXT,
    "name": TEXT,
    "created_at": INTEGER,
    "updated_at": INTEGER,
    "version": INTEGER,
    "postal_code": TEXT,
    "location": JSON,
}
READ_ONLY = ("id", "created_at", "updated_at", "version")  # as OutputOnly in schemas.py
SETTABLE = {name: kind for name, kind in FIELDS.items() if name not in READ_ONLY}
# The columns of each table, in the order in which a restore fills them: `project` precedes
# `part`, which refers to it.
COLUMNS = {
    "token": ("id", "account", "digest", "created_at", "expires_at"),
    "project": (*FIELDS, "account", "seq"),
    # The specification has no paths for it yet.
    "part": ("id", "project", "kind", "account"),
    "idempotency_key": ("account", "key", "digest", "project"),
    # Last, since SQLite's triggers write it while `project` is filled.
    "account": ("name", "revision", "created", "projects"),
}
APPLICATION_ID = 0x67617264  # "gard": the database is ours
LAYOUT = 4  # of the tables
# Released migrations use KEY_TABLE and COUNT_*: see engines/sqlite.py before you change one.
KEY_TABLE = """
CREATE TABLE idempotency_key (                      -- stays when its Project is deleted
    account     TEXT    NOT NULL,
    key         TEXT    NOT NULL,
    digest      BLOB    NOT NULL,                   -- SHA-256 of the fields
    project     TEXT    NOT NULL,
    PRIMARY KEY (account, key)
) STRICT, WITHOUT ROWID;
"""
COMMON_TABLES = f"""
-- Every change of a Project writes its account: by triggers on SQLite, and on PostgreSQL by
-- the statements of the change. A restore and the first migrations count Projects anew.
CREATE TABLE account (
    name        TEXT    PRIMARY KEY,
    -- Validates the account's lists. It is random, since a counter would return to
    -- earlier values when a backup is restored.
    revision    TEXT    NOT NULL,
    created     INTEGER NOT NULL DEFAULT 0,         -- Projects ever: the last one's seq
    projects    INTEGER NOT NULL DEFAULT 0          -- Projects now
) STRICT;
CREATE TABLE token (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,  -- IDs are not given again
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
# The account's counters. `created` never falls, since the last Projects may have been deleted.
COUNT_CREATED = """UPDATE account SET created =
    (SELECT max(seq) FROM project WHERE project.account = account.name)
    WHERE created < (SELECT max(seq) FROM project WHERE project.account = account.name)"""
COUNT_PROJECTS = """UPDATE account SET projects =
    (SELECT count(*) FROM project WHERE project.account = account.name)"""
