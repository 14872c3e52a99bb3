"""The command gardening-test-service: the real service, for the tests of any program.

It knows gunicorn's command line and how tokens are issued, but nothing of HTTP or SQL.
Three processes: the command itself reads and answers lines; a keeper, its child, outlives
it whatever ends it and clears up; gunicorn, the keeper's child, serves.
"""

import argparse
import http.client
import json
import os
import secrets
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType

HERE = Path(__file__).resolve().parent
SETTINGS = ("FLASK_", "GARDENING_", "GUNICORN_", "PYTHON", "WEB_CONCURRENCY")
START_TIMEOUT = 30  # seconds
HELP = """\
usage: gardening-test-service [--bind HOST:PORT]

Runs the Gardening Project Service for tests; when it ends, its data are gone.
Prints {"url": ..., "token": ...} on a line once the service answers. For each line of
input, prints {"token": ...} for the account named there, or for a new one if the line is
empty; {"account": "ann", "expired": true} asks for a token that has expired. A name
that cannot be an account gets {"error": ...}. Ends with its input, or on SIGTERM or
SIGINT; an input that is no pipe, socket or terminal, like /dev/null, never ends it.
"""


def main() -> None:
    sys.path.insert(0, str(HERE))  # the service's modules import one another from there
    parser = argparse.ArgumentParser("gardening-test-service", usage=argparse.SUPPRESS)
    parser.add_argument("--bind", type=listen, default="127.0.0.1:0")
    parser.format_help = lambda: HELP  # type: ignore[method-assign]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    # Opens 0 to 2, so that no socket takes the number of a closed stream.
    while os.open(os.devnull, os.O_RDWR) < 3:
        pass
    options = parser.parse_args()
    memory = "/dev/shm"  # where no write waits for a disk; TMPDIR overrides it
    # Not tempfile.gettempdir(): it probes with a file, which a kill would leave behind.
    default = memory if os.access(memory, os.W_OK) else "/tmp"
    place = os.environ.get("TMPDIR") or default
    folder = os.path.join(place, f"gardening-{secrets.token_hex(8)}")
    database = os.path.join(folder, "gardening.db")
    with options.bind as listener:
        host, port = listener.getsockname()
        keeper, lifeline = start_keeper(folder, database, listener)
    try:
        signal.signal(signal.SIGCHLD, end)
        import_module("auth")  # which takes a while, as gunicorn's start does
        wait_until_ready(host, port)
        serve_tokens(f"http://{host}:{port}", database)
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(lifeline)
        os.waitpid(keeper, 0)


def listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        return socket.create_server((host, int(port)))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{address}: {error.strerror}") from error
    except (OverflowError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{address} is not HOST:PORT") from error


def end(number: int, _: FrameType | None) -> None:
    """End as asked; or because the keeper has ended, after gunicorn said why."""
    sys.exit("The service has ended." if number == signal.SIGCHLD else 0)


def start_keeper(
    folder: str, database: str, listener: socket.socket
) -> tuple[int, int]:
    """Fork the keeper; it ends the service when nobody holds the pipe any more.

    Returns its process id, and the end of the pipe to hold.
    """
    ended, lifeline = os.pipe()
    if keeper := os.fork():
        os.close(ended)
        return keeper, lifeline
    try:
        os.close(lifeline)
        os.setsid()  # Ctrl-C is for the command alone
        for number in (signal.SIGTERM, signal.SIGINT):  # from pkill, to both
            signal.signal(number, signal.SIG_IGN)
        os.mkdir(folder, 0o700)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)  # or a reader of the output would wait for gunicorn, too
        stopped, running = os.pipe()
        # As gunicorn does for a socket of its own.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs = os.environ.items()
        environment = {k: v for k, v in theirs if not k.startswith(SETTINGS)}
        bind = f"--bind=fd://{listener.fileno()}"
        options = [
            "--workers=1",
            "--threads=8",
            "--log-level=warning",
            f"--access-logfile={os.devnull}",
            f"--worker-tmp-dir={folder}",
        ]
        gunicorn = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", bind, *options],
            cwd=HERE,
            env=environment | {"FLASK_DATABASE": database, "TMPDIR": folder},
            pass_fds=[listener.fileno(), running],
            start_new_session=True,
        )
        os.close(running)
        select.select([ended, stopped], [], [])
        with suppress(ProcessLookupError):
            os.killpg(gunicorn.pid, signal.SIGKILL)
        gunicorn.wait()
        os.read(stopped, 1)  # until the workers, too, have stopped writing
        shutil.rmtree(folder)
    except OSError as error:
        print(error, file=sys.stderr)
    finally:
        os._exit(0)


def wait_until_ready(host: str, port: int) -> None:
    try:
        connection = http.client.HTTPConnection(host, port, timeout=START_TIMEOUT)
        connection.request("GET", "/api/v1/hello-service")
        connection.getresponse()
        connection.close()
    except (OSError, http.client.HTTPException):
        sys.exit("The service did not start.")


def serve_tokens(url: str, database: str) -> None:
    """Print the address and a token, then a token for each line of the input."""
    from auth import issue_token
    from store import SQLite, Store

    store = Store(SQLite(database))

    def answer(line: str) -> dict[str, str]:
        try:
            account, days = parse(line)
            return {
                "token": issue_token(store, account or secrets.token_hex(), days).token
            }
        except ValueError as error:
            return {"error": str(error)}

    print(json.dumps({"url": url} | answer("")), flush=True)
    with open(0, encoding="utf-8", errors="surrogateescape", closefd=False) as lines:
        for line in lines:
            print(json.dumps(answer(line.rstrip("\n"))), flush=True)
    while not can_end(0):
        signal.pause()


def parse(line: str) -> tuple[str, int | None]:
    """The account, and the days for which the token is valid. Raises ValueError."""
    if not line.startswith("{"):
        return line, None
    with suppress(ValueError, RecursionError):  # of json, for bad input
        match {"account": "", "expired": False} | json.loads(line):
            case {"account": str(account), "expired": bool(expired), **other}:
                if not other:
                    return account, 0 if expired else None
    raise ValueError('expected {"account": "NAME", "expired": true}')


def can_end(file: int) -> bool:
    """Whether the end of this input means something: not of /dev/null, or of a file."""
    mode = os.fstat(file).st_mode
    return os.isatty(file) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


if __name__ == "__main__":
    main()
