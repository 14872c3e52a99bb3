"""PostgreSQL under Patroni, which makes one of three nodes the primary. Needs Linux and etcd."""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import requests

from deployment.servers.pgserver import (
    ACCESS,
    AS_SERVER,
    BINARIES,
    OPTIONS,
    PgServer,
    empty_pgserver,
    stop,
)
from helpers.running import BIN, LIMIT, hold_port

# What goes before Patroni and etcd, which then end with the tests, even by kill -9. PostgreSQL does
# not: it has a keeper.
COMMAND = [*AS_SERVER, "setpriv", "--pdeathsig=KILL"]
# What all nodes do. Patroni takes no shorter times.
CLUSTER = {
    "ttl": 20,  # seconds after which a lost primary is replaced
    "loop_wait": 1,
    "retry_timeout": 3,
    "synchronous_mode": "quorum",
    "postgresql": {"use_pg_rewind": True},
}
PARAMETERS = {
    "fsync": "off",
    "unix_socket_directories": "",
    "dynamic_shared_memory_type": "mmap",  # in the folder, so that no crash leaks it
}


@dataclass
class Node:
    """A server, and the Patroni that starts, promotes and stops it.

    Each fault of a primary is a context; once it is left, the node joins the others again.
    """

    server: PgServer
    api: int  # the port of Patroni
    etcd: int  # the port of etcd, which knows the primary
    patroni: subprocess.Popen[bytes] = field(init=False)

    @property
    def name(self) -> str:
        return f"node-{self.api}"

    def start(self) -> None:
        folder, user = self.server.folder, {"username": "postgres"}
        server, api = (f"127.0.0.1:{port}" for port in (self.server.port, self.api))
        configuration = {
            "scope": "gardening",
            "name": self.name,
            "etcd3": {"host": f"127.0.0.1:{self.etcd}"},
            "restapi": {"listen": api, "connect_address": api},
            "bootstrap": {
                "dcs": CLUSTER,
                "initdb": ["no-sync", {"encoding": "UTF8"}, {"locale": "C"}],
            },
            "postgresql": {
                "listen": server,
                "connect_address": server,
                "bin_dir": str(self.server.binaries),
                "data_dir": str(folder / "data"),
                "pgpass": str(folder / "pgpass"),
                "authentication": {"superuser": user, "replication": user},
                "basebackup": ["no-sync", {"checkpoint": "fast"}],
                "pg_hba": ACCESS.strip().splitlines(),
                "parameters": PARAMETERS,
            },
        }
        file = folder / "patroni.json"
        file.write_text(json.dumps(configuration))
        self.patroni = subprocess.Popen([*COMMAND, BIN / "patroni", file], **OPTIONS)

    def end_patroni(self) -> None:
        self.patroni.kill()
        self.patroni.wait(LIMIT)

    def has_role(self, role: str) -> bool:
        """Whether it is the "primary", or one of the "quorum" of standbys, as its Patroni says."""
        with suppress(requests.RequestException):
            return requests.get(f"http://127.0.0.1:{self.api}/{role}", timeout=1).ok
        return False

    @contextmanager
    def killed(self) -> Iterator[None]:
        """After a moment in which no standby gets anything from it."""
        senders = self.server.execute("SELECT pid FROM pg_stat_replication")
        with stop([pid for (pid,) in senders]):
            time.sleep(0.2)
            self.end_patroni()
            self.server.kill()
        yield
        self.start()

    @contextmanager
    def silent(self) -> Iterator[None]:
        with stop([self.patroni.pid, *self.server.processes()]):
            yield

    @contextmanager
    def switched_over(self) -> Iterator[None]:
        url = f"http://127.0.0.1:{self.api}/switchover"
        response = requests.post(url, json={"leader": self.name}, timeout=LIMIT)
        assert response.ok, response.text
        yield


@contextmanager
def start_nodes() -> Iterator[list[Node]]:
    with ExitStack() as running:
        servers = [running.enter_context(empty_pgserver(BINARIES[0])) for _ in range(3)]
        held = [running.enter_context(hold_port()) for _ in range(4)]
        etcd, *apis = (port.getsockname()[1] for port in held)
        url = f"http://127.0.0.1:{etcd}"
        process = subprocess.Popen(
            [*COMMAND, "etcd", "--data-dir", servers[0].folder / "etcd"]
            + ["--listen-client-urls", url, "--advertise-client-urls", url]
            + ["--listen-peer-urls", "http://127.0.0.1:0"],
            **OPTIONS,
            stderr=subprocess.DEVNULL,
        )
        running.enter_context(process)
        running.callback(process.kill)
        nodes = [Node(*ports, etcd) for ports in zip(servers, apis, strict=True)]
        for node in nodes:
            node.start()
            running.callback(node.end_patroni)
        yield nodes


def database_url(nodes: list[Node], name: str) -> str:
    hosts = ",".join(f"127.0.0.1:{node.server.port}" for node in nodes)
    return f"postgresql://postgres@{hosts}/{name}"


def all_is_well(nodes: list[Node]) -> bool:
    """There is a primary, and each commit waits for one of the two others."""
    roles = [[node.has_role(role) for node in nodes] for role in ("primary", "quorum")]
    return list(map(sum, roles)) == [1, 2]
