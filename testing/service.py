"""Runs the Gardening Project Service for tests, in one process, with its data in memory.

Prints {"url": ..., "token": ...} on one line once the service responds; the token is for
a new account. POST /test/tokens issues more, for example with the body
{"account": "ann", "expired": false, "fail": ["lost", "429"]}; every member is optional.
GET /test/tokens/TOKEN shows what is left of its plan; DELETE revokes the token.

Ends with its input, or on SIGTERM or SIGINT; an input that is not a pipe, a socket or a
terminal, such as /dev/null, never ends it.
"""

import argparse
import json
import os
import select
import signal
import socket
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gunicorn.app.base import Application
from gunicorn.workers.gthread import ThreadWorker

from testing.failures import FailingService

SETTINGS = Path(__file__).parent.parent / "gunicorn.conf.py"
IGNORED_PREFIXES = ("FLASK_", "GARDENING_", "GUNICORN_", "WEB_CONCURRENCY")
# A thread is started when all others are busy, so many of them cost nothing.
OVERRIDES = {"accesslog": None, "loglevel": "warning", "threads": 200}


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # it would stop all of the service
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
        parser.error(f"{bind} is no HOST:PORT, or [HOST]:PORT, to listen on: {error}")
    for name in [name for name in os.environ if name.startswith(IGNORED_PREFIXES)]:
        del os.environ[name]
    service = FailingService()

    def announce(_: ThreadWorker) -> None:
        host, port = listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        host = f"[{host}]" if ":" in host else host
        token = service.issue_token({})["token"]
        try:
            url = f"http://{host}:{port}"
            print(json.dumps({"url": url, "token": token}), flush=True)
        except BrokenPipeError:
            os._exit(1)  # nobody is left who would call it
        if sys.stdin:  # if it was closed, a socket may have its number
            threading.Thread(target=end_with_input, daemon=True).start()

    Server().serve(listener, service, announce)


def listen(bind: str) -> socket.socket:
    """Raises OSError, ValueError."""
    address = urlsplit(f"//{bind}")
    host, port = address.hostname or "", address.port
    if port is None:
        raise ValueError("the port is missing")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as gunicorn's own
    return listener


def end_with_input() -> None:
    """Wait for the end of a pipe, a socket or a terminal, if that is the input."""
    stdin, null = os.fstat(0), os.stat(os.devnull)
    if not stat.S_ISREG(stdin.st_mode) and stdin.st_rdev != null.st_rdev:
        with suppress(OSError):  # a job in the background cannot read its terminal
            while select.select([0], [], []) and os.read(0, 4096):
                pass
            os._exit(0)


# Below is all that leans on undocumented parts of gunicorn: `load_config_from_file`; what
# a worker takes; that `init_process` calls `init_signals`, `wsgi`, `post_worker_init` and
# `run`; `is_parent_alive`; and that a ConnectionResetError closes the connection.


class Server(Application):
    """The settings of production, and a worker without an arbiter.

    An arbiter would only reload the service, or start a second one, without its data.
    """

    def load_config(self) -> None:
        self.load_config_from_file(str(SETTINGS))
        for name, value in OVERRIDES.items():
            self.cfg.set(name, value)

    def serve(self, listener: socket.socket, service: Any, announce: Any) -> None:
        """Never returns."""
        self.callable = service
        self.cfg.set("post_worker_init", announce)
        log = self.cfg.logger_class(self.cfg)
        Worker(0, 0, [listener], self, 0, self.cfg, log).init_process()


class Worker(ThreadWorker):
    def init_signals(self) -> None:
        """Leave them as they are: under nohup, SIGHUP is ignored."""

    def is_parent_alive(self) -> bool:
        return True  # the input alone tells that nobody needs the service


if __name__ == "__main__":
    main()
