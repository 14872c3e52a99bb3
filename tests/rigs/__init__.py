"""What the tests put around the service: its processes, other programs, machines."""

import os

import pytest

# Settings of a developer must not meet the tests, nor the tests a developer's database.
# Here, since modules of tests copy the environment as they are imported.
SETTINGS = ("FLASK_", "GARDENING_", "GUNICORN_", "WEB_CONCURRENCY", "PG", "PYTHON")
for name in [name for name in os.environ if name.startswith(SETTINGS)]:
    del os.environ[name]

# Before they are imported: what fails in them is told as in a test.
pytest.register_assert_rewrite(
    "rigs.conformance",
    "rigs.history",
    "rigs.machine",
    "rigs.nginx",
    "rigs.pgserver",
    "rigs.proxies",
    "rigs.running",
    "rigs.stores",
)
