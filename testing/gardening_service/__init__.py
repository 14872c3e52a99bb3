"""The command of an installation; beside it are fixtures for pytest, and the service.

No import statement can name the folder of the service: see pyproject.toml.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
INSTALLED = HERE / "program-files"
ROOT = INSTALLED if INSTALLED.exists() else HERE.parent.parent  # of a clone
# In ROOT, where -m finds it. -E: a PYTHONPATH is for the modules of the caller.
COMMAND = [sys.executable, "-E", "-m", "testing.service"]


def main() -> None:
    os.chdir(ROOT)
    os.execv(sys.executable, [*COMMAND, *sys.argv[1:]])
