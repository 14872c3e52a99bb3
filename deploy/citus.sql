-- Spreads the tables over the nodes of a Citus cluster, by account: see docs/postgresql.md.
-- For psql, once, at the coordinator, as the role that owns the tables.
\set ON_ERROR_STOP on
\set QUIET on
BEGIN;
SET LOCAL client_min_messages = warning;
DO $$ BEGIN
    IF to_regclass('project') IS NULL THEN
        RAISE 'There are no tables here: run "gardening init-db" first.';
    ELSIF to_regclass('pg_dist_partition') IS NULL THEN
        RAISE 'This database is not on a cluster: run CREATE EXTENSION citus on each node.';
    ELSIF EXISTS (SELECT FROM pg_dist_partition WHERE logicalrelid = 'project'::regclass) THEN
        RAISE 'The tables are spread already.';
    END IF;
END $$;
-- For processes of an older release, which cannot use a cluster.
DROP TRIGGER IF EXISTS project_insert ON project;
DROP TRIGGER IF EXISTS project_delete ON project;
DROP FUNCTION IF EXISTS count_projects();
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
-- The layout's mark: Citus hands no comment on, and a service may ask any node.
SELECT run_command_on_workers(format('COMMENT ON TABLE project IS %L',
    obj_description('project'::regclass, 'pg_class')))::text AS "Marked on";
