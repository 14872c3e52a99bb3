"""The service for other teams' tests: `run` starts it in Python, the command anywhere else.

What talks to it is in client.py, and what pytest needs in fixtures.py. The service itself is in a
folder that no import statement can name: see pyproject.toml.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from .client import Service

HERE = Path(__file__).resolve().parent
INSTALLED = HERE / "program-files"
ROOT = INSTALLED if INSTALLED.exists() else HERE.parent.parent  # of a clone
# To be run in ROOT, where -m finds the module. -E ignores PYTHONPATH, which is for the caller.
COMMAND = [sys.executable, "-E", "-m", "testservice"]


def run() -> AbstractContextManager[Service]:
    """Run the service while a `with` lasts, which gets a client.Service."""
    from . import client  # here, since it would delay the start of the command

    return client.run_service()


def main() -> None:
    os.chdir(ROOT)
    os.execv(sys.executable, [*COMMAND, *sys.argv[1:]])
