"""Real Apache, HAProxy and Caddy with the files of deploy/, beside nginx, which has its own rig."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from deployment.servers import nginx
from helpers.running import (
    LIMIT,
    ROOT,
    blocks,
    hold_port,
    needs,
    replaced,
    run,
    wait_for,
)

PATH = f"{os.environ['PATH']}:/usr/sbin"


class Kind(NamedTuple):
    """A proxy, and what differs on the machine of a test from what the page installs."""

    file: str
    places: dict[str, str]
    frame: str
    command: str


KINDS = {
    "apache2": Kind(
        "apache.conf",
        {
            "*:80": "*:{plain_port}",
            "*:443": "*:{port}",
            "${{APACHE_LOG_DIR}}/gardening.log": "{folder}/log",
            "/etc/ssl/certs/gardening.pem": "{folder}/certificate.pem",
            "/etc/ssl/private/gardening.key": "{folder}/key.pem",
        },
        """
        ServerRoot {folder}
        DefaultRuntimeDir {folder}
        PidFile {folder}/pid
        ErrorLog /dev/stderr
        LogLevel crit
        User www-data
        Listen 127.0.0.1:{plain_port}
        Listen 127.0.0.1:{port}
        Define APACHE_RUN_DIR {folder}
        {modules}
        {configuration}
        """,
        "apache2 -d {folder} -f {folder}/configuration -D FOREGROUND",
    ),
    "haproxy": Kind(
        "haproxy.cfg",
        {
            "chroot /var/lib/haproxy\n    user haproxy\n    group haproxy\n": "",
            "log /dev/log": "log stderr format raw",
            "bind :::80 v4v6": "bind 127.0.0.1:{plain_port}",
            "bind :::443 v4v6": "bind 127.0.0.1:{port}",
            "/etc/haproxy/gardening.pem": "{folder}/both.pem",
        },
        "{configuration}",
        "haproxy -db -f {folder}/configuration",
    ),
    "caddy": Kind(
        "Caddyfile",
        {
            "gardening.example.org {{": "https://gardening.example.org, https://127.0.0.1 {{",
            "/etc/caddy/gardening.pem": "{folder}/certificate.pem",
            "/etc/caddy/gardening.key": "{folder}/key.pem",
        },
        """
        {{
            admin off
            skip_install_trust  # or this machine would trust an authority of the test's
            grace_period 1s
            http_port {plain_port}
            https_port {port}
            servers {{
                protocols h1 h2
            }}
        }}
        {configuration}
        """,
        "caddy run --adapter caddyfile --config {folder}/configuration",
    ),
}


PROXIES = [pytest.param(name, marks=needs(name)) for name in ("nginx", *KINDS)]


def apache_modules() -> str:
    """Debian's own lines for what it turns on, and for what the page does."""
    [install] = [each for each in blocks("docs/operations.md") if "a2enmod" in each]
    [added] = re.findall("a2enmod --quiet (.*) &&", install)
    loaded = "mpm_event authz_core alias deflate filter mime reqtimeout socache_shmcb"
    loaded = f"{loaded} proxy {added}"
    folder = "/etc/apache2/mods-available"
    return "".join(
        f"Include {folder}/{name}.load\nIncludeOptional {folder}/{name}.con[f]\n"
        for name in loaded.split()
    )


def use_its_words(file: Path) -> None:
    """The page's own lines for the Caddy that is installed."""
    page = "".join(blocks("docs/operations.md", "Caddy"))
    [script] = re.findall(r"case \$\(caddy version\).*?esac", page, re.DOTALL)
    run("sh", "-ec", f"CONFIGURATION={file}\n{script}")


@contextmanager
def start_proxy(
    name: str, folder: Path, upstream: int, changes: dict[str, str] | None = None
) -> Iterator[nginx.Proxy]:
    """The proxy with its file of deploy/, in front of the port `upstream`."""
    if name == "nginx":
        with nginx.proxy(folder, upstream, changes) as running:
            yield running
        return
    kind = KINDS[name]
    nginx.certify(folder)
    both = (folder / "certificate.pem").read_text() + (folder / "key.pem").read_text()
    (folder / "both.pem").write_text(both)
    with hold_port() as plain, hold_port() as encrypted:
        ports = plain_port, port = plain.getsockname()[1], encrypted.getsockname()[1]
        given = {"folder": folder, "plain_port": plain_port, "port": port}
        places = {
            old.format(): new.format(**given) for old, new in kind.places.items()
        } | {"127.0.0.1:8000": f"127.0.0.1:{upstream}"}
        file = shutil.copy(ROOT / "deploy" / kind.file, folder / "configuration")
        if name == "caddy":
            use_its_words(file)
        configuration = replaced(file.read_text(), places | (changes or {}))
        if name == "apache2":
            given["modules"] = apache_modules()
        framed = kind.frame.format(configuration=configuration, **given)
        (folder / "configuration").write_text(framed)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                kind.command.format(**given).split(),
                env={"PATH": PATH, "HOME": str(folder)},
                stderr=log,
            )

        def listens() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            with suppress(ConnectionRefusedError):
                for number in ports:
                    socket.create_connection(("127.0.0.1", number), LIMIT).close()
                return True
            return False

        try:
            wait_for(listens)
            yield nginx.Proxy(plain_port, 0, port, 0, folder / "log")
        finally:
            process.terminate()
            process.wait(LIMIT)
