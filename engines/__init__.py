"""The databases that can keep the Projects: one SQLite file, or a PostgreSQL server."""
