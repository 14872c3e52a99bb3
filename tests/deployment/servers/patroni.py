"""PostgreSQL under Patroni, which makes one of three nodes the primary. Needs Linux and etcd."""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import requests

from deployment.servers.pgserver import (
    AS_SERVER,
    BINARIES,
    HBA,
    OPTIONS,
    PASSWORD,
    PgServer,
    empty_pgserver,
    stop,
)
from helpers.running import BIN, LIMIT, hold_port, run

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


class Certificate(NamedTuple):
    """For etcd, for Patroni, and for whoever may call them. It is its own authority."""

    path: str
    key: str


def certify(folder: Path) -> Certificate:
    certificate = Certificate(f"{folder}/certificate", f"{folder}/key")
    run(
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-nodes", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-addext", "keyUsage=critical,digitalSignature,keyCertSign"),
        *("-out", certificate.path, "-keyout", certificate.key),
    )
    return certificate


@dataclass
class Node:
    """A server, and the Patroni that starts, promotes and stops it.

    Each fault of a primary is a context; once it is left, the node joins the others again.
    """

    server: PgServer
    api: int  # the port of Patroni
    etcd: int  # the port of etcd, which knows the primary
    certificate: Certificate
    patroni: subprocess.Popen[bytes] = field(init=False)

    @property
    def name(self) -> str:
        return f"node-{self.api}"

    def start(self) -> None:
        folder, user = self.server.folder, {"username": "postgres", "password": PASSWORD}
        certificate, key = self.certificate
        own = {"certfile": certificate, "keyfile": key}
        server, api = (f"127.0.0.1:{port}" for port in (self.server.port, self.api))
        configuration = {
            "scope": "gardening",
            "name": self.name,
            "etcd3": {
                "host": f"127.0.0.1:{self.etcd}",
                "protocol": "https",
                "cacert": certificate,
                "cert": certificate,
                "key": key,
            },
            "restapi": {
                "listen": api,
                "connect_address": api,
                "cafile": certificate,
                "verify_client": "required",
                **own,
            },
            "ctl": {"cacert": certificate, **own},
            "bootstrap": {
                "dcs": CLUSTER,
                "initdb": [
                    "no-sync",
                    {"encoding": "UTF8"},
                    {"locale": "C"},
                    {"auth": "scram-sha-256"},
                ],
            },
            "postgresql": {
                "listen": server,
                "connect_address": server,
                "bin_dir": str(self.server.binaries),
                "data_dir": str(folder / "data"),
                "pgpass": str(folder / "pgpass"),
                "authentication": {"superuser": user, "replication": user},
                "basebackup": ["no-sync", {"checkpoint": "fast"}],
                "pg_hba": [HBA],
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
            return self.call("GET", role, timeout=1).ok
        return False

    def call(self, method: str, path: str, **options: Any) -> requests.Response:
        url = f"https://127.0.0.1:{self.api}/{path}"
        own = self.certificate
        return requests.request(method, url, verify=own.path, cert=own, **options)

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
        response = self.call("POST", "switchover", json={"leader": self.name}, timeout=LIMIT)
        assert response.ok, response.text
        yield


@contextmanager
def start_nodes() -> Iterator[list[Node]]:
    with ExitStack() as running:
        servers = [running.enter_context(empty_pgserver(BINARIES[0])) for _ in range(3)]
        held = [running.enter_context(hold_port()) for _ in range(4)]
        etcd, *apis = (port.getsockname()[1] for port in held)
        url, folder = f"https://127.0.0.1:{etcd}", servers[0].folder
        certificate = certify(folder)
        process = subprocess.Popen(
            [*COMMAND, "etcd", "--data-dir", "etcd"]
            + ["--cert-file", certificate.path, "--key-file", certificate.key]
            + ["--client-cert-auth", "--trusted-ca-file", certificate.path]
            + ["--listen-client-urls", url, "--advertise-client-urls", url]
            + ["--listen-peer-urls", "unix://peers:0"],  # in the folder, which nobody else enters
            **OPTIONS | {"cwd": folder},
            stderr=subprocess.DEVNULL,
        )
        running.enter_context(process)
        running.callback(process.kill)
        nodes = [Node(*ports, etcd, certificate) for ports in zip(servers, apis, strict=True)]
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
