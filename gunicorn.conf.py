"""Settings for production; `gunicorn`, started in this folder, reads them by itself."""

import json
import os
import re
import shlex
import socket
import string
import sys
from contextlib import closing
from http import HTTPStatus
from importlib import import_module
from multiprocessing import Pipe, get_context
from typing import Any
from urllib.parse import quote, unquote

from gunicorn import util
from gunicorn.arbiter import Arbiter
from gunicorn.glogging import Logger
from gunicorn.http.message import Request
from gunicorn.instrument.statsd import Statsd
from gunicorn.workers.base import Worker

CHECK_LIMIT = 3600  # seconds; a large database may be brought to a new layout
UNREAD_LIMIT = 64 * 1024  # bytes; gunicorn drains less than this of an unread body
# With auth.PREFIX, which is not imported here: it would outlive a reload.
TOKEN = re.compile(r"gardening_[\w-]{20,}")


class Log(Statsd):
    """Logs the account and the path as sent, without control characters or tokens."""

    def access(self, *request: Any) -> None:
        # Without statsd_host there is no socket, and Statsd would format for nobody.
        (Statsd if self.sock else Logger).access(self, *request)

    def atoms(self, resp: Any, req: Any, environ: Any, request_time: Any) -> Any:
        atoms: Any = super().atoms(resp, req, environ, request_time)
        atoms["U"] = atoms["{raw_uri}e"].partition("?")[0]
        atoms["u"] = atoms.get("{remote_user}e", "-")
        request_id = atoms.get("{x-request-id}i") or "-"
        atoms["{x-request-id}i"] = quote(request_id, safe=string.punctuation)
        for name in ("{x-request-id}i", "u", "U"):
            text = TOKEN.sub("***", atoms[name])
            if TOKEN.search(unquote(text)):
                text = "***"
            atoms[name] = text.replace("\\", r"\\")  # gunicorn escapes only quotes
        return atoms

    def warning(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Report a malformed request, which gunicorn quotes, without its token."""
        super().warning(TOKEN.sub("***", str(msg)), *args, **kwargs)


def write_problem(sock: socket.socket, status_int: int, reason: str, mesg: str) -> None:
    """A problem document (RFC 9457) in place of gunicorn's own page."""
    # gunicorn also calls 501 a "Bad Request"; Python 3.11 names 414 as RFC 2616 did.
    title = HTTPStatus(status_int).phrase if reason == "Bad Request" else reason
    detail = "The request is malformed, too long, or asks for what is not supported."
    if status_int == 500:
        detail = "The service failed; see its log."
    problem = {"type": "about:blank", "title": title, "status": status_int}
    body = json.dumps(problem | {"detail": detail})
    head = f"HTTP/1.1 {status_int} {title}\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/problem+json\r\nCache-Control: no-store\r\n"
    util.write_nonblock(sock, f"{head}Connection: close\r\n\r\n{body}".encode())


words = [*sys.argv, *shlex.split(os.environ.get("GUNICORN_CMD_ARGS", ""))]
if any(word.startswith(("--che", "--pri")) for word in words):
    # --check-config or --print-config, however they are abbreviated: load the code and the
    # driver, and leave the database and its setting alone. Opening it brings its tables to
    # the layout of this release, while processes of an older one may still serve it.
    if "://" in os.environ.get("FLASK_DATABASE", ""):
        import_module("engines.postgres")
    os.environ["FLASK_DATABASE"] = ":memory:"

util.write_error = write_problem  # there is no setting for it
wsgi_app = "app:create_app()"
bind = os.environ.get("GARDENING_BIND", "127.0.0.1:8000")
worker_class = "gthread"
# Two processes per core cost little, and make it less likely that one process has all of the
# kept-alive connections.
workers = int(os.environ.get("WEB_CONCURRENCY", 2 * (os.cpu_count() or 1)))
# Two, so that a write waiting for the disk does not hold up its process. With more, they
# contend for the interpreter, and a mix of reads and writes gets slower.
threads = 2
keepalive = 75  # seconds, longer than the proxy's, so that the proxy closes first
# Where the heartbeats of workers touch no disk.
worker_tmp_dir = "/dev/shm" if os.path.isdir("/dev/shm") else None
control_socket_disable = True  # there is one per user, so two instances would clash
accesslog = "-"
logger_class = Log
# Request id, account, method and path, status, bytes and microseconds; no token, no query.
access_log_format = '%({x-request-id}i)s "%(u)s" "%(m)s %(U)s" %(s)s %(B)s %(D)s'


def on_starting(server: Arbiter) -> None:
    """Refuse an unusable database once, here, and not in every worker."""
    # In a process of its own: what the master imported would outlive a reload.
    found, answer = Pipe(duplex=False)
    check = get_context("fork").Process(target=check_database, args=[server, answer])
    check.start()
    check.join(CHECK_LIMIT)
    if check.exitcode != 0:
        check.kill()
        sys.exit(1)
    # A worker may start later, in an outage; it must open this file and no other.
    os.environ["FLASK_DATABASE_FILE"] = json.dumps(found.recv())


def check_database(server: Arbiter, answer: Any) -> None:
    """Tell which file the database is, or in one line why the service cannot use it."""
    from engines.base import Unavailable

    os.environ.pop("FLASK_DATABASE_FILE", None)  # of the master before this one
    try:
        app, file = server.app.wsgi(), None
        # Another application may be served with these settings, such as an empty one.
        if store := getattr(app, "extensions", {}).get("store"):
            with closing(store):
                store.check()
            file = getattr(store.engine, "file", None)
        answer.send(file)
    except Unavailable as error:
        sys.exit(f"Error: {error}")


def pre_request(worker: Worker, request: Request) -> None:
    """Announce a close where gunicorn would take an unread body for the next request."""
    headers = dict(request.headers)
    size = int(headers.get("CONTENT-LENGTH", 0))
    # gunicorn reads past less than this. Of a chunked body nobody knows the length.
    if size >= UNREAD_LIMIT or "TRANSFER-ENCODING" in headers:
        request.force_close()
