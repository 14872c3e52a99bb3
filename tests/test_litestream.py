"""The copy that Litestream keeps, set up and restored with the page's own lines.

test_operations.py runs the unit under systemd.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path

import pytest
from rigs.running import (
    BIN,
    LIMIT,
    PROJECTS,
    ROOT,
    Client,
    at_once,
    blocks,
    gunicorn,
    store_on,
)

PAGE = "docs/litestream.md"
LITESTREAM = shutil.which("litestream", path=f"{BIN}:{os.environ['PATH']}")
OWNER = os.getuid() or 65534  # root gives the files away, as on the page

pytestmark = pytest.mark.skipif(not LITESTREAM, reason="litestream is not installed")

Place = Callable[[str], str]
Write = tuple[
    float, str, int
]  # when it was acknowledged, the Project's id, its version


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "data").mkdir()
    return f"{tmp_path}/data/gardening.db"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Gives a block or a file of deploy/ the folders of the test."""

    def place(text: str) -> str:
        for old, new in {
            "/opt/gardening/.venv/bin/litestream": LITESTREAM,
            "/etc/litestream.yml": tmp_path / "litestream.yml",
            "/var/backups/gardening-litestream": tmp_path / "copy",
            "/var/lib/gardening": tmp_path / "data",
            "-o gardening -g gardening ": f"-o {OWNER} -g {OWNER} ",
            "gardening:gardening": f"{OWNER}:{OWNER}",
        }.items():
            text = text.replace(old, str(new))
        return text

    (tmp_path / "copy").mkdir()
    configuration = (ROOT / "deploy/litestream.yml").read_text()
    (tmp_path / "litestream.yml").write_text(place(configuration))
    return place


@pytest.fixture
def block(place: Place) -> Place:
    """The page's one block with these words, for the test's folder."""

    def block(words: str) -> str:
        [found] = [block for block in blocks(PAGE) if words in block]
        return place(found)

    return block


def paste(script: str) -> str:
    """What the commands print, without systemctl: here a test starts and stops."""
    command = ["sh", "-c", f"systemctl() {{ :; }}\n{script}"]
    return subprocess.check_output(command, timeout=LIMIT, umask=0o022, text=True)


@contextmanager
def litestream(place: Place) -> Iterator[subprocess.Popen]:
    """Litestream as the unit starts it, and in the end stops it."""
    unit = (ROOT / "deploy/gardening-litestream.service").read_text()
    [command] = re.findall(r"\nExecStart=(.*)", place(unit))
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
                time.sleep(0.02)
                if number == 0 and time.monotonic() > deadline:
                    end()

    at_once(work)
    return acknowledged


def lost(path: str, acknowledged: list[Write]) -> list[Write]:
    """Those of the writes that are not in the database."""
    with closing(store_on(path)) as store:
        projects = json.loads(store.list_projects("ann").document)
    versions = {project["id"]: project["version"] for project in projects}
    return [write for write in acknowledged if versions.get(write[1], 0) < write[2]]


def test_copy_loses_a_second_at_most_and_after_an_orderly_stop_nothing(
    block, place, environment, token, path
):
    with litestream(place) as copier, gunicorn(environment) as (service, port):
        killed = []

        def kill() -> None:
            killed.append(time.monotonic())
            copier.kill()
            os.killpg(service.pid, signal.SIGKILL)

        acknowledged = write(port, token, 2, kill)
    old = [write for write in acknowledged if write[0] < killed[0] - 1]
    assert old

    restore = block("litestream restore")
    paste(restore)
    assert sorted(os.listdir(Path(path).parent)) == [
        "gardening.db",
        "gardening.db-lock",
    ]
    restored = os.stat(path)
    assert (restored.st_uid, restored.st_mode & 0o777) == (OWNER, 0o600)

    moment = datetime.now(UTC)
    with litestream(place), gunicorn(environment) as (service, port):
        assert lost(path, old) == []
        later = write(port, token, 1, service.terminate)
        service.wait(LIMIT)
    newest = paste(block("litestream ltx")).split()[-1]
    assert datetime.fromisoformat(newest) >= moment.replace(microsecond=0)
    paste(restore)
    assert lost(path, old + later) == []

    earlier = f" -timestamp {moment.isoformat()} -o restored.db"
    paste(restore.replace(" -o restored.db", earlier))
    assert lost(path, old + later) == later


def test_copy_goes_on_without_its_corrupted_state(
    block, place, environment, token, path, capfd
):
    state = Path(path).with_name(".gardening.db-litestream")
    acknowledged = []

    def write_and_stop() -> None:
        with litestream(place), gunicorn(environment) as (service, port):
            acknowledged.extend(write(port, token, 0.5, service.terminate))

    write_and_stop()
    os.truncate(max(state.glob("ltx/0/*")), 0)
    write_and_stop()
    assert "ltx file corrupted" in capfd.readouterr().out
    shutil.rmtree(state)
    write_and_stop()
    paste(block("litestream restore"))
    assert lost(path, acknowledged) == []
