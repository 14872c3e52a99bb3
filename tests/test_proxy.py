"""The service behind a real nginx, set up with the README's own lines."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager

import pytest
from conftest import PROJECTS, ROOT, Client, at_once, gunicorn

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
FRAME = """
daemon off; error_log stderr; pid {folder}/pid; {user}
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    {block}
}}
"""

pytestmark = pytest.mark.skipif(not NGINX, reason="nginx is not installed")


@contextmanager
def proxy(folder, upstream, keepalive="60s"):
    """nginx as the README has it, in front of the port; its own port."""
    readme = (ROOT / "README.md").read_text()
    block, prefix = re.findall(r"```nginx\n(.*?)```", readme, re.DOTALL)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for old, new in {
            "location / {": prefix + "\n    location / {",
            "listen 80;": f"listen 127.0.0.1:{port};",
            "127.0.0.1:8000": f"127.0.0.1:{upstream}",
            "rate=50r/s": "rate=100000r/s",
            "keepalive_timeout 60s": f"keepalive_timeout {keepalive}",
        }.items():
            assert block.count(old) == 1
            block = block.replace(old, new)
        user = "user root;" if os.getuid() == 0 else ""
        configuration = folder / "nginx.conf"
        configuration.write_text(FRAME.format(folder=folder, user=user, block=block))
        process = subprocess.Popen(
            [NGINX, "-p", folder, "-e", "stderr", "-c", configuration],
            env={"NGINX": f"{listener.fileno()};"},  # the socket, already bound
            pass_fds=[listener.fileno()],
        )
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


def mixed_load(port, token, count, meanwhile=lambda number, turn: None):
    """The statuses of so many calls of each of 8 clients on kept-alive connections."""
    statuses = []

    def work(number):
        with Client(port, token) as client:
            for turn in range(count):
                meanwhile(number, turn)
                if turn % 4 == 0:
                    status, project = client.call("POST", PROJECTS, {"name": "x"})
                    url = f"{PROJECTS}/{project['id']}"
                elif turn % 4 == 1:
                    status, _ = client.call("PUT", url, {"name": "y"})
                elif turn % 4 == 2:
                    status, _ = client.call("GET", url)
                else:
                    status, _ = client.call("DELETE", url)
                statuses.append(status)

    at_once(work)
    return statuses


def test_thousands_of_requests_pass(environment, token, tmp_path):
    with gunicorn(environment) as (_, upstream), proxy(tmp_path, upstream) as port:
        statuses = mixed_load(port, token, 400)
    assert {status: statuses.count(status) for status in set(statuses)} == {
        201: 800,
        200: 1600,
        204: 800,
    }


def test_reload_under_load_drops_nothing(environment, token, tmp_path):
    def reload(number, turn):
        if (number, turn % 400) == (0, 200):
            os.kill(process.pid, signal.SIGHUP)

    with (
        gunicorn(environment) as (process, upstream),
        proxy(tmp_path, upstream) as port,
    ):
        statuses = mixed_load(port, token, 1200, reload)
    assert len(statuses) == 8 * 1200
    assert set(statuses) == {200, 201, 204}


def test_no_idle_connection_ends_in_a_502(environment, token, tmp_path):
    def pause(number, turn):
        # Around what the proxy (1 s) and the service (2 s) keep an idle connection.
        time.sleep([0.95, 0.99, 1.0, 1.01, 1.05, 1.98, 2.0, 2.02][number])

    with (
        gunicorn(environment, "--keep-alive=2") as (_, upstream),
        proxy(tmp_path, upstream, keepalive="1s") as port,
    ):
        statuses = mixed_load(port, token, 5, pause)
    assert len(statuses) == 40
    assert set(statuses) == {200, 201, 204}


def test_large_body_is_refused_by_either(environment, token, tmp_path):
    with (
        gunicorn(environment) as (_, upstream),
        proxy(tmp_path, upstream) as port,
        Client(port, token) as client,
    ):
        assert client.call("POST", PROJECTS, {"name": "x" * 64 * 1024})[0] == 413
        client.close()
        client.request("POST", PROJECTS, "x" * 1024 * 1024, client.authorization)
        assert client.getresponse().status == 413  # nginx's own


@pytest.mark.parametrize("prefix", ["", "/garden"])
def test_location_leads_back_through_the_proxy(environment, token, tmp_path, prefix):
    with (
        gunicorn(environment) as (_, upstream),
        proxy(tmp_path, upstream) as port,
        Client(port, token) as client,
    ):
        _, headers, content = client.ask("POST", prefix + PROJECTS, {})
        assert headers["Location"].startswith(f"{prefix}{PROJECTS}/")
        assert client.call("GET", headers["Location"]) == (200, json.loads(content))
