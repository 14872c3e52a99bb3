"""Dockerfile and deploy/compose.yaml: what they hold, and their commands without an image."""

import json
import os
import re
import shlex
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from helpers.running import (
    BIN,
    LIMIT,
    PROJECTS,
    ROOT,
    Client,
    blocks,
    gunicorn,
    replaced,
    run,
    token_on,
)
from helpers.testservice import copy_service

PAGE = "docs/container.md"
COMPOSE = BIN / "docker-compose"
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", "")


def test_image_needs_no_compiler(tmp_path):
    """Each pin has a wheel for the Python of the image, which is a slim one."""
    [version] = re.findall(r"(?m)^ARG PYTHON=python:(3\.\d+)-slim$", DOCKERFILE)
    [given] = re.findall(r"(--requirement .*psycopg\S+)", DOCKERFILE)
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--target", tmp_path]
    wheels = ["--only-binary=:all:", f"--python-version={version}"]
    run(*pip, *wheels, *shlex.split(given), limit=10 * LIMIT)


def copy_to(folder, stage):
    """Copy what this stage of the image does; the patterns that it names."""
    named = []
    for patterns, target in re.findall(r"COPY (?:--\S+ )?(.*) (\S+)\n", stage):
        (folder / target).mkdir(exist_ok=True)
        for pattern in patterns.split():
            named.append(pattern)
            for file in ROOT.glob(pattern):
                shutil.copy(file, folder / target)
    return named


def test_images_hold_what_they_need_and_production_no_test_service(tmp_path):
    """And .dockerignore lets Docker see nothing else."""
    service, test, default = re.split("(?m)^FROM ", DOCKERFILE)[1:]
    assert default == "service\n" and test.startswith("service AS test\n")
    in_production = copy_to(tmp_path, service)
    assert "RUN gunicorn --check-config" in service
    run(BIN / "gunicorn", "--check-config", folder=tmp_path)
    test_service = [sys.executable, "-m", "testservice", "--help"]
    run(*test_service, folder=tmp_path, status=1)
    in_test = copy_to(tmp_path, test)
    run(*test_service, folder=tmp_path)
    first, *seen = (ROOT / ".dockerignore").read_text().split()
    assert first == "*"
    assert {*seen} == {f"!{pattern}" for pattern in in_production + in_test}
    for stage in (service, test):
        users = re.findall(r"(?m)^USER (.*)$", stage)
        assert users[-1].isdigit()


# In a network of its own, where port 8000 is free.
CHECKING = """
ip link set lo up
gunicorn & service=$!
until CHECK; do sleep 0.1; done
mv "$GARDENING_DATABASE" "$GARDENING_DATABASE-moved"
if CHECK; then exit 1; fi
mv "$GARDENING_DATABASE-moved" "$GARDENING_DATABASE"
CHECK
kill $service && wait $service
if CHECK; then exit 1; fi
"""


@pytest.mark.parametrize(
    "address",
    ["", ":8001", "localhost", "[::]:8001", "tcp://127.0.0.1:8001", "unix:FOLDER/socket"],
)
def test_health_check_asks_where_gunicorn_listens(environment, tmp_path, address):
    [check] = re.findall(r"HEALTHCHECK .* CMD (\[.*\])", DOCKERFILE)
    script = CHECKING.replace("CHECK", shlex.join(json.loads(check)))
    environment |= {
        "GARDENING_BIND": address.replace("FOLDER", str(tmp_path)),
        "PATH": f"{BIN}:{environment['PATH']}",
    }
    alone = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"]
    run(*alone, "sh", "-ec", script, environment=environment)


def test_probes_of_kubernetes_are_on_the_page(environment, database):
    page = (ROOT / PAGE).read_text()
    found = "let `(.*?)` be the readiness probe, and `(.*?)`,.* the liveness probe"
    [(readiness, liveness)] = re.findall(found, " ".join(page.split()))
    paths = [liveness, readiness]
    with gunicorn(environment) as (_, port), Client(port, "none") as client:
        assert [client.fetch("GET", path)[0] for path in paths] == [200, 200]
        os.rename(database, f"{database}-moved")
        assert [client.fetch("GET", path)[0] for path in paths] == [200, 503]


def test_compose_file_confines_the_service_and_fits_the_image():
    file = ROOT / "deploy/compose.yaml"
    printed = run(COMPOSE, "--file", file, "config", "--format=json").stdout
    service = json.loads(printed)["services"]["gardening"]
    assert service["restart"] == "unless-stopped" and service["init"]
    assert service["read_only"] and service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    [volume] = service["volumes"]
    assert (volume["type"], volume["target"]) == ("volume", "/data")
    assert " GARDENING_DATABASE=/data/gardening.db     TMPDIR=/data " in DOCKERFILE
    [port] = service["ports"]
    assert (port["host_ip"], port["target"]) == ("127.0.0.1", 8000)
    assert " PORT=8000\n" in DOCKERFILE
    assert service["stop_grace_period"] == "40s"  # gunicorn itself waits for 30
    log = service["logging"]["options"]
    assert (log["max-size"], log["max-file"]) == ("10m", "5")  # 50 MB


def test_process_1_of_a_container_that_a_page_starts_is_not_the_service():
    """It would ignore SIGTERM until it has a handler."""
    text = "".join(page.read_text() for page in ROOT.glob("docs/*.md"))
    [options] = re.findall("docker run (.*)", text)
    assert "--init " in options


def test_service_runs_as_a_user_without_a_name(environment, token):
    """As the page has it for another user."""
    assert "`user: UID:GID`" in (ROOT / PAGE).read_text()
    # Root's files belong to this user, and nobody has its number.
    command = ["unshare", "--map-user=12345", BIN / "gunicorn"]
    with gunicorn(environment, command=command) as (_, port), Client(port, token) as client:
        assert client.call("GET", PROJECTS) == (200, [])


# What the page's commands do in the container, done here, with a folder for its volume.
DOCKER = """#!/bin/sh -e
[ "$COMPOSE_FILE" = /opt/gardening/deploy/compose.yaml ]
case "$*" in
"compose exec -T gardening sh -ec "* | "compose run --rm -T gardening flask restore "*) ;;
*) exit 1 ;;
esac
until [ "$1" = gardening ]; do shift; done
shift
cd "$CLONE"
for argument; do
    set -- "$@" "$(echo "$argument" | sed "s,/data,$VOLUME,g")"
    shift
done
exec "$@"
"""
BACKUP, RESTORE = blocks(PAGE, "Backup and restore")


@pytest.fixture
def docker(environment, database, tmp_path):
    """Runs commands of the page in a folder of its own, which it returns."""
    folder, clone = tmp_path / "host", tmp_path / "clone"
    folder.mkdir()
    (folder / "docker").write_text(DOCKER)
    (folder / "docker").chmod(0o755)
    clone.mkdir()
    copy_service(clone)
    there = environment | {
        "PATH": f"{folder}:{BIN}:{environment['PATH']}",
        "COMPOSE_FILE": "/opt/gardening/deploy/compose.yaml",
        "VOLUME": str(Path(database).parent),
        "CLONE": str(clone),
    }

    def paste(script, status=0):
        return folder, run("sh", "-c", script, folder=folder, environment=there, status=status)

    return paste


@pytest.fixture
def database(tmp_path):
    """In a folder of its own, which stands for the volume."""
    (tmp_path / "data").mkdir()
    return str(tmp_path / "data/gardening.db")


def files_in(volume):
    """But for SQLite's own."""
    return {path.name for path in volume.iterdir() if not re.search("db-[a-z]+$", path.name)}


def test_backup_of_a_container_is_restored_in_a_volume(environment, database, docker):
    token, volume = token_on(database), Path(database).parent
    with gunicorn(environment) as (_, port), Client(port, token) as client:
        kept = client.call("POST", PROJECTS, {"name": "Park"})[1]
        docker(BACKUP)
        since = client.call("POST", PROJECTS, {"name": "written since"})[1]
        _, printed = docker(RESTORE)
        assert client.call("GET", PROJECTS) == (200, [kept])
        [old] = re.findall("To go back: .* (.*)\n\\Z", printed.stdout)
        path = f"{old.replace(str(volume), '/data')} </dev/null"
        docker(replaced(RESTORE, {"- < gardening.db": path}))
        assert client.call("GET", PROJECTS) == (200, [kept, since])
        docker(f"echo nonsense >gardening.db\n{RESTORE}", status=1)
        assert client.call("GET", PROJECTS) == (200, [kept, since])
    kinds = sorted(re.sub(r"20\S+Z", "DATE", name) for name in files_in(volume))
    assert kinds == ["before-DATE.db"] * 2 + ["gardening.db"]


def test_copies_of_seven_nights_are_kept(token, database, docker):
    """By cron, to which "%" is a line break, but not "\\%"."""
    [line] = blocks(PAGE, "Backup and restore", "text")
    time, command = re.fullmatch(r"((?:\S+ ){5})(.*)\n", line).groups()
    assert time == "0 3 * * * " and "%" not in command.replace(r"\%", "")
    [file] = re.findall("save that block as `(.*?)`", (ROOT / PAGE).read_text())
    command = replaced(command, {r"\%": "%", f"cd {Path(file).parent} && ": ""})
    folder, _ = docker(
        f"cat >{Path(file).name} <<'END'\n{BACKUP}END\nunset COMPOSE_FILE\n{command}"
    )
    [copy] = folder.glob("night-[1-7].db")
    assert copy.stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("SELECT count(*) FROM token").fetchall() == [(1,)]


def test_password_of_postgresql_is_in_no_environment(tmp_path):
    [lines] = re.findall(r"(?s)```yaml\n(.*?)  ```", (ROOT / PAGE).read_text())
    given = (ROOT / "deploy/compose.yaml").read_text()
    volumes = "    volumes:\n      - gardening:/data\n"
    (tmp_path / "compose.yaml").write_text(replaced(given, {volumes: re.sub("(?m)^  ", "", lines)}))
    printed = run(COMPOSE, "--file", tmp_path / "compose.yaml", "config", "--format=json").stdout
    service = json.loads(printed)["services"]["gardening"]
    assert service["environment"] == {
        "GARDENING_DATABASE": "postgresql://gardening@db1.example.org/gardening"
        "?sslmode=verify-full&sslrootcert=/etc/ssl/certs/db.pem",
        "PGPASSFILE": "/etc/gardening.pgpass",
    }
    volume, _ = service["volumes"]
    assert (volume["type"], volume["target"]) == ("bind", "/etc/gardening.pgpass")
