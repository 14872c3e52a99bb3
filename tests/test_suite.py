"""The tests themselves: what of the machine they do not look at."""

import os
import sqlite3
import sys
from contextlib import closing

from rigs import SETTINGS
from rigs.layouts import lay_out
from rigs.running import LIMIT, run

HOSTILE = {
    "FLASK_DEBUG": "1",
    "FLASK_RUN_PORT": "nonsense",
    "GARDENING_BIND": "nonsense",
    "GUNICORN_CMD_ARGS": "--bind=nonsense",
    "WEB_CONCURRENCY": "nonsense",
    "PGHOST": "nonsense",
    "PYTHONPATH": "/nonsense",
}
STARTS = [
    "newcomer_is_told",
    "first_calls",
    "settings_are_those",
    "goes_before_the_env",
]


def test_settings_of_a_developer_do_not_meet_the_tests(tmp_path):
    assert not [name for name in os.environ if name.startswith(SETTINGS)]
    theirs = tmp_path / "theirs.db"
    with closing(sqlite3.connect(theirs)) as raw:
        lay_out(raw, 1)
    before = theirs.read_bytes()
    files = [
        f"tests/test_{name}.py" for name in ("processes", "readme", "gunicorn", "app")
    ]
    ended = run(
        *[sys.executable, "-m", "pytest", *files, "-k", " or ".join(STARTS)],
        environment=os.environ | HOSTILE | {"FLASK_DATABASE": str(theirs)},
        limit=2 * LIMIT,
    )
    assert " 4 passed" in ended.stdout
    assert theirs.read_bytes() == before
