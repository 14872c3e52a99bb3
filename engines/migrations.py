"""The schema version of a database, and what leads from each version to the next.

The text of a migration that was released is frozen: it takes nothing from other modules, and no
later change of a table touches it.
"""

APPLICATION_ID = 0x67617264  # "gard": marks a database as ours
SCHEMA_VERSION = 4  # of the tables in sqlite.sql and postgresql.sql
OLDEST = 3  # the oldest version with a migration: releases 2.0.0 and 2.1.0
# In the place of a schema version:
EMPTY = 0  # the database has no tables
FOREIGN = -1  # it is another program's


def incompatibility(version: int) -> str | None:
    """Why this release cannot use a database, to follow "it was"; None if it can."""
    if version == FOREIGN:
        return "made by another program"
    if version < OLDEST:
        return "made before release 2.0.0; start release 2.1.0 on it first"
    if version > SCHEMA_VERSION:
        return "made by a newer release"
    return None


# By the version that they lead to. SQLite cannot change the constraints of a table, so its
# migration makes new tables and copies the rows. IF EXISTS, because a restore has already dropped
# the backup's triggers: see copy_file in backup.py.
SQLITE = {
    4: """
DROP TRIGGER IF EXISTS project_insert;
DROP TRIGGER IF EXISTS project_update;
DROP TRIGGER IF EXISTS project_delete;
DROP INDEX part_project;
ALTER TABLE project RENAME TO project_3;
ALTER TABLE part RENAME TO part_3;
CREATE TABLE project (
    id TEXT NOT NULL, account TEXT NOT NULL, seq INTEGER NOT NULL, name TEXT,
    created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL,
    version INTEGER NOT NULL DEFAULT 1, postal_code TEXT, location TEXT,
    PRIMARY KEY (account, seq), UNIQUE (account, id)) STRICT, WITHOUT ROWID;
INSERT INTO project (id, account, seq, name, created_at, updated_at, version, postal_code,
        location)
    SELECT id, account, seq, name, created_at, updated_at, version, postal_code, location
    FROM project_3 ORDER BY account, seq;
CREATE TABLE part (
    id TEXT NOT NULL, project TEXT NOT NULL, kind TEXT NOT NULL, account TEXT NOT NULL,
    PRIMARY KEY (account, id), FOREIGN KEY (account, project)
        REFERENCES project (account, id) ON DELETE CASCADE) STRICT;
INSERT INTO part (id, project, kind, account)
    SELECT part_3.id, project, kind, account
    -- LEFT, so that a part without its Project is refused, and not dropped.
    FROM part_3 LEFT JOIN project_3 ON project_3.id = project;
DROP TABLE part_3;
DROP TABLE project_3;
CREATE INDEX part_project ON part (account, project);
ALTER TABLE account RENAME COLUMN revision TO list_revision;
ALTER TABLE account RENAME COLUMN created TO last_seq;
ALTER TABLE account RENAME COLUMN projects TO project_count;
ALTER TABLE idempotency_key RENAME TO idempotency_key_3;
CREATE TABLE idempotency_key (
    account TEXT NOT NULL, key TEXT NOT NULL, fingerprint BLOB NOT NULL,
    project TEXT NOT NULL, created_at INTEGER NOT NULL,
    PRIMARY KEY (account, key)) STRICT, WITHOUT ROWID;
INSERT INTO idempotency_key (account, key, fingerprint, project, created_at)
    SELECT account, key, digest, project, strftime('%s', 'now') * 1000
    FROM idempotency_key_3;
DROP TABLE idempotency_key_3;
CREATE INDEX idempotency_key_created_at ON idempotency_key (account, created_at);
CREATE TRIGGER project_insert AFTER INSERT ON project BEGIN
    INSERT INTO account (name, list_revision, last_seq, project_count)
    VALUES (new.account, hex(randomblob(8)), new.seq, 1)
    ON CONFLICT (name) DO UPDATE SET list_revision = excluded.list_revision,
        last_seq = new.seq, project_count = project_count + 1;
END;
CREATE TRIGGER project_update AFTER UPDATE ON project BEGIN
    UPDATE account SET list_revision = hex(randomblob(8)) WHERE name = new.account;
END;
CREATE TRIGGER project_delete AFTER DELETE ON project BEGIN
    UPDATE account SET list_revision = hex(randomblob(8)), project_count = project_count - 1
    WHERE name = old.account;
END;
""",
}
POSTGRESQL = {
    4: """
DROP FUNCTION IF EXISTS count_projects() CASCADE;  -- and with it its triggers
ALTER TABLE part DROP CONSTRAINT part_project_fkey, DROP CONSTRAINT part_pkey, ADD account text;
UPDATE part SET account = project.account FROM project WHERE project.id = part.project;
ALTER TABLE part ALTER account SET NOT NULL, ADD PRIMARY KEY (account, id);
ALTER TABLE project DROP CONSTRAINT project_id_key, ADD UNIQUE (account, id);
ALTER TABLE part ADD FOREIGN KEY (account, project)
    REFERENCES project (account, id) ON DELETE CASCADE;
DROP INDEX part_project;
CREATE INDEX part_project ON part (account, project);
ALTER TABLE account RENAME revision TO list_revision;
ALTER TABLE account RENAME created TO last_seq;
ALTER TABLE account RENAME projects TO project_count;
ALTER TABLE idempotency_key RENAME digest TO fingerprint;
ALTER TABLE idempotency_key ADD created_at bigint;
UPDATE idempotency_key SET created_at = extract(epoch FROM now())::bigint * 1000;
ALTER TABLE idempotency_key ALTER created_at SET NOT NULL;
CREATE INDEX idempotency_key_created_at ON idempotency_key (account, created_at);
""",
}
