"""The tests themselves: what of the machine they do not look at."""

import os
import sqlite3
import sys
from contextlib import closing

from rigs import SETTINGS
from rigs.layouts import lay_out
from rigs.outside import HOSTILE
from rigs.running import LIMIT, needs, run

STARTS = [  # what reads the settings
    "tests/test_app.py::test_config_goes_before_the_environment",
    "tests/test_gunicorn.py::test_settings_are_those_for_production",
    "tests/test_processes.py::test_newcomer_is_told_the_next_step",
    "tests/test_readme.py::test_first_calls_and_tokens_print_what_the_readme_says",
]


@needs("curl")  # the README's first calls
def test_settings_of_a_developer_do_not_meet_the_tests(tmp_path):
    assert not [name for name in os.environ if name.startswith(SETTINGS)]
    theirs = tmp_path / "theirs.db"
    with closing(sqlite3.connect(theirs)) as raw:
        lay_out(raw, 1)
    before = theirs.read_bytes()
    environment = os.environ | HOSTILE | {"FLASK_DATABASE": str(theirs)}
    command = [sys.executable, "-m", "pytest", *STARTS]
    ended = run(*command, environment=environment, limit=2 * LIMIT)
    assert " 4 passed" in ended.stdout
    assert theirs.read_bytes() == before
