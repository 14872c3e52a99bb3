-- Spreads the tables over the nodes of a Citus cluster, by account: see docs/cluster.md.
-- For psql, at the coordinator, as the role that owns the tables. Run it again after you add a node
-- or restore a backup: then only its last two statements have an effect.
\set ON_ERROR_STOP on
\set QUIET on
SET client_min_messages = warning;
DO $$ BEGIN
    IF to_regclass('project') IS NULL THEN
        RAISE 'There are no tables here: run "gardening init-db" first.';
    ELSIF to_regclass('pg_dist_partition') IS NULL THEN
        RAISE 'This database is not on a cluster: run CREATE EXTENSION citus on each node.';
    END IF;
END $$;
SELECT NOT EXISTS (SELECT FROM pg_dist_partition WHERE logicalrelid = 'project'::regclass)
    AS is_first \gset
\if :is_first
BEGIN;
-- Citus wants both tables to be distributed first.
ALTER TABLE part DROP CONSTRAINT part_account_project_fkey;
SELECT create_distributed_table('account', 'name'),
    create_distributed_table('project', 'account', colocate_with => 'account'),
    create_distributed_table('part', 'account', colocate_with => 'account'),
    create_distributed_table('idempotency_key', 'account', colocate_with => 'account'),
    create_reference_table('token') \g /dev/null
ALTER TABLE part ADD FOREIGN KEY (account, project)
    REFERENCES project (account, id) ON DELETE CASCADE;
COMMIT;
\endif
-- The service may ask any node for the schema version, which is a comment. Citus copies none.
SELECT run_command_on_workers(format('COMMENT ON TABLE project IS %L',
    obj_description('project'::regclass, 'pg_class')))::text AS "Schema version";
-- Each node gives tokens IDs of a range of its own, and goes on after the last one that is there.
SELECT run_command_on_all_nodes($$
    SELECT setval('token_id_seq', coalesce(max(id), seqmin), max(id) IS NOT NULL)
    FROM pg_sequence LEFT JOIN token ON id >= seqmin AND id < seqmin + (1::bigint << 48)
    WHERE seqrelid = 'token_id_seq'::regclass GROUP BY seqmin$$)::text AS "Token IDs";
