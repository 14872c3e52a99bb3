"""The server of the test service: a worker of gunicorn, without gunicorn's main process.

The worker has the data in memory, so its end is the end of the service.
"""

import json
import os
import runpy
import select
import signal
import socket
import stat
import sys
from pathlib import Path
from threading import Thread
from typing import Any

from gunicorn.config import Config
from gunicorn.workers.gthread import ThreadWorker

from commands import WrongSetting
from testservice.failures import FailingService

SETTINGS = Path(__file__).parent.parent / "gunicorn.conf.py"
# What a worker asks for, but does not use without a main process.
FROM_MAIN_PROCESS: dict[str, Any] = {"age": 0, "ppid": 0, "timeout": 0, "app": None}
CLOSED = "the pipe at the input is closed: add < /dev/null, and end the service by a signal"


class Server(ThreadWorker):
    """Serves with the settings of production, except for those below."""

    wsgi: Any  # set by load_wsgi

    def __init__(self, listener: socket.socket) -> None:
        config = Config()
        # Running the file also sets RES_OPTIONS, and UTC for the log.
        settings = runpy.run_path(str(SETTINGS)) | {
            "threads": 200,  # one starts only when all others are busy
            "accesslog": None,
            "loglevel": "warning",
        }
        for name in config.settings.keys() & settings.keys():
            config.set(name, settings[name])
        log = config.logger_class(config)
        super().__init__(sockets=[listener], cfg=config, log=log, **FROM_MAIN_PROCESS)
        self._url = url_of(listener)

    def load_wsgi(self) -> None:
        try:
            self.wsgi = FailingService()
        except WrongSetting as error:  # SQLite is too old
            sys.exit(str(error))

    def is_parent_alive(self) -> bool:
        """Whoever started the service may end first, as a shell that ran it with & does."""
        return True

    def init_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)

    def finish_request(self, conn: Any, fs: Any) -> None:
        """Close in a thread: gunicorn's loop would wait 2 s for the client to close, too."""
        if fs.result():  # the connection stays open
            super().finish_request(conn, fs)
        else:
            self.tpool.submit(super().finish_request, conn, fs)

    def run(self) -> None:
        """Say that the service responds, and serve until the signal or the end of the pipe."""
        pipe = pipe_at_input()
        if any(events & select.POLLHUP for _, events in pipe.poll(0)):
            sys.exit(CLOSED)
        token = self.wsgi.token_for({})["token"]
        print(json.dumps({"url": self._url, "token": token}), flush=True)
        Thread(target=end_with, args=[pipe], daemon=True).start()
        super().run()


def url_of(listener: socket.socket) -> str:
    """An address at which this machine can call it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def end(*_: object) -> None:
    """End at once, whatever the threads do."""
    os._exit(0)


def pipe_at_input() -> select.poll:
    """What polls the pipe at the standard input, or nothing if something else is there."""
    pipe = select.poll()
    # Without a standard input, the descriptor is that of some other file.
    mode = os.fstat(0).st_mode if sys.stdin else 0
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):  # Node.js gives a socket as a pipe
        pipe.register(0, select.POLLIN)
    return pipe


def end_with(pipe: select.poll) -> None:
    """Wait until the pipe closes, and end."""
    # It may be non-blocking, so that a read would fail until there is something to read.
    while pipe.poll() and os.read(0, 4096):
        pass
    end()
