"""Settings for production; `gunicorn`, started in this folder, reads them by itself."""

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from gunicorn.arbiter import Arbiter
from gunicorn.instrument.statsd import Statsd
from gunicorn.util import parse_address
from gunicorn.workers.base import Worker

from logged import logged_request

UNREAD_LIMIT = 64 * 1024  # bytes; gunicorn drains less than this of an unread body

wsgi_app = "app:create_app()"
bind = os.environ.get("GARDENING_BIND", "").strip()
# LISTEN_FDS is for the process LISTEN_PID (sd_listen_fds(3)). deploy/install sets no LISTEN_PID.
holder = os.environ.get("LISTEN_PID", str(os.getpid()))
if bind and "LISTEN_FDS" in os.environ and holder == str(os.getpid()):
    sys.exit("Error: GARDENING_BIND has no effect: systemd holds the socket (gardening.socket)")
# gunicorn has the same default, but fails on an empty PORT, and takes 0 for any free port.
if not bind:
    port = os.environ.get("PORT", "").strip()
    if port and not (port.isdecimal() and 0 < int(port) < 2**16):
        sys.exit("Error: PORT must be a whole number, from 1 to 65535")
    bind = f"0.0.0.0:{port}" if port else "127.0.0.1:8000"
if bind.isdecimal():  # gunicorn would take it for a host
    sys.exit(f"Error: GARDENING_BIND must have a host, too: HOST:{bind}")
try:
    address = parse_address(bind)  # as gunicorn does, which then takes any number for a port
except RuntimeError as error:
    sys.exit(f"Error: GARDENING_BIND must be HOST:PORT, [HOST]:PORT or unix:PATH: {error}")
if isinstance(address, tuple) and not 0 <= address[1] < 2**16:
    sys.exit("Error: the port of GARDENING_BIND must be from 0 to 65535")
worker_class = "gthread"
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
if "WEB_CONCURRENCY" not in os.environ:  # which gunicorn reads by itself
    # Two processes per core cost little, and make it less likely that one process has all of the
    # kept-alive connections.
    workers = 2 * cores
elif int(os.environ["WEB_CONCURRENCY"]) == 0:  # gunicorn would start, and serve no connection
    sys.exit("Error: WEB_CONCURRENCY must be a whole number, 1 or more")
# A write that waits for the disk or a lock holds a thread. With more threads, all contend for the
# interpreter, and reads get slower. They pay on PostgreSQL, where several commits wait for the disk
# and the standby at once.
threads = 4 if os.environ.get("GARDENING_DATABASE", "").startswith("postgresql://") else 2
# Give up on a silent name server after a second. By itself, glibc would hold up a thread for 10 s
# for each host that a URL names. See resolv.conf(5).
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
keepalive = 75  # seconds, longer than the proxy's, so that the proxy closes first
# gunicorn would take SCRIPT_NAME from a proxy, which may pass on a client's.
forwarder_headers = ""
# gunicorn would refuse a request in which two proxies in a row name different schemes.
secure_scheme_headers: dict[str, str] = {}
# Where the heartbeats of workers touch no disk.
worker_tmp_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
limit_request_line = 8190  # bytes, as for each header, and as nginx takes
control_socket_disable = True  # there is one per user, so two instances would clash
accesslog = "-"
access_log_format = (
    '"%(caller)s" "%(method)s %(path)s" %(status)s %(bytes)s %(microseconds)s %(request_id)s'
)
with suppress(OSError):  # standard output may be closed
    output = os.fstat(1)
    # journald adds the time by itself (systemd.exec(5), JOURNAL_STREAM).
    if os.environ.get("JOURNAL_STREAM") != f"{output.st_dev}:{output.st_ino}":
        access_log_format = f"%(time)s {access_log_format}"
# UTC in all other lines, too: gunicorn's and Flask's formatters share this class.
logging.Formatter.converter = time.gmtime


class Log(Statsd):  # which sends metrics if statsd_host is set
    """Knows only what a line of the access log shows.

    gunicorn's own atoms hold every header, and Python prints them if it cannot write the line.
    """

    def atoms(self, resp: Any, req: Any, environ: Any, request_time: timedelta) -> Any:
        """The values for access_log_format: no token, and no query."""
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "caller": environ.get("REMOTE_USER", "-"),  # account and token ID
            "status": resp.status.split(" ", 1)[0],
            "bytes": resp.sent,
            "microseconds": request_time // timedelta(microseconds=1),
            **logged_request(environ),
        }


logger_class = Log


def on_starting(server: Arbiter) -> None:
    """Bring the database up to date, or say in one line what is wrong."""
    # In a process of its own, so that no worker inherits its modules and its connection.
    command = [sys.executable, "-m", "flask", "--app", "app", "open-db"]
    if subprocess.run(command, check=False).returncode:
        sys.exit(1)


def pre_fork(server: Arbiter, worker: Worker) -> None:
    """Make signals wait until the worker has handlers of its own.

    It starts with the main process's handlers, which would lose a SIGTERM. The worker would then
    serve on until it is killed 30 s later, and a restart would wait for that.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, Arbiter.SIGNALS)


unblock_signals = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, Arbiter.SIGNALS)
# gunicorn calls no hook in the main process after a fork.
os.register_at_fork(after_in_parent=unblock_signals)


def post_worker_init(worker: Worker) -> None:
    """Receive what has waited."""
    unblock_signals()


def pre_request(worker: Worker, request: Any) -> None:
    """Announce a close that gunicorn would not announce.

    If a long body is left unread, gunicorn closes the connection without a word, on which a proxy
    may have sent the next request by then.
    """
    headers = dict(request.headers)
    size = int(headers.get("CONTENT-LENGTH", 0))
    # Of a chunked body nobody knows the length.
    if size >= UNREAD_LIMIT or "TRANSFER-ENCODING" in headers:
        request.force_close()
