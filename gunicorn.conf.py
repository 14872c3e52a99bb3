"""Settings for production; `gunicorn` in this folder reads them by itself."""

import os
import subprocess
import sys

wsgi_app = "app:create_app()"
bind = os.environ.get("GARDENING_BIND", "127.0.0.1:8000")
worker_class = "gthread"
# Kept-alive connections may all meet in one process: with two a core it costs little.
workers = int(os.environ.get("WEB_CONCURRENCY", 2 * os.cpu_count()))
# Two, so that a write waiting for the disk does not hold up its process; with more
# they contend for the interpreter, and writes and reads mixed get slower.
threads = 2
keepalive = 75  # seconds: more than the proxy's, which so is the one to close
worker_tmp_dir = "/dev/shm" if os.path.isdir("/dev/shm") else None  # no beat on a disk
control_socket_disable = True  # there is one a user, over which two instances clash
accesslog = "-"
# Request id, status, bytes and microseconds; never Authorization, nor a query.
access_log_format = '%({x-request-id}i)s %(h)s "%(m)s %(U)s" %(s)s %(B)s %(D)s'


def on_starting(server):
    """Refuse an unusable database once, here, and not in every worker."""
    check = [sys.executable, "-c", "from app import create_app; create_app()"]
    if status := subprocess.run(check, check=False).returncode:
        sys.exit(status)
