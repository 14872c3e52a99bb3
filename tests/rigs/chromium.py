"""The browser of the tests."""

import shutil

# The headless shell is the same browser without its windows, and takes less time.
PROGRAM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
OPTIONS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--ignore-certificate-errors",
    "--host-resolver-rules=MAP * 127.0.0.1",  # no request leaves the machine
]
