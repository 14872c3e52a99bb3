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
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rigs.running import (
    BIN,
    LIMIT,
    PROJECTS,
    ROOT,
    Client,
    blocks,
    gunicorn,
    store_on,
)

PAGE = "docs/litestream.md"
LITESTREAM = shutil.which("litestream", path=f"{BIN}:{os.environ['PATH']}")
OWNER = os.getuid() or 65534  # root gives the files away, as on the page

pytestmark = pytest.mark.skipif(not LITESTREAM, reason="litestream is not installed")

Place = Callable[[str], str]


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


def change(client: Client, project_url: str, seconds: float) -> dict[int, float]:
    """When each change was acknowledged, by the version that it made."""
    acknowledged, end = {}, time.monotonic() + seconds
    while time.monotonic() < end:
        project = client.call("PUT", project_url, {"name": f"{time.monotonic()}"})[1]
        acknowledged[project["version"]] = time.monotonic()
    return acknowledged


def restored_version(path: str) -> int:
    with closing(store_on(path)) as store:
        [project] = json.loads(store.list_projects("ann").document)
    return project["version"]


def test_copy_loses_a_second_at_most_and_after_an_orderly_stop_nothing(
    block, place, environment, token, path
):
    with (
        litestream(place) as copier,
        gunicorn(environment) as (service, port),
        Client(port, token) as client,
    ):
        project_url = f"{PROJECTS}/{client.call('POST', PROJECTS, {})[1]['id']}"
        acknowledged = change(client, project_url, 2)
        killed = time.monotonic()
        copier.kill()
        os.killpg(service.pid, signal.SIGKILL)

    restore = block("litestream restore")
    paste(restore)
    assert sorted(os.listdir(Path(path).parent)) == [
        "gardening.db",
        "gardening.db-lock",
    ]
    restored = os.stat(path)
    assert (restored.st_uid, restored.st_mode & 0o777) == (OWNER, 0o600)

    moment = datetime.now(UTC)
    with (
        litestream(place),
        gunicorn(environment) as (service, port),
        Client(port, token) as client,
    ):
        before = client.call("GET", project_url)[1]["version"]
        assert acknowledged.get(before + 1, killed) > killed - 1
        later = change(client, project_url, 1)
        service.terminate()
        service.wait(LIMIT)
    newest = paste(block("litestream ltx")).split()[-1]
    assert datetime.fromisoformat(newest) >= moment.replace(microsecond=0)
    paste(restore)
    assert restored_version(path) == max(later)

    earlier = f" -timestamp {moment.isoformat()} -o restored.db"
    paste(restore.replace(" -o restored.db", earlier))
    assert restored_version(path) == before
