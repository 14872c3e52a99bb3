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

from deployment.servers.oddproxy import Odd, odd_proxy
from helpers.running import BIN, LIMIT, PROJECTS, ROOT, blocks, flask_run, replaced, run
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
CLIENTS = pytest.mark.parametrize(
    "language, command", [("python", ON_THE_PAGE), ("js", "node client.mjs")]
)


def run_client(folder, address, token, language, command, status=0):
    """The page's client, which has ended."""
    heading = "A short client"
    [program], [script] = (blocks("docs/api.md", heading, each) for each in (language, "sh"))
    (folder / command.split()[-1]).write_text(program)
    (folder / ".venv").symlink_to(BIN.parent)
    script = replaced(script, {ADDRESS: address, ON_THE_PAGE: command})
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    pasted = f"TOKEN={token}\n{script}"
    return run("sh", "-e", folder=folder, environment=environment, input=pasted, status=status)


@CLIENTS
def test_client_prints_what_the_page_says(tmp_path, gardening, language, command):
    """All Projects of two pages, and one of its own, though a response is lost."""
    for _ in range(100):
        call_projects(gardening.url, gardening.token, "POST", {"name": "Park"})
    token = gardening.issue_token(fail=["lost"])
    printed = run_client(tmp_path, gardening.url, token, language, command).stdout
    assert printed.splitlines()[-101:] == ["Park 1"] * 100 + ["City park 2"]
    assert gardening.left(token) == []


@pytest.fixture
def elsewhere(gardening):
    """Another origin, and what it is asked."""
    asked = []
    with odd_proxy(gardening.url, lambda method, _: asked.append(method)) as address:
        yield address, asked


@CLIENTS
def test_client_follows_no_link_but_next(tmp_path, gardening, elsewhere, language, command):
    address, asked = elsewhere
    for _ in range(100):
        call_projects(gardening.url, gardening.token, "POST", {"name": "Park"})
    link = f'<{address}/policy>; rel="deprecation"'
    with odd_proxy(gardening.url, lambda *_: None, link) as proxy:
        printed = run_client(tmp_path, proxy, gardening.token, language, command).stdout
    assert printed.splitlines()[-101:] == ["Park 1"] * 100 + ["City park 2"]
    assert asked == []


@CLIENTS
@pytest.mark.parametrize("odd", ["link", "redirect", "no redirect"])
def test_client_sends_the_token_nowhere_else(
    tmp_path, gardening, elsewhere, language, command, odd
):
    """And a change that was redirected does not count as made."""
    address, asked = elsewhere
    link = f'<{address}{PROJECTS}>; rel="next"' if odd == "link" else None
    redirect = Odd(307 if odd == "redirect" else 300, location=address + PROJECTS)

    def choose(method, _):
        return redirect if method == "PUT" and not link else None

    with odd_proxy(gardening.url, choose, link) as proxy:
        run_client(tmp_path, proxy, gardening.token, language, command, status=1)
    assert asked == []
