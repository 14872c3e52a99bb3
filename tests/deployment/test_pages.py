"""README.md and docs/api.md, pasted block by block, print what they say."""

import os
import re
import shutil
import signal
import subprocess
import threading
from contextlib import contextmanager
from itertools import takewhile

import pytest

from helpers.running import BIN, LIMIT, ROOT, blocks, flask_run, replaced, run
from helpers.testservice import call_projects, copy_service

ADDRESS = "http://127.0.0.1:5000"
VARYING = {
    r"gardening_[\w-]{43}\b": "TOKEN",
    r"\b[0-9a-f]{24}\b": "ID",
    r"\b1\d{12}\b": "MILLISECONDS",
    r"\b20\d\d-\d\d-\d\d \d\d:\d\d\b": "TIME",
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


@contextmanager
def running(script, folder, until, **environment):
    """The lines that the script prints before the one with these words; then it goes on."""
    with subprocess.Popen(
        ["sh", "-ec", script],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as shell:

        def end():
            os.killpg(shell.pid, signal.SIGKILL)

        limit = threading.Timer(10 * LIMIT, end)  # packages are installed
        limit.start()
        try:
            yield list(takewhile(lambda line: until not in line, shell.stdout))
        finally:
            limit.cancel()
            end()


def test_quick_start_runs_the_service(tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    copy_service(repository)
    for file in ("constraints.txt", "requirements.txt"):
        shutil.copy(ROOT / file, repository)
    commit = "git -c user.name=x -c user.email=x@example.org commit --quiet -m x"
    run("sh", "-ec", f"git init --quiet && git add . && {commit}", folder=repository)
    [script] = blocks("README.md", "Quick start")
    here = {
        "https://git.example.org/gardening.git": f"{repository} gardening",
        "flask run": "flask run --port=0",
    }
    with running(replaced(script, here), tmp_path, "CTRL+C") as printed:
        assert " * Running on http://127.0.0.1:" in "".join(printed)
    assert (tmp_path / "gardening/instance/gardening.db").exists()


def test_first_call_and_tokens_print_what_the_readme_says(clone):
    with flask_run(os.environ, folder=clone) as (address, _):
        for heading in ("First call", "Tokens"):
            script = "".join(blocks("README.md", heading)).replace(ADDRESS, address)
            script = "exec 2>&1\n" + script.replace("curl", "curl -sS")
            printed = run("sh", folder=clone, input=script).stdout
            expected = "".join(blocks("README.md", heading, "text"))
            # The service ends no document with a line feed.
            found, expected = (
                without_what_varies(text).replace("\n", "") for text in (printed, expected)
            )
            assert found == expected
        listed = run(BIN / "flask", "token", "list", folder=clone).stdout
        assert (" ann" in listed, " bob" in listed) == (True, False)


def test_gunicorn_starts_as_the_readme_says(clone):
    run(BIN / "flask", "init-db", folder=clone)  # `flask run` comes before it on the page
    [script] = blocks("README.md", "In production")
    free_port = {"GARDENING_BIND": "127.0.0.1:0"}
    with running(script, clone, "Using worker", **free_port) as printed:
        assert "Listening at: http://127.0.0.1:" in "".join(printed)


ON_THE_PAGE = ".venv/bin/pip install requests && .venv/bin/python client.py"


@pytest.mark.parametrize("language, command", [("python", ON_THE_PAGE), ("js", "node client.mjs")])
def test_client_prints_what_the_page_says(tmp_path, gardening, language, command):
    """All Projects of two pages, and one of its own, though a response is lost."""
    heading = "A client in 25 lines"
    [program], [script] = (blocks("docs/api.md", heading, each) for each in (language, "sh"))
    (tmp_path / command.split()[-1]).write_text(program)
    (tmp_path / ".venv").symlink_to(BIN.parent)
    for _ in range(100):
        call_projects(gardening.url, gardening.token, "POST", {"name": "Park"})
    script = replaced(script, {ADDRESS: gardening.url, ON_THE_PAGE: command})
    token = gardening.issue_token(fail=["lost"])
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    pasted = f"TOKEN={token}\n{script}"
    printed = run("sh", "-e", folder=tmp_path, environment=environment, input=pasted)
    assert printed.stdout.splitlines()[-101:] == ["Park 1"] * 100 + ["City park 2"]
    assert gardening.left(token) == []
