"""The settings, commands, fields, errors and versions on the pages are the program's."""

import inspect
import json
import re
import tomllib
from importlib.metadata import distributions

import click
import pytest

from app import create_app
from helpers.running import PROJECTS, ROOT, blocks

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README = (ROOT / "README.md").read_text()


def test_every_setting_is_on_the_readme():
    sources = [*ROOT.glob("*.py"), *ROOT.glob("engines/*.py")]
    sources.append(ROOT / "deploy/gardening.env")
    text = "".join(source.read_text() for source in sources)
    named = re.findall(r"\b(?:GARDENING_[A-Z_]+|WEB_CONCURRENCY)\b", text)
    assert re.findall(r"(?m)^\| `([A-Z_]+)` \|", README) == sorted({*named})


@pytest.mark.parametrize(
    "page, stated, file, said",
    [
        ("README.md", r"Python (3\.\d+) or", "pyproject.toml", r'requires-python = ">=(.*)"'),
        ("README.md", r"SQLite (\d+)\.(\d+) or", "engines/sqlite.py", r"SQLITE = \((\d+), (\d+)"),
        ("operations.md", r"again every (\d+) s", "deploy/gardening.service", r"RestartSec=(\d+)"),
        ("operations.md", r"newest (\d+)", "deploy/gardening-backup.service", r"head -n -(\d+)"),
        ("operations.md", r"send (\d+) requests", "deploy/nginx.conf", r"rate=(\d+)r/s"),
        ("operations.md", r"(\d+) more in a burst", "deploy/nginx.conf", r"burst=(\d+)"),
    ],
)
def test_figure_on_the_page_is_the_programs(page, stated, file, said):
    text = " ".join(next(each for each in PAGES if each.name == page).read_text().split())
    [figure] = re.findall(stated, text)
    assert {figure} == set(re.findall(said, (ROOT / file).read_text()))


def commands_of(group, *names):
    """Each command below the group, by the words that call it."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands_of(command, *names, name)
        else:
            yield " ".join([*names, name]), command


@pytest.fixture(scope="module")
def commands():
    return dict(commands_of(create_app({"DATABASE": ":memory:"}).cli))


def test_every_command_is_on_the_readme_with_its_help(commands):
    expected = set()
    for name, command in commands.items():
        if command.hidden:
            continue
        arguments = [
            each.name.upper() for each in command.params if isinstance(each, click.Argument)
        ]
        summary = inspect.cleandoc(command.help).partition("\n\n")[0]
        expected.add((" ".join([name, *arguments]), summary.replace("\n", " ")))
    table = README.replace("[ACCOUNT]", "ACCOUNT")
    found = re.findall(r"(?m)^\| `([a-z].*?)(?: \[--.*\])?` \| (.*) \|$", table)
    assert {*found} == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_commands_and_options_that_there_are(page, commands):
    groups = "account|backup|init-db|restore|token"
    calls = rf"(?:\b(?:flask|gardening)|\| `) ?((?:{groups})\b(?!-)[^`\n|&;)]*)"
    for call in re.findall(calls, page.read_text()):
        [command] = [commands[each] for each in commands if call.startswith(each)]
        known = {option for each in command.params for option in each.opts}
        known |= {*re.findall(r"--[a-z-]+", command.help)}  # that of deploy/gardening.py
        assert {*re.findall(r"--[a-z-]+", call)} <= known, call


def test_pages_name_every_field_of_a_project(project):
    [shown] = re.findall(r'(?m)^{"id".*', README)
    assert [*json.loads(shown)] == [*project]
    api = (ROOT / "docs/api.md").read_text()
    [named] = re.findall(r"(?s)A Project always has (.*?),\s+in\s+this\s+order", api)
    assert re.findall(r"`(\w+)`", named) == [*project]


def test_error_on_the_page_is_what_a_misspelt_field_gets(client):
    [problem] = blocks("docs/api.md", "Errors", "json")
    response = client.post(PROJECTS, json={"nmae": "Park"})
    assert response.json == json.loads(problem)


def test_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    described = json.loads((ROOT / "openapi.json").read_text())["info"]["version"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"(?m)^## \[(.+?)\] - (unreleased|\d{4}-\d\d-\d\d)$", changes)
    assert project["version"] == described == newest[1]


def test_workflow_tries_each_python_from_the_oldest_to_that_of_the_image():
    files = (".github/workflows/tests.yml", "pyproject.toml", "Dockerfile")
    workflow, project, image = ((ROOT / file).read_text() for file in files)
    oldest = re.search(r'requires-python = ">=3\.(\d+)"', project)[1]
    newest = re.search(r"python:3\.(\d+)", image)[1]
    tried = [int(minor) for minor in re.findall(r'"3\.(\d+)"', workflow)]
    assert tried == list(range(int(oldest), int(newest) + 1))


def test_cluster_spreads_and_empties_every_table():
    tables = re.findall(r"CREATE TABLE (\w+)", (ROOT / "engines/postgresql.sql").read_text())
    spread = (ROOT / "deploy/citus.sql").read_text()
    assert sorted(re.findall(r"create_\w+_table\('(\w+)'", spread)) == sorted(tables)
    [emptied] = re.findall(r"`TRUNCATE ([^`]+)`", (ROOT / "docs/cluster.md").read_text())
    assert sorted(re.split(r",\s+", emptied)) == sorted(tables)


def test_links_lead_to_files():
    for page in PAGES:
        for link in re.findall(r"\]\((?!http)([^)]+)", page.read_text()):
            file, _, heading = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), f"{page}: {link}"
            if heading:
                headings = re.findall(r"(?m)^#+ (.*)$", target.read_text())
                anchors = [
                    re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings
                ]
                assert heading in anchors, f"{page}: {link}"


def named(requirement):
    """The package that a requirement begins with, as constraints.txt writes it."""
    return re.sub("[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def test_each_requirements_file_names_the_constraints():
    """Whoever installs one after another gets the same versions."""
    folders = [ROOT, ROOT / ".ci", ROOT / "tests", ROOT / "tests/deployment"]
    for folder in folders:
        requirements = (folder / "requirements.txt").read_text()
        [constraints] = re.findall("(?m)^-c (.*)$", requirements)
        assert (folder / constraints).samefile(ROOT / "constraints.txt")


def test_all_that_is_installed_is_pinned():
    """What each package needs as well; the versions are those of this run."""
    files = ["constraints.txt", "requirements.txt", "tests/requirements.txt"]
    text = "".join((ROOT / file).read_text() for file in files)
    pinned = dict(re.findall(r"(?m)^([\w-]+)==(\S+)", text))
    installed = {named(each.name): each for each in distributions()}
    for name in pinned.keys() & installed.keys():
        assert installed[name].version == pinned[name], name
        needed = installed[name].requires or []
        needed = {named(each) for each in needed if "extra ==" not in each}
        # Another platform or another Python needs others.
        assert needed & installed.keys() <= pinned.keys(), name
