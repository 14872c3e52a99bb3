"""Runs the Gardening Project Service for tests; when it ends, its data are gone.

Prints {"url": ..., "token": ...} on a line once the service responds. For each line of
input, prints {"token": ...} for the account named there, or for a new one if the line is
empty; {"account": "ann", "expired": true} asks for a token that has expired, and
{"account": "ann", "fail": ["lost", "429"]} for one whose first requests fail so. If
there can be no such token, prints {"error": ...}. Ends with its input, or on SIGTERM or
SIGINT; an input that is no pipe, socket or terminal, like /dev/null, never ends it.
"""

# Three processes: the command, of which the text above is the help, reads and prints
# lines; gunicorn, its child, serves until the command is gone; a keeper, another child,
# outlives both, whatever ends them, and removes the data. None knows HTTP or SQL.

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
SETTINGS = ("FLASK_", "GARDENING_", "GUNICORN_", "PYTHON", "WEB_CONCURRENCY")
OPTIONS = "--workers=1 --threads=8 --log-level=warning --access-logfile=/dev/null"
REQUEST = {"account": "", "expired": False, "fail": []}  # what is not given
ENDINGS = [signal.SIGTERM, signal.SIGINT, signal.SIGCHLD]
START_TIMEOUT = 60  # seconds


def main() -> None:
    sys.path.insert(0, str(HERE))  # the service's modules import one another from there
    parser = argparse.ArgumentParser(
        "gardening-test-service",
        usage=argparse.SUPPRESS,  # so that an error is one line
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--bind", metavar="HOST:PORT", default="127.0.0.1:0")
    bind = parser.parse_args().bind
    for _ in range(3):  # so that no socket takes the number of a stream that is closed
        os.open(os.devnull, os.O_RDWR)
    host, _, port = bind.rpartition(":")
    try:
        listener = socket.create_server((host, int(port)))
    except (OSError, OverflowError, ValueError) as error:
        parser.error(f"cannot listen on {bind} as HOST:PORT: {error}")
    # A write to /dev/shm waits for no disk.
    default = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"
    # Not tempfile.gettempdir(): it probes with a file, which a kill would leave behind.
    place = os.path.abspath(os.environ.get("TMPDIR") or default)
    run(listener, os.path.join(place, f"gardening-{secrets.token_hex(8)}"))


def run(listener: socket.socket, folder: str) -> None:
    """Serve until the input ends or a signal comes, with all data in this new folder."""
    from engines.base import Unavailable
    from engines.sqlite import SQLite
    from store import Store

    for number in ENDINGS:
        signal.signal(number, lambda *_: None)  # macOS drops one that is ignored
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)  # until sigwait takes them
    ended, running = os.pipe()  # all but the keeper hold `running`
    keeper = ["/bin/sh", "-c", 'read _; rm -rf "$0" 2>/dev/null', folder]
    subprocess.Popen(keeper, stdin=ended, start_new_session=True)
    lifeline, held = os.pipe()  # the command alone has `held`

    def end() -> NoReturn:
        """As asked; or because gunicorn, which has said why, or the keeper has ended."""
        number = signal.sigwait(ENDINGS)
        os.close(held)
        os.close(running)
        remove(folder, ended)
        if number == signal.SIGCHLD:
            print("The service has ended.", file=sys.stderr)
        os._exit(number == signal.SIGCHLD)

    mode = os.fstat(0).st_mode  # asked now: once closed, a terminal no longer is one
    has_end = os.isatty(0) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    ending = threading.Thread(target=end, daemon=True)
    unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, ENDINGS)
    try:
        os.mkdir(folder, 0o700)
        database = os.path.join(folder, "gardening.db")
        store = Store(SQLite(database))  # so gunicorn.conf.py need not check it
        application = f"failures:create_app({lifeline})"
        options = [f"--bind=fd://{listener.fileno()}", f"--worker-tmp-dir={folder}"]
        command = [sys.executable, "-m", "gunicorn", application, *options]
        theirs = os.environ.items()
        environment = {k: v for k, v in theirs if not k.startswith(SETTINGS)}
        subprocess.Popen(
            command + OPTIONS.split(),
            cwd=HERE,
            env=environment | {"FLASK_DATABASE": database},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno(), lifeline, running],
            start_new_session=True,
            preexec_fn=unblock,  # noqa: PLW1509  no thread is running
        )
        ending.start()
        serve_tokens(listener, store, folder)
    except (OSError, Unavailable) as error:
        sys.exit(str(error))
    if has_end:
        os.kill(os.getpid(), signal.SIGTERM)
    ending.join()  # the end of /dev/null, or of a file, means nothing


def remove(folder: str, ended: int) -> None:
    """Remove the folder once every process that may write there has ended."""
    os.read(ended, 1)
    shutil.rmtree(folder, ignore_errors=True)


def serve_tokens(listener: socket.socket, store: Any, folder: str) -> None:
    """Print the address and a token, then a token for each line of the input."""
    from auth import issue_token
    from engines.base import Unavailable
    from failures import write_plan

    def respond(line: str) -> dict[str, str]:
        try:
            given = json.loads(line) if line.startswith("{") else {"account": line}
            match [*(REQUEST | given).values()]:
                case str(account), bool(expired), [*plan]:
                    account = account or secrets.token_hex()
                    token, _ = issue_token(store, account, 0 if expired else None)
                    if plan:
                        write_plan(folder, token, plan)
                    return {"token": token}
            raise ValueError(f"expected members such as {json.dumps(REQUEST)}")
        except (OSError, RecursionError, Unavailable, ValueError) as error:
            return {"error": str(error)}

    host, port = listener.getsockname()
    host = host.replace("0.0.0.0", "127.0.0.1")
    with socket.create_connection((host, port), START_TIMEOUT) as connection:
        connection.sendall(b"GET /api/v1/hello-service HTTP/1.0\r\n\r\n")
        connection.recv(1)  # waits for the response
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that goes away ends it
    print(json.dumps({"url": f"http://{host}:{port}"} | respond("")), flush=True)
    with open(0, encoding="utf-8", errors="surrogateescape", closefd=False) as lines:
        for line in lines:
            print(json.dumps(respond(line.rstrip("\n"))), flush=True)


if __name__ == "__main__":
    main()
