-- The tables on SQLite. postgresql.sql has the same ones: change both, and see migrations.py. Every
-- key includes the account, as Citus requires, except those of `token`: each node has all tokens.
-- All times are in epoch milliseconds.

CREATE TABLE account (                              -- made at the latest with its first Project
    name          TEXT    PRIMARY KEY,
    last_seq      INTEGER NOT NULL DEFAULT 0,       -- the highest project.seq that it ever had
    project_count INTEGER NOT NULL DEFAULT 0        -- its Projects now
) STRICT;

CREATE TABLE token (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,  -- so that no id is used twice,
                                                    -- unless a backup is restored
    account       TEXT    NOT NULL,
    digest        BLOB    NOT NULL UNIQUE,          -- SHA-256 of the token
    created_at    INTEGER NOT NULL,
    expires_at    INTEGER,                          -- NULL: never
    note          TEXT                              -- for whoever revokes it
) STRICT;

CREATE TABLE project (
    id            TEXT    NOT NULL,
    account       TEXT    NOT NULL,
    seq           INTEGER NOT NULL,                 -- the account's order of creation
    name          TEXT,
    created_at    INTEGER NOT NULL,
    updated_at    INTEGER NOT NULL,
    version       INTEGER NOT NULL DEFAULT 1,
    postal_code   TEXT,
    location      TEXT                              -- JSON, as it is returned: SQLite
                                                    -- prints a REAL with 15 digits
        CHECK (location IS NULL OR json_valid(location)),  -- before 3.45, json_valid(NULL) is 0
    key           TEXT,                             -- the Idempotency-Key that came with it
    fingerprint   BLOB,                             -- SHA-256 of the fields that came with a key
    PRIMARY KEY (account, seq),
    UNIQUE (account, id),
    UNIQUE (account, key)
) STRICT, WITHOUT ROWID;  -- kept in the order of its key, so a list is one range of it
-- Without this index, a page that is asked for by its number would read every Project before it. (On
-- PostgreSQL, the primary key is such an index.)
CREATE INDEX project_seq ON project (account, seq);

CREATE TABLE spent_key (                            -- the keys of deleted Projects, so that no
    account       TEXT    NOT NULL,                 -- late request creates one of them again
    key           TEXT    NOT NULL,
    seq           INTEGER NOT NULL,                 -- the account's last_seq at the deletion
    PRIMARY KEY (account, key)
) STRICT, WITHOUT ROWID;
-- Without this index, a deletion would scan the account's keys for those to forget.
CREATE INDEX spent_key_seq ON spent_key (account, seq);

CREATE TABLE part (                                 -- a region, zone, parcel or controller:
    id            TEXT    NOT NULL,                 -- the API has no calls for them yet
    project       TEXT    NOT NULL,
    kind          TEXT    NOT NULL,
    account       TEXT    NOT NULL,
    PRIMARY KEY (account, id),
    FOREIGN KEY (account, project) REFERENCES project (account, id) ON DELETE CASCADE
) STRICT;
-- Without this index, deleting a Project would scan all parts of the account.
CREATE INDEX part_project ON part (account, project);

-- These count in the transaction of the change: in SQLite, one statement cannot change two tables.
CREATE TRIGGER project_insert AFTER INSERT ON project BEGIN
    INSERT INTO account (name, last_seq, project_count) VALUES (new.account, new.seq, 1)
    ON CONFLICT (name) DO UPDATE
        SET last_seq = max(last_seq, new.seq), project_count = project_count + 1;
END;
CREATE TRIGGER project_delete AFTER DELETE ON project BEGIN
    UPDATE account SET project_count = project_count - 1 WHERE name = old.account;
END;
