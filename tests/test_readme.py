"""What README.md tells to paste does what it says."""

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from running import BIN, ROOT

from store import SQLite, Store

README = ROOT / "README.md"
VARYING = {
    r"gardening_[\w-]{43}\b": "TOKEN",
    r"\b[0-9a-f]{24}\b": "ID",
    r"\b1\d{12}\b": "MILLISECONDS",
    r"\b20\d\d-\d\d-\d\d \d\d:\d\d\b": "TIME",
    r"(?m)^(Server|Date): .*$": r"\1",
    r"\r": "",
}


def needs(program: str) -> pytest.MarkDecorator:
    missing = not shutil.which(program)
    return pytest.mark.skipif(missing, reason=f"{program} is not installed")


def blocks(page: Path, heading: str, language: str = "sh") -> list[str]:
    """The blocks of this language under the heading."""
    [section] = re.findall(
        rf"^## {heading}\n(.*?)(?=^## |\Z)", page.read_text(), re.DOTALL | re.MULTILINE
    )
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def paste(block: str, folder: Path, **variables: str) -> str:
    """What a shell prints for the block, which must not complain."""
    shell = subprocess.run(
        ["sh"],
        input=block,
        cwd=folder,
        env=os.environ | variables,
        text=True,
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert shell.stderr == ""
    return shell.stdout


def settled(text: str) -> str:
    for pattern, name in VARYING.items():
        text = re.sub(pattern, name, text)
    return text


@contextmanager
def quick_start(folder: Path) -> Iterator[str]:
    """The service as it runs in a clone, with a virtual environment; its address."""
    for file in [*ROOT.glob("*.py"), ROOT / "openapi.json"]:
        shutil.copy(file, folder)
    (folder / ".venv").symlink_to(BIN.parent)
    command = [".venv/bin/flask", "run", "--port=0"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLASK_")}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        limit = threading.Timer(60, server.kill)
        limit.start()
        try:
            yield next(filter(None, map(announced, server.stderr)))
        finally:
            limit.cancel()
            server.kill()


def announced(line: str) -> str | None:
    found = re.search(r"Running on (\S+)", line)
    return found and found[1]


@needs("curl")
def test_first_calls_and_tokens_print_what_the_readme_says(tmp_path, monkeypatch):
    monkeypatch.delenv("FLASK_DATABASE", raising=False)
    [calls], [printed] = (blocks(README, "First calls", x) for x in ("sh", "text"))
    [tokens], [shown] = (blocks(README, "Tokens", x) for x in ("sh", "text"))
    assert calls.count("http://127.0.0.1:5000") == 1
    with quick_start(tmp_path) as address:
        found = paste(calls.replace("http://127.0.0.1:5000", address), tmp_path)
        assert settled(found) == settled(printed)
        assert settled(paste(tokens, tmp_path)) == settled(shown)
    store = Store(SQLite(str(tmp_path / "instance/gardening.db")))
    assert [account for _, _, _, account in store.list_tokens()] == ["ann"]
