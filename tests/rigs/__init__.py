"""What the tests put around the service: its processes, other programs, machines."""

import os

import pytest

# Settings of a developer must not meet the tests, nor the tests a developer's database.
# Here, since modules of tests copy the environment as they are imported.
SETTINGS = (
    *("FLASK_", "GARDENING_", "GUNICORN_", "WEB_CONCURRENCY", "PG", "PYTHON"),
    *("PYTEST_ADDOPTS", "PY_COLORS", "FORCE_COLOR"),
)
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
for name in list(os.environ):
    if name.lower() == "https_proxy":  # nothing else that the tests call is far away
        os.environ["PIP_PROXY"] = os.environ[name]
    if name.startswith(SETTINGS) or name.lower() in PROXIES:
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
