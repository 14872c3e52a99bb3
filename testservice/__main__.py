"""Runs the Gardening Project Service for tests, with its data in memory.

Prints {"url": ..., "token": ...} on one line once the service responds; the token is for a new
account. POST /test/tokens issues more, for example with the body {"account": "ann", "expired":
false, "fail": ["lost", "429"]}; every field is optional. GET /test/tokens/TOKEN shows what is left
of its plan and the requests that came with it, PUT with {"fail": [...]} replaces the plan, and
DELETE revokes the token.

Ends on SIGTERM or SIGINT, or when the pipe at its standard input closes, which must be open at the
start. Nothing else at its standard input ends it.
"""

import argparse
import os
import socket
import sys
from urllib.parse import urlsplit

HELP = (
    "install the service with its dependencies, or set GARDENING_TEST_SERVICE "
    "to the command of an environment that has them"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        "gardening-test-service",
        usage=argparse.SUPPRESS,  # so that an error is one line
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--bind", metavar="HOST:PORT", default="127.0.0.1:0")
    bind = parser.parse_args().bind
    try:
        listener = listen(bind)
    except (OSError, ValueError) as error:
        parser.error(f"cannot listen on {bind} (HOST:PORT or [HOST]:PORT): {error}")
    # The environment is for the program under test, except for where temporary files go.
    for name in os.environ.keys() - {"TMPDIR"}:
        del os.environ[name]
    # Not before: gunicorn and Flask read the environment as they are imported.
    try:
        from testservice.server import Server
    except ModuleNotFoundError as error:
        sys.exit(f"{error}: {HELP}")
    Server(listener).init_process()


def listen(bind: str) -> socket.socket:
    """Raises OSError, ValueError."""
    address = urlsplit(f"//{bind}")
    host, port = address.hostname or "", address.port
    if port is None:
        raise ValueError("the port is missing")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    # As gunicorn does: else the end of a response may wait 40 ms for the client's kernel.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


if __name__ == "__main__":
    main()
