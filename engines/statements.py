"""The statements that are the same in every engine.

`:name` is a parameter, and `%` is not allowed: see engines.postgres.as_psycopg.
"""
# Tested in tests/test_store.py.

from engines.tables import COUNT_CREATED, COUNT_PROJECTS

# After a restore. The first one gives a row to each account that lacks one; its WHERE tells
# SQLite that ON belongs to no join.
RECOUNT = (
    """INSERT INTO account (name, revision)
    SELECT DISTINCT account, '' FROM project WHERE true
    ON CONFLICT (name) DO NOTHING""",
    COUNT_CREATED,
    COUNT_PROJECTS,
    "UPDATE account SET revision = :revision",
)

CHECK = "SELECT id FROM token LIMIT 1"
REVISION = "SELECT revision FROM account WHERE name = :account"
# Claims the key for a new Project, unless it is taken; returns which Project has it. The update
# changes nothing, but makes the statement return the row and lock it until the transaction
# ends.
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
ACCOUNT_NAMES = "(SELECT name FROM account UNION SELECT account FROM token) AS names"
FIND_ACCOUNT = f"SELECT name FROM {ACCOUNT_NAMES} WHERE name = :name"
ACCOUNTS = f"""SELECT names.name, coalesce(projects, 0), coalesce(tokens, 0), changed_at
    FROM {ACCOUNT_NAMES}
    LEFT JOIN account ON account.name = names.name
    LEFT JOIN (SELECT account, max(updated_at) AS changed_at
        FROM project GROUP BY account) AS p ON p.account = names.name
    LEFT JOIN (SELECT account, count(*) AS tokens
        FROM token GROUP BY account) AS t ON t.account = names.name
    ORDER BY names.name"""
# In this order, so that no two writers can deadlock: see engines/postgres.py.
DELETE_ACCOUNT = (
    "DELETE FROM account WHERE name = :name",
    "DELETE FROM project WHERE account = :name",
    "DELETE FROM token WHERE account = :name",
    "DELETE FROM idempotency_key WHERE account = :name",
)
