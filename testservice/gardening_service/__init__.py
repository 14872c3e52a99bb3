"""The command that an installation provides. Beside it are the fixtures, and the service.

The service is in a folder that no import statement can name: see pyproject.toml.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
INSTALLED = HERE / "program-files"
ROOT = INSTALLED if INSTALLED.exists() else HERE.parent.parent  # of a clone
# To be run in ROOT, where -m finds the module. -E ignores PYTHONPATH, which is for the caller.
COMMAND = [sys.executable, "-E", "-m", "testservice"]


def main() -> None:
    os.chdir(ROOT)
    os.execv(sys.executable, [*COMMAND, *sys.argv[1:]])
