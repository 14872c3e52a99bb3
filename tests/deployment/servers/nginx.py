"""A real nginx with the files of deploy/, for whatever a test puts behind it."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from helpers.running import LIMIT, ROOT, blocks, replaced, run

PROGRAM = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
HOST = "gardening.example.org"
ELLIPTIC = "ec -pkeyopt ec_paramgen_curve:P-256"  # the page's kind of key
STRICT = {"rate=50r/s": "rate=1r/m", "burst=100": "burst=1"}  # changes: two requests a minute
FRAME = """
daemon off; error_log stderr crit; pid {folder}/pid; {user}
events {{}}
http {{
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    gzip on;  # as Debian has it
    {configuration}
}}
"""


def lines_of_the_page(pattern: str) -> str:
    """The part of the page's block for nginx that the pattern describes."""
    [block] = blocks("docs/operations.md", "nginx")
    [lines] = re.findall(pattern, block, re.DOTALL | re.MULTILINE)
    return lines


class Proxy(NamedTuple):
    """The ports of a running nginx."""

    plain_port: int
    port: int  # of https
    log: Path


def certify(folder: Path, key: str) -> dict[str, str]:
    """Create a certificate by the page's own lines, and say where it is."""
    places = {
        "/etc/ssl/certs/gardening.pem": f"{folder}/certificate.pem",
        "/etc/ssl/private/gardening.key": f"{folder}/key.pem",
    }
    script = lines_of_the_page(r"^ *openssl .*\.pem$")
    run("sh", "-c", f"HOST={HOST}\n{replaced(script, places | {ELLIPTIC: key})}")
    return places


@contextmanager
def proxy(
    folder: Path,
    upstream: int,
    changes: dict[str, str] | None = None,
    origin: str | None = None,
    key: str = ELLIPTIC,
) -> Iterator[Proxy]:
    """nginx with deploy/nginx.conf, and an origin if one is named.

    It stands in front of the port `upstream`, and writes its log to `folder`/access.log.
    """
    deploy, snippets = ROOT / "deploy", folder / "snippets"
    snippets.mkdir()
    if origin:
        cors = (deploy / "nginx-cors.conf").read_text()
        cors = replaced(cors, {"https://app.example.org": origin})
        (snippets / "gardening-cors.conf").write_text(cors)
    places = certify(folder, key)
    served = replaced(
        (deploy / "nginx.conf").read_text(),
        places
        | {
            "/etc/nginx/snippets/": f"{snippets}/",
            "/var/log/nginx/gardening.log": f"{folder}/access.log",
            "/var/log/nginx/error.log": f"{folder}/error.log",
            "unix:/run/gardening/socket": f"127.0.0.1:{upstream}",
            "rate=50r/s": "rate=100000r/s",
        }
        | (changes or {}),
    )
    with running(folder, served) as ports:
        yield Proxy(*ports, folder / "access.log")


@contextmanager
def another_site(folder: Path, upstream: int) -> Iterator[int]:
    """The port of a site of its own, with the page's location for a prefix pasted into it."""
    [location] = blocks("docs/operations.md", "Beside another site", "nginx")
    location = replaced(location, {"unix:/run/gardening/socket:": f"127.0.0.1:{upstream}"})
    site = "gzip_types *; gzip_min_length 0; location / { return 200 'another site'; }"
    with running(
        folder, f"server {{ listen 80; server_name {HOST}; {site}\n{location} }}"
    ) as ports:
        yield ports[0]


@contextmanager
def running(folder: Path, configuration: str) -> Iterator[list[int]]:
    """nginx with these servers: the ports of their lines `listen`."""
    with ExitStack() as listeners:
        ports, descriptors = [], []

        def listen(found: re.Match[str]) -> str:
            """The line for a port that is already bound."""
            listener = listeners.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports.append(listener.getsockname()[1])
            descriptors.append(listener.fileno())
            return f"listen 127.0.0.1:{ports[-1]}{found[1]};"

        configuration = re.sub(r"\blisten \[::\]:.*?;", "", configuration)
        configuration = re.sub(r"\blisten \d+(.*?);", listen, configuration)
        user = "user root;" if os.getuid() == 0 else ""
        framed = FRAME.format(folder=folder, user=user, configuration=configuration)
        (folder / "nginx.conf").write_text(framed)
        process = subprocess.Popen(
            [PROGRAM, "-p", folder, "-e", "stderr", "-c", folder / "nginx.conf"],
            env={"NGINX": "".join(f"{number};" for number in descriptors)},
            pass_fds=descriptors,
        )
    try:
        yield ports
    finally:
        process.terminate()
        process.wait(LIMIT)
