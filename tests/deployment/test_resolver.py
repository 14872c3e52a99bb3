"""A name server that is silent: no timeout of libpq bounds how long psycopg waits for it."""

import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from deployment.servers.pgserver import backends, execute
from helpers.openapi import HELLO
from helpers.running import BIN, Client, environment_of, gunicorn, port_of, token_on

# With its own files in the place of these, where nobody else sees them.
IN_PLACE = 'mount --bind "$0" /etc/hosts; mount --bind "$1" /etc/resolv.conf; shift; exec "$@"'


@pytest.fixture
def name_server():
    """The address of one that never answers, which nobody else has."""
    if os.geteuid() != 0:
        pytest.skip("only root can name a name server")
    with socket.socket(type=socket.SOCK_DGRAM) as silent:
        address = "127.53.{}.{}".format(*divmod(os.getpid() % 2**16, 256))
        silent.bind((address, 53))
        yield address


def seconds(port, path, status):
    """How long the service takes for this response."""
    start = time.monotonic()
    with Client(port, "none") as client:
        assert client.fetch("GET", path)[0] == status
    return time.monotonic() - start


@pytest.mark.parametrize(
    "options, at_least, at_most",
    [({}, 1, 5), ({"RES_OPTIONS": "timeout:3 attempts:1"}, 6, 10)],
    ids=["default", "the operator's own"],
)
def test_silent_name_server_is_given_up_like_a_silent_host(
    postgresql, name_server, tmp_path, options, at_least, at_most
):
    """And those who do not need it wait no longer."""
    [server] = re.findall("@(.*)/", postgresql)
    names = ["db1.example.org", "db2.example.org"]
    database = postgresql.replace(server, ",".join(f"{name}:{port_of(server)}" for name in names))
    hosts, resolv_conf = tmp_path / "hosts", tmp_path / "resolv.conf"
    hosts.write_text(f"127.0.0.1 {' '.join(names)}\n")
    resolv_conf.write_text(f"nameserver {name_server}\n")
    token_on(postgresql)  # creates the tables
    command = ["unshare", "--mount", "sh", "-ec", IN_PLACE, hosts, resolv_conf, BIN / "gunicorn"]
    environment = environment_of(database) | options
    with gunicorn(environment, command=command) as (_, port), ThreadPoolExecutor() as pool:
        seconds(port, HELLO, 200)  # it has started
        assert seconds(port, "/health", 200) < at_most
        hosts.write_text("")
        for pid in backends(postgresql):
            execute(postgresql, f"SELECT pg_terminate_backend({pid})")
        calls = [("/health", 503)] * 3 + [(HELLO, 200)]
        took = list(pool.map(lambda call: seconds(port, *call), calls))
        assert at_least < max(took) < at_most
        assert seconds(port, "/health", 503) < 1  # a circuit breaker, as for silent hosts
