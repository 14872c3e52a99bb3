"""What README.md tells to paste does what it says; the versions are one."""

import json
import os
import re
import tomllib
from contextlib import closing

import pytest

from engines.sqlite import SQLite
from helpers.running import BIN, ROOT, blocks, flask_run, needs, run
from helpers.testservice import copy_service
from store import Store

VARYING = {
    r"gardening_[\w-]{43}\b": "TOKEN",
    r"\b[0-9a-f]{24}\b": "ID",
    r"\b1\d{12}\b": "MILLISECONDS",
    r"\b20\d\d-\d\d-\d\d \d\d:\d\d\b": "TIME",
    r"(?m)^(Server|Date): .*$": r"\1",
    r"\r": "",
}


def without_what_varies(text):
    for pattern, name in VARYING.items():
        text = re.sub(pattern, name, text)
    return text


@pytest.fixture
def clone(tmp_path):
    """A folder with the service and a virtual environment."""
    copy_service(tmp_path)
    (tmp_path / ".venv").symlink_to(BIN.parent)
    return tmp_path


@needs("curl")
def test_first_calls_and_tokens_print_what_the_readme_says(clone, monkeypatch):
    monkeypatch.delenv("FLASK_DATABASE", raising=False)

    def paste(heading, address):
        script = "".join(blocks("README.md", heading))
        script = script.replace("http://127.0.0.1:5000", address)
        ended = run("sh", folder=clone, input=script.replace("curl", "curl -sS"))
        printed = "".join(blocks("README.md", heading, "text"))
        # The service ends no document with a line feed.
        found, expected = (
            "".join(without_what_varies(t).split()) for t in (ended.stdout, printed)
        )
        assert found == expected
        return ended.stderr

    with flask_run(os.environ, folder=clone) as (address, _):
        told = "The token's ID is {}.\n{} is a new account.\n"
        assert paste("First calls", address) == told.format(1, "ann")
        assert paste("Tokens", address) == told.format(2, "bob")
    with closing(Store(SQLite(str(clone / "instance/gardening.db")))) as store:
        assert [token.account for token in store.list_tokens()] == ["ann"]


def test_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    described = json.loads((ROOT / "openapi.json").read_text())["info"]["version"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[(.+?)\] - \d{4}-\d\d-\d\d$", changes, re.MULTILINE)
    assert project["version"] == described == newest[1]


def test_links_lead_to_files():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for link in re.findall(r"\]\((?!http)([^)]+)", page.read_text()):
            file, _, heading = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), f"{page}: {link}"
            headings = re.findall(r"(?m)^#+ (.*)$", target.read_text())
            anchors = [
                re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings
            ]
            assert not heading or heading in anchors, f"{page}: {link}"
