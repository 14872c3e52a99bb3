-- Spreads the tables over the nodes of a Citus cluster, by account: see docs/cluster.md.
-- For psql, at the coordinator, as the role that owns the tables. Run it again after you add a node
-- or restore a backup: then only its last statement has an effect.
\set ON_ERROR_STOP on
\set QUIET on
SET client_min_messages = warning;
SET citus.node_connection_timeout = '30s';  -- that of the service is short
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
    create_distributed_table('spent_key', 'account', colocate_with => 'account'),
    create_distributed_table('part', 'account', colocate_with => 'account'),
    create_reference_table('token') \g /dev/null
ALTER TABLE part ADD FOREIGN KEY (account, project)
    REFERENCES project (account, id) ON DELETE CASCADE;
COMMIT;
\endif
-- Every node must know the schema version, which is a comment, and Citus copies no comments. Each node
-- also has its own range of token IDs, and continues after the highest ID that it has issued, or that
-- a restore has brought.
DO $$
DECLARE
    command text;
    failed text;
BEGIN
    FOREACH command IN ARRAY ARRAY[
        format('COMMENT ON TABLE project IS %L', obj_description('project'::regclass, 'pg_class')),
        format($command$
            SELECT setval('token_id_seq', max(id)) FROM pg_sequence,
                unnest(%L::bigint[] || pg_sequence_last_value('token_id_seq')) AS id
            WHERE seqrelid = 'token_id_seq'::regclass AND id >> 48 = seqmin >> 48
            $command$, ARRAY(SELECT max(id) FROM token GROUP BY id >> 48))
    ] LOOP
        SELECT string_agg(format('%s:%s: %s', nodename, nodeport, result), E'\n') INTO failed
        FROM run_command_on_all_nodes(command) JOIN pg_dist_node USING (nodeid)
        WHERE NOT success;
        IF failed IS NOT NULL THEN
            RAISE E'Run this again when all nodes are up. It failed at\n%', failed;
        END IF;
    END LOOP;
END $$;
