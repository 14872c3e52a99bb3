"""The copy that Litestream keeps, set up and restored with the page's own lines."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path

import pytest
from running import BIN, PROJECTS, ROOT, Client, at_once, gunicorn

PAGE = ROOT / "OPERATIONS.md"
LITESTREAM = shutil.which("litestream", path=f"{BIN}:{os.environ['PATH']}")
LIMIT = 30  # seconds for a process to do its work or to end
OWNER = os.getuid() or 65534  # root gives the files away, as on the page

pytestmark = pytest.mark.skipif(not LITESTREAM, reason="litestream is not installed")

Block = Callable[[str, str], str]
Write = tuple[
    float, str, int
]  # when it was acknowledged, the Project's id, its version


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "data").mkdir()
    return f"{tmp_path}/data/gardening.db"


@pytest.fixture
def block(tmp_path: Path, path: str) -> Block:
    """The page's one block of the language with these words, for the test's folder."""

    def block(language: str, words: str) -> str:
        blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
        [found] = [block for block in blocks if words in block]
        for old, new in {
            "/opt/gardening/.venv/bin/litestream": LITESTREAM,
            "/etc/litestream.yml": tmp_path / "litestream.yml",
            "/var/backups/gardening": tmp_path / "copy",
            "/var/lib/gardening": tmp_path / "data",
            "-o gardening ": f"-o {OWNER} ",
            "chown gardening ": f"chown {OWNER} ",
        }.items():
            found = found.replace(old, str(new))
        return found

    (tmp_path / "litestream.yml").write_text(block("yaml", "monitor-interval"))
    run(block("sh", "enable --now gardening-litestream"))
    return block


def run(script: str) -> str:
    """What the commands print, without systemctl: here a test starts and stops."""
    command = ["sh", "-c", f"systemctl() {{ :; }}\n{script}"]
    return subprocess.check_output(command, timeout=LIMIT, umask=0o022, text=True)


@contextmanager
def litestream(block: Block) -> Iterator[subprocess.Popen]:
    """Litestream as the unit starts it, and in the end stops it."""
    [command] = re.findall(r"\nExecStart=(.*)", block("ini", "=Litestream"))
    with subprocess.Popen(shlex.split(command)) as process:
        try:
            yield process
            process.terminate()
            process.wait(LIMIT)
        finally:
            process.kill()


def write(port: int, token: str, seconds: float, end: Callable) -> list[Write]:
    """What was acknowledged until the service, after so many seconds, was ended."""
    acknowledged = []

    def work(number: int) -> None:
        with Client(port, token) as client, suppress(OSError, HTTPException):
            id = client.call("POST", PROJECTS, {})[1]["id"]
            deadline = time.monotonic() + seconds
            while True:
                members = {"name": f"{time.monotonic()}"}
                project = client.call("PUT", f"{PROJECTS}/{id}", members)[1]
                acknowledged.append((time.monotonic(), id, project["version"]))
                if number == 0 and time.monotonic() > deadline:
                    end()

    at_once(work)
    return acknowledged


def lost(port: int, token: str, acknowledged: list[Write]) -> list[Write]:
    """Those of the writes that the service does not know."""
    with Client(port, token) as client:
        projects = client.call("GET", PROJECTS)[1]
    versions = {project["id"]: project["version"] for project in projects}
    return [write for write in acknowledged if versions.get(write[1], 0) < write[2]]


def test_copy_loses_a_second_at_most_and_after_an_orderly_stop_nothing(
    block, environment, token, path
):
    with litestream(block) as copier, gunicorn(environment) as (service, port):
        killed = []

        def kill() -> None:
            killed.append(time.monotonic())
            copier.kill()
            os.killpg(service.pid, signal.SIGKILL)

        acknowledged = write(port, token, 2, kill)
    old = [write for write in acknowledged if write[0] < killed[0] - 1]
    assert old

    restore = block("sh", "litestream restore")
    run(restore)
    assert sorted(os.listdir(Path(path).parent)) == [
        "gardening.db",
        "gardening.db-lock",
    ]
    restored = os.stat(path)
    assert (restored.st_uid, restored.st_mode & 0o777) == (OWNER, 0o600)

    moment = datetime.now(UTC)
    with litestream(block), gunicorn(environment) as (service, port):
        assert lost(port, token, old) == []
        later = write(port, token, 1, service.terminate)
        service.wait(LIMIT)
    newest = run(block("sh", "litestream ltx")).split()[-1]
    assert datetime.fromisoformat(newest) >= moment.replace(microsecond=0)
    run(restore)
    with gunicorn(environment) as (_, port):
        assert lost(port, token, old + later) == []

    earlier = f" -timestamp {moment.isoformat()} -o restored.db"
    run(restore.replace(" -o restored.db", earlier))
    with gunicorn(environment) as (_, port):
        assert lost(port, token, old + later) == later


def test_copy_goes_on_without_its_corrupted_state(
    block, environment, token, path, capfd
):
    state = Path(path).with_name(".gardening.db-litestream")
    acknowledged = []

    def write_and_stop() -> None:
        with litestream(block), gunicorn(environment) as (service, port):
            acknowledged.extend(write(port, token, 0.5, service.terminate))

    write_and_stop()
    os.truncate(max(state.glob("ltx/0/*")), 0)
    write_and_stop()
    assert "ltx file corrupted" in capfd.readouterr().out
    shutil.rmtree(state)
    write_and_stop()
    run(block("sh", "litestream restore"))
    with gunicorn(environment) as (_, port):
        assert lost(port, token, acknowledged) == []


@pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed"
)
def test_unit_is_valid_and_stops_after_the_service(block, tmp_path):
    unit = tmp_path / "gardening-litestream.service"
    unit.write_text(block("ini", "=Litestream"))
    assert "\nBefore=gardening.service\n" in unit.read_text()
    verified = subprocess.run(
        ["systemd-analyze", "verify", unit],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    # It complains of the machine's other units as well.
    assert "gardening" not in verified.stderr
