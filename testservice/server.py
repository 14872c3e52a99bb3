"""gunicorn as the server of the test service: one worker, which has the data in memory.

With the worker, the data are gone. So nothing starts a second one, and the end of either
process is the end of both.
"""
# Tested in tests/test_testservice.py.

import json
import os
import runpy
import select
import signal
import socket
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from gunicorn.app.base import BaseApplication

from testservice.failures import FailingService

SETTINGS = Path(__file__).parent.parent / "gunicorn.conf.py"


class Server(BaseApplication):
    """The settings of production, but for what the data in memory ask for."""

    def __init__(self, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self._url = (
            f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        )
        self._file = listener.detach()  # gunicorn closes it
        self._hangup = signal.getsignal(signal.SIGHUP)  # ignored under nohup
        super().__init__()

    def load_config(self) -> None:
        settings = runpy.run_path(str(SETTINGS)) | {
            "bind": f"fd://{self._file}",
            "workers": 1,
            "threads": 200,  # one starts only when all others are busy
            "timeout": 0,  # else a worker that is silent is killed
            "graceful_timeout": 1,
            "accesslog": None,
            "loglevel": "warning",
            "on_starting": lambda _: None,
            "when_ready": self.take_signals,
            "post_worker_init": self.announce,
            "child_exit": end_with_worker,
        }
        for name in self.cfg.settings.keys() & settings.keys():
            self.cfg.set(name, settings[name])

    def load(self) -> Any:
        return FailingService()

    def take_signals(self, arbiter: Any) -> None:
        """In the master: let no signal reload the service, or start a second worker."""

        def end(*_: object) -> None:
            arbiter.kill_workers(signal.SIGKILL)
            os._exit(0)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        # SIGTTIN would also stop a job in the background that reads its terminal.
        for number in (signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR2, signal.SIGWINCH):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, self._hangup)

    def announce(self, worker: Any) -> None:
        """In the worker: say that the service responds, and wait for the end of the input."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the master
        signal.signal(signal.SIGHUP, self._hangup)
        token = worker.wsgi.issue_token({})["token"]
        try:
            print(json.dumps({"url": self._url, "token": token}), flush=True)
        except BrokenPipeError:  # nobody is left who would call it
            os.kill(os.getppid(), signal.SIGTERM)
        if sys.stdin:  # None if it was closed; then 0 may be a socket
            threading.Thread(target=end_with_input, daemon=True).start()


def end_with_worker(_arbiter: Any, _worker: Any) -> None:
    print("The test service has ended: its worker was killed.", file=sys.stderr)
    os._exit(1)


def end_with_input() -> None:
    """Wait for the end of a pipe, a socket or a terminal, if that is the input."""
    stdin, null = os.fstat(0), os.stat(os.devnull)
    if not stat.S_ISREG(stdin.st_mode) and stdin.st_rdev != null.st_rdev:
        with suppress(OSError):  # a job in the background cannot read its terminal
            # With select, since the input may be non-blocking.
            while select.select([0], [], []) and os.read(0, 4096):
                pass
            os.kill(os.getppid(), signal.SIGTERM)
