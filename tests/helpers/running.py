"""What the tests share: the service's programs as processes, its clients, its pages."""

import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from auth import issue_token
from engines.errors import Unavailable
from engines.sqlite import SQLite
from helpers.openapi import check_response
from store import Store

PROJECTS = "/api/v1/gardening/projects"
POINT = {"type": "Point", "coordinates": [-122.4410896675, 37.768361565]}
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
# Where no file waits for a disk: unless TMPDIR is wanted, or it is as small as a container's.
MEMORY = "/dev/shm"
if (
    "TMPDIR" in os.environ
    or not os.access(MEMORY, os.W_OK)
    or os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
    or shutil.disk_usage(MEMORY).free < 2**31
):
    MEMORY = None
ONE_WORKER = "WEB_CONCURRENCY=1"  # each takes a third of a second to start
TWO_WORKERS = "--workers=2"  # where a test is about more than one
LIMIT = 60  # seconds for whatever is no promise of a time, however slow the machine


def blocks(page, heading=None, language="sh"):
    """The blocks of this language on a page of the documentation, or under a heading."""
    text = (ROOT / page).read_text()
    if heading:
        section = rf"^(#+) {re.escape(heading)}\n(.*?)(?=^\1 |\Z)"
        [(_, text)] = re.findall(section, text, re.DOTALL | re.MULTILINE)
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run(*command, status=0, folder=ROOT, environment=None, limit=LIMIT, **options):
    """A command that has ended, with this status; its output and errors are text."""
    ended = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=limit,
        check=False,
        **options,
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended


def replaced(text, changes):
    """The text with each of its parts on the left, which it must have, as on the right."""
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def store_on(database, **options):
    """A store on this path or URL, which has opened and created nothing yet."""
    engine = SQLite
    if database.startswith("postgresql://"):
        from engines.postgres import PostgreSQL as engine
    return Store(engine(database), **options)


@contextmanager
def closing_store(database, **options):
    """The same, without idle connections at the end."""
    store = store_on(database, **options)
    with closing(store.engine):
        yield store


def token_on(database, account="ann"):
    """A new token, sooner than the command would print it."""
    with closing_store(database) as store:
        store.engine.open_database(creates=True)
        token, _ = issue_token(store, account)
        return token


def environment_of(database):
    return os.environ | {"GARDENING_DATABASE": database}


@contextmanager
def flask_run(environment, *options, folder=ROOT, flask=(BIN / "flask",)):
    """`flask run` on a free port: its address, and the lines that it prints."""
    with subprocess.Popen(
        [*flask, "run", "--port=0", *options],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        limit = threading.Timer(LIMIT, process.kill)  # which ends the lines
        limit.start()
        try:
            printed = list(takewhile(lambda line: "CTRL+C" not in line, process.stdout))
            addresses = re.findall(r"Running on (http://\S+)", "".join(printed))
            assert addresses, printed
            yield addresses[0], printed
        finally:
            limit.cancel()
            process.kill()


@contextmanager
def gunicorn(environment, *options, command=(BIN / "gunicorn",), stdout=subprocess.DEVNULL):
    """gunicorn with its own settings, one worker, and these: its process and its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # As gunicorn does for a socket of its own.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = listener.getsockname()[1]
        bind = f"--bind=fd://{listener.fileno()}"
        process = subprocess.Popen(
            [*command, bind, "--workers=1", "--log-level=warning", *options],
            cwd=ROOT,
            env=environment,
            pass_fds=[listener.fileno()],
            stdout=stdout,
            start_new_session=True,
        )
    try:
        yield process, port
    finally:
        process.terminate()
        process.wait(LIMIT)


def workers(pid):
    """The process ids of the workers of this gunicorn."""
    if sys.platform == "darwin":  # which has no /proc
        found = subprocess.check_output(["pgrep", "-P", str(pid)], timeout=LIMIT)
    else:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in found.split()]


class Client(http.client.HTTPConnection):
    """A connection that is kept alive, with a token."""

    def __init__(self, port, token):
        super().__init__("127.0.0.1", port, timeout=LIMIT)
        self.authorization = {"Authorization": f"Bearer {token}"}

    def call(self, method, path, body=None):
        """Status and JSON of the response, which must be as openapi.json says."""
        status, _, content = self.ask(method, path, body)
        return status, json.loads(content) if content else None

    def ask(self, method, path, body=None, **headers):
        """Status, headers and content of the response, which must be as it says, too."""
        body = None if body is None else json.dumps(body)
        headers = {"Content_Type": "application/json"} | headers
        status, received, content = self.fetch(method, path, body, **headers)
        route = path.removeprefix("/garden").split("?")[0]
        check_response(method, route, status, received, content)
        return status, received, content

    def fetch(self, method, path, body=None, **headers):
        """Status, headers and content of any response at all."""
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.request(method, path, body, self.authorization | headers)
        response = self.getresponse()
        return response.status, response.headers, response.read()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class TLSClient(Client):
    """The same over TLS, whoever signed the certificate."""

    def connect(self):
        super().connect()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.sock = context.wrap_socket(self.sock, server_hostname="gardening.example.org")


def hold_port():
    """A port that nobody else gets, and on which whoever names it can listen."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def port_of(url):
    return int(url.rpartition(":")[2])


def fill(disk):
    """Leave no room on the disk, with a file that is named `filler`."""
    with suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def openings(path):
    """How often this process has the file open."""
    file, found = os.stat(path), 0
    for descriptor in os.listdir("/dev/fd"):
        with suppress(OSError):  # it was closed meanwhile
            found += os.path.samestat(os.fstat(int(descriptor)), file)
    return found


def wait_for(condition, limit=LIMIT):
    """What the condition returns, once that is true."""
    deadline = time.monotonic() + limit
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def retry_while_unavailable(method, *arguments):
    """What it returns once the database is no longer left alone."""

    def attempt():
        with suppress(Unavailable):
            return method(*arguments)

    return wait_for(attempt)


def at_once(work, count=8, errors=()):
    """What `work(number)` returns in each of so many threads, or which of the errors."""
    start = threading.Barrier(count)

    def attempt(number):
        start.wait(LIMIT)
        try:
            return work(number)
        except errors as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(attempt, range(count), timeout=LIMIT))
