"""A made-up later release, whose schema has one more table, with an index.

Its migrations show what CONTRIBUTING.md says of a new table.
"""

from engines.migrations import SCHEMA_VERSION
from helpers.testservice import copy_service

TABLE = """CREATE TABLE plot (
    id text {0} NOT NULL, account text {0} NOT NULL, project text {0} NOT NULL,
    PRIMARY KEY (account, id)"""
REFERENCE = "FOREIGN KEY (account, project) REFERENCES project (account, id) ON DELETE CASCADE"
INDEX = "CREATE INDEX plot_project ON plot (account, project)"
SQLITE = [
    f"{TABLE.format('')}, {REFERENCE}) STRICT",
    INDEX,
    "UPDATE account SET last_seq = last_seq",  # so that a trigger of a backup would run
]
POSTGRESQL = [
    f"""{TABLE.format('COLLATE "C"')})""",
    # Citus wants the table to be distributed before it gets the foreign key.
    """DO $$ BEGIN
        IF to_regclass('pg_dist_partition') IS NOT NULL THEN
            PERFORM create_distributed_table('plot', 'account', colocate_with => 'account')
            FROM pg_dist_partition WHERE logicalrelid = 'account'::regclass;
        END IF;
    END $$""",
    f"ALTER TABLE plot ADD {REFERENCE}",
    INDEX,
]
# What goes on for longer than any test, within the migration.
SLOW_ON_SQLITE = """WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
    SELECT count(*) FROM n"""
SLOW_ON_POSTGRESQL = "SELECT pg_sleep(1000)"


def copy_later_release(folder, *, is_slow=False):
    """A copy of the service in this new folder, with the next schema version."""
    folder.mkdir()
    copy_service(folder)
    later = SCHEMA_VERSION + 1
    on_sqlite = SQLITE + [SLOW_ON_SQLITE] * is_slow
    on_postgresql = POSTGRESQL + [SLOW_ON_POSTGRESQL] * is_slow
    with open(folder / "engines/migrations.py", "a") as file:
        file.write(f"SCHEMA_VERSION = {later}\n")
        file.write(f"SQLITE = {{**SQLITE, {later}: {on_sqlite!r}}}\n")
        file.write(f"POSTGRESQL = {{**POSTGRESQL, {later}: {on_postgresql!r}}}\n")
    for name, statements in {"sqlite.sql": SQLITE, "postgresql.sql": POSTGRESQL}.items():
        with open(folder / "engines" / name, "a") as file:
            file.writelines(f"{statement};\n" for statement in statements)
    return folder
