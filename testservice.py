"""Runs the Gardening Project Service for tests; when it ends, its data are gone.

Prints {"url": ..., "token": ...} on a line once the service responds. For each line of
input, prints {"token": ...} for the account named there, or for a new one if the line is
empty; {"account": "ann", "expired": true} asks for a token that has expired, and
{"account": "ann", "fail": ["lost", "429"]} for one whose first requests fail so. If
there can be no such token, prints {"error": ...}. Ends with its input, or on SIGTERM or
SIGINT; an input that is no pipe, socket or terminal, like /dev/null, never ends it.
"""

# Three processes: the command, of which the text above is the help, reads and prints
# lines; gunicorn, its child, serves; a keeper, another child, outlives the command,
# whatever ends that, and clears up. None knows anything of HTTP or SQL.

import argparse
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
SETTINGS = ("FLASK_", "GARDENING_", "GUNICORN_", "PYTHON", "WEB_CONCURRENCY")
GUNICORN = """gunicorn failures:create_app() --workers=1 --threads=8
    --log-level=warning --access-logfile=/dev/null"""
REQUEST = {"account": "", "expired": False, "fail": []}  # what is not given
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGCHLD]
PR_SET_PDEATHSIG = 1  # linux/prctl.h
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
    except OSError as error:
        parser.error(f"{bind}: {error.strerror}")
    except (OverflowError, ValueError):
        parser.error(f"{bind} is not HOST:PORT")
    memory = "/dev/shm"  # where no write waits for a disk
    default = memory if os.access(memory, os.W_OK) else "/tmp"
    # Not tempfile.gettempdir(): it probes with a file, which a kill would leave behind.
    place = os.path.abspath(os.environ.get("TMPDIR") or default)
    run(listener, os.path.join(place, f"gardening-{secrets.token_hex(8)}"))


def run(listener: socket.socket, folder: str) -> None:
    """Serve until the input ends or a signal comes, with all data in this new folder."""
    from store import SQLite, Store, Unavailable

    # Until the keeper is there and gunicorn's process is known, for whoever clears up.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    ended, lifeline = os.pipe()
    stopped, running = os.pipe()
    if not (keeper := os.fork()):
        os.close(lifeline)
        os.close(running)
        keep(folder, ended, stopped)

    libc = ctypes.CDLL(None)

    def announce() -> None:
        """In gunicorn's process, before it is gunicorn."""
        os.write(lifeline, b"%d" % os.getpid())
        with suppress(AttributeError):  # Linux has it, for who kills the keeper as well
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    gunicorn = 0
    try:
        os.mkdir(folder, 0o700)
        database = os.path.join(folder, "gardening.db")
        store = Store(SQLite(database))  # so gunicorn.conf.py need not check it
        # As gunicorn does for a socket of its own.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        options = [f"--bind=fd://{listener.fileno()}", f"--worker-tmp-dir={folder}"]
        theirs = os.environ.items()
        environment = {k: v for k, v in theirs if not k.startswith(SETTINGS)}
        gunicorn = subprocess.Popen(
            [sys.executable, "-m", *GUNICORN.split(), *options],
            cwd=HERE,
            env=environment | {"FLASK_DATABASE": database},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno(), running],
            start_new_session=True,
            preexec_fn=announce,  # noqa: PLW1509  no thread is running
        ).pid
        for number in SIGNALS:
            signal.signal(number, end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        # Python would leave a signal that comes just before a read until after the read.
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 1, 1)
        serve_tokens(listener, store, folder)
    except (OSError, Unavailable) as error:
        sys.exit(str(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(lifeline)
        os.close(running)
        if os.waitpid(keeper, 0)[1]:  # somebody has killed it
            clear_up(folder, gunicorn, stopped)


def end(number: int, _: object) -> NoReturn:
    """End as asked; or because gunicorn, which has said why, or the keeper has ended."""
    sys.exit("The service has ended." if number == signal.SIGCHLD else 0)


def keep(folder: str, ended: int, stopped: int) -> NoReturn:
    """Clear up once nobody holds the lifeline, on which gunicorn sends its process id."""
    try:
        os.setsid()  # Ctrl-C is for the command alone
        with open(ended) as lifeline:
            gunicorn = lifeline.read()
        clear_up(folder, int(gunicorn or 0), stopped)
        os._exit(0)
    finally:
        os._exit(1)


def clear_up(folder: str, gunicorn: int, stopped: int) -> None:
    if gunicorn:
        with suppress(OSError):  # it has ended
            os.killpg(gunicorn, signal.SIGKILL)
    os.read(stopped, 1)  # until the workers, too, have stopped writing
    shutil.rmtree(folder, ignore_errors=True)


def serve_tokens(listener: socket.socket, store: Any, folder: str) -> None:
    """Print the address and a token, then a token for each line of the input."""
    from auth import issue_token
    from failures import write_plan
    from store import Unavailable

    def respond(line: str) -> dict[str, str]:
        try:
            given: dict[str, Any] = {"account": line}
            if line.startswith("{"):
                given = {"account": None}  # which nobody has, if this is no JSON
                with suppress(ValueError, RecursionError):
                    given = json.loads(line)
            match [*(REQUEST | given).values()]:
                case str(account), bool(expired), [*plan]:
                    days = 0 if expired else None
                    account = account or secrets.token_hex()
                    token = issue_token(store, account, days).token
                    if plan:
                        write_plan(folder, token, plan)
                    return {"token": token}
            raise ValueError(f"expected members such as {json.dumps(REQUEST)}")
        except (OSError, Unavailable, ValueError) as error:
            return {"error": str(error)}

    with listener:
        host, port = listener.getsockname()
    host = host.replace("0.0.0.0", "127.0.0.1")
    with socket.create_connection((host, port), START_TIMEOUT) as connection:
        connection.sendall(b"GET /api/v1/hello-service HTTP/1.0\r\n\r\n")
        if not connection.recv(1):
            sys.exit("The service did not start.")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that goes away ends it
    print(json.dumps({"url": f"http://{host}:{port}"} | respond("")), flush=True)
    with open(0, encoding="utf-8", errors="surrogateescape", closefd=False) as lines:
        for line in lines:
            print(json.dumps(respond(line.rstrip("\n"))), flush=True)
    mode = os.fstat(0).st_mode
    while not (os.isatty(0) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        signal.pause()  # the end of /dev/null, or of a file, means nothing


if __name__ == "__main__":
    main()
