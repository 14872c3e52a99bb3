"""The pages for operators, pasted block by block into a machine with systemd and nginx.

Blocks are pasted twice, as people do, into a shell with `set -u` and `umask 077`.
"""

import json
import os
import re
import shlex
import shutil
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path

import pytest

from deployment.servers.machine import ENVIRONMENT, start_machine
from deployment.servers.nginx import HOST
from engines.postgres import MARK
from helpers.running import LIMIT, PROJECTS, ROOT, blocks, replaced, run, wait_for

PAGE = "docs/operations.md"
POSTGRESQL = "docs/postgresql.md"
SETTINGS = "deploy/gardening.env"
DEPLOY = ROOT / "deploy"
CLUSTER = next(Path("/usr/lib/postgresql").glob("*/bin"), Path("/usr/lib/postgresql/bin"))
DATABASE = "/var/lib/gardening/gardening.db"
BACKUPS = "/var/backups/gardening"
NOW = "date -u +%Y-%m-%dT%H%M%SZ.db"  # how a backup is named
NEW_NAME = f"while [ -e {BACKUPS}/$({NOW}) ]; do sleep 0.1; done"  # waits for it
# Debian's packages are there already, and there is no network. Debian's reads the terminal, too.
APT_GET = """#!/bin/sh -e
[ "$1" = update ] && exit
timeout --foreground 1 cat >/dev/null || true
[ "$1 $2" = "install --yes" ]
shift 2
dpkg --status "$@" >/dev/null
"""
PIP = {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/srv/wheels"}


def block(heading, words="", page=PAGE):
    """The one block under the heading that has the words."""
    [found] = [each for each in blocks(page, heading) if words in each]
    return found


@pytest.fixture(scope="module")
def srv(tmp_path_factory):
    """The service's repository, the packages it needs, and Debian's apt-get."""
    folder = tmp_path_factory.mktemp("srv")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "instance")
    shutil.copytree(ROOT, folder / "gardening", ignore=ignored)
    pinned = (ROOT / "tests/deployment/requirements.txt").read_text()
    packages = re.findall(r"(?m)^psycopg.*==\S+", pinned)
    packages.append(f"--requirement={ROOT}/requirements.txt")
    # By the machine's Python, which may be another one than that of the tests.
    run("python3", "-m", "venv", folder / "venv", environment=os.environ | ENVIRONMENT)
    pip = [folder / "venv/bin/pip", "download", "--quiet", "--only-binary=:all:"]
    run(*pip, "--dest", folder / "wheels", *packages, limit=10 * LIMIT)
    (folder / "apt-get").write_text(APT_GET)
    (folder / "apt-get").chmod(0o755)
    return folder


INSTALL = replaced(block("Install"), {"https://git.example.org/gardening.git": "/srv/gardening"})


@contextmanager
def installed(srv):
    """A machine with the service and nginx, installed as the page has it."""
    with start_machine(srv, PIP) as machine:
        machine.paste("ln -s /srv/apt-get /usr/local/bin/ && systemctl start nginx")
        release(machine, "git init --quiet --initial-branch=main .")
        # A Python of root's own, which the service's user could not read.
        machine.paste("ln -s /bin/false /usr/local/bin/python3")
        machine.paste(f"umask 000; {INSTALL}", PATH="/usr/local/bin:/usr/bin:/bin")
        machine.paste(INSTALL)
        machine.paste("rm /usr/local/bin/python3")
        paste_twice(machine, block("nginx"))
        yield machine


@pytest.fixture(scope="module")
def machine(srv):
    """One for all tests but those that destroy it."""
    with installed(srv) as machine:
        yield machine


def code(start, page=PAGE):
    """The one piece of code in the text of the page that starts like this."""
    text = " ".join((ROOT / page).read_text().split())
    [found] = {*re.findall(f"`({start}[^`]*)`", text)}
    return found


def paste_twice(machine, script):
    machine.paste(script)
    return machine.paste(script)


def release(machine, change):
    """Put a change into the repository from which the service is installed."""
    commit = "git -c user.name=x -c user.email=x@example.org commit --quiet -m x --allow-empty"
    machine.paste(f"cd /srv/gardening && {change} && git add --all && {commit}")


SOCKET = "--unix-socket /run/gardening/socket http://gardening"


def curl(machine, path, *options, token=None):
    """Status and JSON of a response.

    Not through nginx: with its idle connections, each stop of the service takes 2 s longer.
    """
    command = ["curl", "-sS", "-w", "'\\n%{http_code}'", f"{SOCKET}{path}", *options]
    if token:
        command += [f"-H 'Authorization: Bearer {token}'"]
    content, _, status = machine.paste(" ".join(command)).rpartition("\n")
    return int(status), json.loads(content) if content else None


def add_project(machine, token, name):
    body = json.dumps({"name": name})
    options = ["-H 'Content-Type: application/json'", f"-d '{body}'"]
    status, _ = curl(machine, PROJECTS, *options, token=token)
    assert status == 201


def names(machine, token):
    status, projects = curl(machine, PROJECTS, token=token)
    assert status == 200
    return [project["name"] for project in projects]


@pytest.fixture(scope="module")
def token_of_ann(machine):
    return machine.paste("gardening token create ann").splitlines()[-1]


@pytest.fixture
def empty_account(machine, token_of_ann):
    """The token of an account, whose Projects are deleted before the test."""
    for project in curl(machine, PROJECTS, token=token_of_ann)[1]:
        project_url = f"{PROJECTS}/{project['id']}"
        assert curl(machine, project_url, "-X DELETE", token=token_of_ann)[0] == 204
    return token_of_ann


@pytest.fixture
def saved_settings(machine):
    """A copy of the settings, which hold again after the test."""
    machine.paste("cp /etc/gardening.env /run/")
    yield "/run/gardening.env"
    machine.paste("cp /run/gardening.env /etc/ && systemctl restart gardening")


@pytest.fixture
def no_backups(machine):
    """Nothing in the folder of backups when the test starts."""
    machine.paste(f"find {BACKUPS} -mindepth 1 -delete")


@pytest.fixture
def account_with_backup(machine, no_backups, empty_account):
    """The token of an account: the one backup has its Project Park, and not yet Wood."""
    add_project(machine, empty_account, "Park")
    machine.paste("systemctl start gardening-backup")
    add_project(machine, empty_account, "Wood")
    return empty_account


def add_setting(machine, setting):
    machine.paste("cat >> /etc/gardening.env", input=f"{setting}\n")
    machine.paste("systemctl restart gardening")


def main_pid(machine):
    return machine.paste("systemctl show --property=MainPID --value gardening").strip()


def test_first_token_is_one_of_the_service(machine):
    token = machine.paste(f"cd / && {block('First token')}").splitlines()[-1]
    call = replaced(code("curl -k"), {"HOST": HOST, "TOKEN": token})
    assert machine.paste(f"{call} -sS --resolve {HOST}:443:127.0.0.1") == "[]"


def test_version_is_the_commit_in_the_clone_of_root(machine):
    commit = machine.paste("git -C /opt/gardening rev-parse HEAD").strip()
    assert machine.paste(code("gardening --version")).strip().endswith(f", commit {commit}")
    machine.paste("chown nobody /opt/gardening")  # which git alone would refuse
    try:
        assert machine.paste("gardening --version").count("\n") == 1
    finally:
        machine.paste("chown root /opt/gardening")


@pytest.mark.parametrize("unit", sorted(DEPLOY.glob("*.service")), ids=attrgetter("name"))
def test_unit_has_few_rights_even_after_a_change_is_reverted(machine, unit):
    command = f"systemctl revert {unit.name}; systemd-analyze security {unit.name}"
    [exposure] = re.findall(r"exposure level for \S+: ([\d.]+)", machine.paste(command))
    assert float(exposure) < 2
    shown = machine.paste(f"systemctl show --property=SystemCallFilter {unit.name}")
    allowed = {*re.split("[= ]", shown.strip())}
    assert "fchmod" in allowed
    assert not {"fchown", "mount", "setuid", "setrlimit", "~mount"} & allowed


def test_only_root_can_change_the_program(machine):
    """Whatever the umask of the first installation: here, 000."""
    assert machine.paste("find /opt/gardening -perm /022 ! -type l") == ""


FILES = {
    "/etc/gardening.env": "root:root 600",
    "/etc/systemd/system/gardening.service": "root:root 644",
    "/run/gardening": "root:root 755",
    "/run/gardening/socket": "root:www-data 660",
    "/usr/local/bin/gardening": "root:root 755",
    "/var/backups/gardening": "gardening:gardening 700",
    "/var/lib/gardening": "gardening:gardening 700",
    "/var/log/nginx/gardening.log": "www-data:adm 640",
}


def test_files_are_for_those_who_need_them(machine):
    shown = machine.paste(f"stat --format='%n=%U:%G %a' {' '.join(FILES)}")
    assert dict(line.split("=") for line in shown.splitlines()) == FILES


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
def test_nginx_listens_on_every_address(machine, address):
    shown = "-o /dev/null -w '%{num_redirects} %{http_code}'"
    asked = f"-L --connect-to ::{address}: http://{HOST}/health"  # which leads to https
    assert machine.paste(f"curl -sSk {shown} {asked}") == "1 200"


def test_systemd_accepts_every_unit(machine):
    machine.paste("cd /opt/gardening/deploy && cp *.service *.socket *.timer /run/")
    verify = "systemd-analyze verify /run/*.service /run/*.socket /run/*.timer 2>&1 || true"
    assert "gardening" not in machine.paste(verify)


def test_service_runs_under_its_restrictions(machine):
    restrictions = "NoNewPrivs:\t1|Seccomp:\t2|CapEff:\t0{16}|Umask:\t0077"
    found = machine.paste(f"cat /proc/{main_pid(machine)}/status")
    assert len(re.findall(f"(?m)^(?:{restrictions})$", found)) == 4


OTHER_UNIT = "systemd-run --quiet --wait --collect --pipe --unit=gardening-other --uid=gardening"


def test_one_unit_does_not_reach_into_the_processes_of_another(machine):
    """By /proc, the service could delete all backups."""
    machine.paste(f"{OTHER_UNIT} ls /proc/{main_pid(machine)}/root/", status=2)


def test_service_sees_no_backup_and_writes_no_lock(machine):
    machine.paste(f"touch {BACKUPS}/mine.db")
    root = f"/proc/{main_pid(machine)}/root"
    assert machine.paste(f"ls {root}{BACKUPS}; rm {BACKUPS}/mine.db") == ""
    machine.paste(f"{OTHER_UNIT} touch /run/lock/mine", status=1)


def test_unit_cannot_ask_systemd_to_run_another_one(machine):
    """Which would have no restrictions, and could outlive the service."""
    machine.paste("systemctl start dbus")
    machine.paste(f"{OTHER_UNIT} ls /run/dbus/", status=2)
    machine.paste(f"{OTHER_UNIT} ls /dev/pts/", status=2)  # nor write to a terminal of root's
    assert machine.paste("getent passwd gardening").split(":")[5] == "/nonexistent"


def test_command_uses_the_settings_alone(machine, token_of_ann):
    """Not what root's shell happens to have."""
    modules = "/srv/{sitecustomize,app,click,commands}.py"
    machine.paste(f"umask 022; tee {modules} <<<'print(\"strange\")'")
    strange = {"GARDENING_DATABASE": "other.db", "FLASK_APP": "x", "PYTHONPATH": "/srv"}
    printed = machine.paste("cd /srv && gardening token list", **strange)
    machine.paste(f"rm {modules}")
    assert " ann\n" in printed and "strange" not in printed


def test_command_has_a_status_and_runs_in_any_folder(machine):
    error = machine.paste("gardening token revoke 999", status=1)
    assert error == "Error: There is no token with the ID 999.\n"
    # It is collected a moment after it has ended.
    wait_for(
        lambda: machine.paste("systemctl list-units --all --no-legend 'gardening-command-*'") == ""
    )
    # The user cannot enter root's home.
    assert "ACCOUNT" in machine.paste("cd && chmod 700 . && gardening token list")


# Says in a file which of its streams are a terminal.
SEEING = """
import os
print([os.isatty(stream) for stream in (0, 1, 2)], file=open("/var/lib/gardening/seen", "a"))
"""


@contextmanager
def customized(machine, source):
    """Every Python of a command runs this first."""
    module = "/opt/gardening/sitecustomize.py"
    machine.paste(f"umask 022; cat >{module}", input=source)
    try:
        yield
    finally:
        machine.paste(f"rm {module}")


def seen_by_the_service(machine, script):
    """What the script prints in a terminal, and which streams of its programs are a terminal."""
    machine.paste("rm -f /var/lib/gardening/seen; cat >/run/typed", input=script)
    with customized(machine, SEEING):
        shell = "timeout 60 script --quiet --command 'bash -eu /run/typed' /dev/null </dev/null"
        return machine.paste(shell), machine.paste("cat /var/lib/gardening/seen").splitlines()


def test_command_gets_no_terminal_of_root(machine, token_of_ann):
    """From which it could read what root types next; so either a terminal of its own, or none."""
    command = "gardening account list"
    script = f"{command}\n{command} </dev/null\nfound=$({command})\n{command} | cat\n"
    script += "gardening token revoke 999 2>/dev/null || echo status $?\n"
    script += "gardening token create seen </dev/null\n"
    printed, seen = seen_by_the_service(machine, script)
    assert seen == [str([True] * 3)] + [str([False] * 3)] * 5
    assert printed.count(" ann\n") == 3 and "status 1" in printed
    assert re.search("seen is a new account\\.\ngardening_\\S+\n\\Z", printed)


def test_argument_of_the_command_is_taken_as_it_is(machine):
    """systemd would expand a variable in it."""
    note = "${PATH} $HOME $$"
    machine.paste(f"gardening token create dollar --note '{note}' 2>/dev/null")
    assert f" {note}\n" in machine.paste("gardening token list dollar")
    machine.paste("gardening account delete dollar --yes")


def test_command_asks_before_it_deletes(machine):
    machine.paste("gardening token create eve 2>/dev/null")
    printed = machine.paste("gardening account delete eve <<<y")
    asked = "Delete the account eve with its Projects (0) and tokens (1)? [y/N"
    assert asked in printed
    assert " eve\n" not in machine.paste("gardening account list")


def test_command_changes_no_backup(machine, no_backups):
    """Whoever runs code in the service may put a link to it in the place of the database."""
    machine.paste("systemctl start gardening-backup")
    backup = machine.paste(f"systemctl stop gardening; mv {DATABASE} /run/kept.db; ls {BACKUPS}/*")
    backup = backup.splitlines()[-1]
    machine.paste(f"cd / && runuser -u gardening -- ln -s {backup} {DATABASE}")
    try:
        before = machine.paste(f"sha256sum {backup}")
        for command in ("token list", "token create eve", f"backup {BACKUPS}/copy.db"):
            machine.paste(f"gardening {command} || true")
        assert machine.paste(f"sha256sum {backup}") == before
    finally:
        machine.paste(f"rm -f {DATABASE}*; mv /run/kept.db {DATABASE}; systemctl start gardening")


@pytest.mark.parametrize("folder", ["/tmp", "/srv/my copies"])
def test_backup_of_the_command_is_where_its_caller_wants_it(machine, token_of_ann, folder):
    machine.paste(
        f"mkdir -p '{folder}'; chown gardening /srv/my* || true; rm -f '{folder}/mine.db'"
    )
    machine.paste(f"cd '{folder}' && gardening backup mine.db")
    machine.paste(f"rm '{folder}/mine.db'")


def test_backup_of_the_command_is_where_its_path_leads_or_nowhere(machine):
    """The sandbox has a /tmp of its own, and a command runs in /."""
    machine.paste(
        "rm -rf /srv/b /tmp/*.db; mkdir /srv/b && chown gardening /srv/b && ln -s /srv/b /tmp/l"
    )
    machine.paste("gardening backup /tmp/l/a.db && cd /tmp && gardening backup -- -a.db")
    assert machine.paste("ls /srv/b/* /tmp/*.db").split() == ["/srv/b/a.db", "/tmp/-a.db"]
    machine.paste("ln -s /srv/b/c.db /tmp/c.db")
    for refused in ("/tmp/c.db", "var/lib/gardening/a.db", "/nowhere/a.db"):
        machine.paste(f"cd /root && gardening backup {refused}", status=1)
    machine.paste("rm -r /srv/b /tmp/l /tmp/*.db")


def test_command_keeps_what_it_copies_on_a_disk(machine, token_of_ann):
    """A restore into PostgreSQL copies the backup first; /tmp may be memory."""
    printed = machine.paste(
        "sleep 60 | gardening account delete ann >/dev/null & "
        "until pid=$(pgrep -u gardening -f 'account delete'); do sleep 0.1; done; "
        "tr '\\0' '\\n' </proc/$pid/environ; kill $(jobs -p)"
    )
    assert "\nTMPDIR=/var/tmp\n" in printed


def test_command_that_cannot_run_says_why_in_a_line(machine):
    printed = machine.paste("runuser -u nobody -- gardening token list", status=1)
    assert printed == "gardening: only root can run this.\n"
    machine.paste("mv /etc/gardening.env /run/ && touch /etc/gardening.env")
    try:
        printed = machine.paste("gardening token list", status=1)
    finally:
        machine.paste("mv /run/gardening.env /etc/")
    assert printed == "gardening: there are no settings in /etc/gardening.env.\n"


def installed_release(machine):
    return machine.paste("git -C /opt/gardening rev-parse HEAD")


def workers(machine):
    """The processes of the service but the first."""
    pid = main_pid(machine)
    return machine.paste(f"cat /proc/{pid}/task/{pid}/children").split()


def kill_worker(machine):
    """Kill a process of the service, and wait for the one in its place."""
    killed = workers(machine)[0]
    machine.paste(f"kill -KILL {killed}")
    wait_for(lambda: killed not in (left := workers(machine)) and left)


# The last lines of releases. The first cannot be loaded; the second can, but not use the database.
BROKEN = ["import nothing_of_this_name", "Store.check = lambda self: no_such_name()"]


def upgrade_later():
    """The block for an upgrade, which takes a backup that has the second in its name."""
    return f"{NEW_NAME}\n{block('Upgrade', 'pull')}"


def go_back_from(printed):
    """The command that a failed upgrade names, which is the page's."""
    found = "(?m)^Not installed. Before: ([0-9a-f]{40}). To install that: (.*\\1.*)\\Z"
    [(_, line)] = re.findall(found, printed.rstrip())
    [command] = [each for each in blocks(PAGE, "Upgrade") if "COMMIT" in each]
    assert re.fullmatch(command.strip().replace("COMMIT", "[0-9a-f]{40}"), line)
    return line


@pytest.mark.parametrize("line", BROKEN, ids=["not loaded", "not healthy"])
def test_failed_upgrade_names_the_command_that_goes_back(machine, empty_account, line):
    before, old = installed_release(machine), workers(machine)
    release(machine, f'echo "{line}" >> app.py')
    back = go_back_from(machine.paste(upgrade_later(), status=1))
    if line == BROKEN[0]:  # the old processes go on
        machine.paste(upgrade_later(), status=1)
        assert workers(machine) == old
        add_project(machine, empty_account, "meanwhile")
    logged = machine.paste("journalctl -u gardening -u gardening-check -n 200")
    assert re.findall("no[a-z_]{8,}", line)[0] in logged
    paste_twice(machine, back)
    assert installed_release(machine) == before
    kill_worker(machine)
    add_project(machine, empty_account, "back")
    release(machine, "git revert --no-edit --no-commit HEAD")
    printed = paste_twice(machine, upgrade_later())
    assert installed_release(machine) != before
    newest = machine.paste(f"ls {BACKUPS}/20*.db | tail -n 1")
    before = installed_release(machine).strip()
    assert printed.endswith(f". Before: {before}. Newest backup: {newest}")
    assert "back" in names(machine, empty_account)


def test_changes_are_shown_before_an_upgrade_to_a_tag(machine):
    before = installed_release(machine)
    release(machine, "echo '- Planned.' >> CHANGELOG.md")
    machine.paste("cd /srv/gardening && git tag v9.0.0")
    release(machine, "echo '- Later.' >> CHANGELOG.md")
    assert "- Planned.\n- Later.\n" in machine.paste(code("git -C /opt/gardening fetch"))
    assert installed_release(machine) == before
    checkout = replaced(code("checkout -q v"), {"v1.0.0": "v9.0.0"})
    upgrade = replaced(upgrade_later(), {code("pull"): checkout})
    paste_twice(machine, upgrade)
    assert machine.paste("git -C /opt/gardening describe --tags") == "v9.0.0\n"
    assert "not currently on a branch" in machine.paste(upgrade_later(), status=1)
    machine.paste("git -C /opt/gardening checkout --quiet main")
    release(machine, "git revert --no-edit --no-commit HEAD HEAD~1")
    machine.paste(upgrade_later())


def test_changed_service_and_socket_are_installed_and_in_effect(machine):
    changes = "s/LimitNOFILE=8192/LimitNOFILE=8000/; s/SocketMode=0660/SocketMode=0600/"
    release(machine, f"sed -i '{changes}' deploy/*.service deploy/*.socket")
    paste_twice(machine, upgrade_later())
    limits = machine.paste(f"cat /proc/{main_pid(machine)}/limits")
    assert re.search("Max open files +8000 ", limits)
    assert machine.paste("stat --format=%a /run/gardening/socket") == "600\n"
    release(machine, "git revert --no-edit --no-commit HEAD")
    machine.paste(upgrade_later())


def test_restart_is_over_once_the_service_has_responded(machine):
    """gunicorn reports that it is ready before that."""
    machine.paste("systemctl restart gardening")
    start = "_SYSTEMD_INVOCATION_ID=$(systemctl show --property=InvocationID --value gardening)"
    wait_for(lambda: '"GET /health" 200' in machine.paste(f"journalctl --output=cat {start}"))


# Three clients of nginx, each with one connection, until the file is there. They note statuses.
CLIENTS = f"""
for client in 1 2 3; do
    while [ ! -e /run/enough ]; do
        curl -sk -o /dev/null -w '%{{http_code}}\n' --resolve {HOST}:443:127.0.0.1 \
            "https://{HOST}/health?[1-100]" --rate 10/s || echo broken
    done >/run/statuses.$client &
done
"""


@pytest.mark.parametrize(
    "command",
    [
        "systemctl restart gardening",
        "/opt/gardening/deploy/install",
        "systemctl start gardening-backup && gardening restore --newest",
    ],
)
def test_restart_upgrade_and_restore_refuse_no_request(machine, command):
    machine.paste(
        f"rm -f /run/enough /run/statuses.*; {CLIENTS} {command} && {command} && {command};"
        "touch /run/enough; wait"
    )
    assert {*machine.paste("cat /run/statuses.*").split()} == {"200"}


# A request whose body takes longer than a stop may last.
SLOW = f"sleep 20 | curl -sS {SOCKET}{PROJECTS} -T - -X POST -H 'Content-Type: application/json'"


def test_restart_that_has_to_kill_refuses_no_request(machine, token_of_ann):
    drop_in = "/run/systemd/system/gardening.service.d/soon.conf"
    machine.paste(
        f"mkdir {Path(drop_in).parent}; tee {drop_in}", input="[Service]\nTimeoutStopSec=1\n"
    )
    slow = f"{SLOW} -H 'Authorization: Bearer {token_of_ann}' &"
    machine.paste(
        f"rm -f /run/enough /run/statuses.*; systemctl daemon-reload; {slow} {CLIENTS} sleep 1;"
        f"systemctl restart gardening; touch /run/enough; wait; rm {drop_in};"
        "systemctl daemon-reload"
    )
    machine.paste("journalctl -u gardening | grep -q \"'stop-sigterm' timed out\"")
    assert {*machine.paste("cat /run/statuses.*").split()} == {"200"}


HEALTH = "/opt/gardening/deploy/health"


@contextmanager
def socket_at(machine, address):
    """The service, started again, with what the first lines of the unit say of another address."""
    folder = "/etc/systemd/system/gardening.socket.d"
    command = re.findall("(?m)^#     (systemctl .*)", (DEPLOY / "gardening.socket").read_text())
    restart = f"systemctl daemon-reload; {command[0]}"
    machine.paste(f"mkdir {folder}")
    change = f"[Socket]\nListenStream=\nListenStream={address}\n"
    machine.paste(f"cat >{folder}/address.conf; {restart} || true", input=change)
    try:
        yield
    finally:
        machine.paste(f"rm -r {folder}; {restart}")


@pytest.mark.parametrize("address", ["[::]:8001", "/run/other/socket"])
def test_health_finds_the_socket_and_asks_nobody_else(machine, address):
    with socket_at(machine, address):
        settings = "echo request=PUT >~/.curlrc; export http_proxy=http://127.0.0.1:9"
        machine.paste(f"{settings}; {HEALTH}; status=$?; rm ~/.curlrc; exit $status")
        logged = machine.paste("journalctl -u gardening -n 1 --output=cat")
        assert '"GET /health" 200' in logged


def test_service_whose_socket_cannot_be_made_listens_nowhere(machine):
    with socket_at(machine, "203.0.113.1:80"):
        refused = "Permission denied.*/run/gardening/socket"
        logged = f"journalctl -u gardening -n 20 | grep -q '{refused}'"
        machine.paste(f"until {logged}; do sleep 0.1; done")
        machine.paste("systemctl is-active gardening.socket", status=3)
        assert "gunicorn" not in machine.paste("ss -lntp")


@pytest.mark.parametrize(
    "needed", ["/etc/gardening.env", "/opt/gardening", "/opt/gardening/.venv/bin/gunicorn"]
)
def test_start_that_fails_before_its_command_leaves_no_socket_open(machine, needed):
    """Requests would wait, and a change be made when its client has long gone."""
    machine.paste(f"mv {needed} {needed}-moved; systemctl restart gardening", status=1)
    try:
        wait_for(
            lambda: machine.paste("systemctl is-active gardening.socket || true") == "inactive\n"
        )
        machine.paste(f"curl -sS {SOCKET}/health", status=7)
    finally:
        machine.paste(f"mv {needed}-moved {needed}; systemctl start gardening")
    assert curl(machine, "/health")[0] == 200


def test_folder_of_the_database_may_be_a_link(machine, account_with_backup):
    folder = "/var/lib/gardening"
    machine.paste(f"mv {folder} /var/larger && ln -s /var/larger {folder}")
    try:
        machine.paste(f"systemctl restart gardening && {RESTORE}")
        assert names(machine, account_with_backup) == ["Park"]
        assert " ann\n" in machine.paste("gardening token list")
    finally:
        machine.paste(f"rm {folder} && mv /var/larger {folder} && systemctl restart gardening")


def test_address_that_has_no_effect_is_refused_before_a_restart(machine, saved_settings):
    started = main_pid(machine)
    machine.paste("echo GARDENING_BIND=:8001 >>/etc/gardening.env")
    assert "Not installed." in machine.paste("/opt/gardening/deploy/install", status=1)
    assert "GARDENING_BIND has no effect" in machine.paste("journalctl -u gardening-check -n 20")
    assert main_pid(machine) == started


def test_service_that_was_stopped_is_not_started_by_a_request(machine):
    machine.paste("systemctl stop gardening")
    try:
        machine.paste(f"! curl -sS {SOCKET}/health")  # a socket may reset what it can still accept
        machine.paste("systemctl is-active gardening", status=3)
    finally:
        machine.paste("systemctl start gardening")


def test_only_nginx_and_root_reach_the_socket(machine):
    """Others could hold every thread. Nor can they make another one: see FILES."""
    machine.paste(f"runuser -u gardening -- curl -sS {SOCKET}/health", status=7)


def test_another_site_of_the_same_nginx_reaches_the_service(machine):
    [location] = blocks(PAGE, "Beside another site", "nginx")
    site = f"server {{ listen 8080; {location} }}"
    machine.paste("cat > /etc/nginx/conf.d/site.conf", input=site)
    try:
        machine.paste("systemctl restart nginx")
        head = machine.paste("curl -sSI http://127.0.0.1:8080/garden/health")
        [request_id] = re.findall("(?m)^X-Request-Id: ([0-9a-f]{32})$", head)
        logged = machine.paste("journalctl -u gardening -n 1 --output=cat")
        assert re.search(f'"HEAD /health" 200 .* {request_id}$', logged)
    finally:
        machine.paste("rm /etc/nginx/conf.d/site.conf && systemctl restart nginx")


@pytest.fixture
def elsewhere(machine, saved_settings):
    """The folder of a copy of the database, which the units use as the settings have it."""
    database, drop_in = r"/var/it's my\garden/-g.db", "gardening{,-}.service.d/folder.conf"
    folder = Path(database).parent
    [writable] = re.findall('ReadWritePaths="FOLDER"', (ROOT / SETTINGS).read_text())
    writable = writable.replace("FOLDER", str(folder).replace("\\", r"\\"))
    quoted = shlex.quote(str(folder))
    machine.paste(f"rm -rf {quoted}; install -d -m 700 -o gardening {quoted}")
    machine.paste(f"gardening backup {BACKUPS}/here.db")
    machine.paste(
        "cat >> /etc/gardening.env", input=f"GARDENING_DATABASE={shlex.quote(database)}\n"
    )
    # As yet, nothing may write there.
    machine.paste(f"gardening restore {BACKUPS}/here.db", status=1)
    machine.paste(
        f"cd /etc/systemd/system && mkdir -p {Path(drop_in).parent} && tee {drop_in} &&"
        " systemctl daemon-reload",
        input=f"[Service]\n{writable}\n",
    )
    try:
        machine.paste(f"gardening restore {BACKUPS}/here.db && rm {BACKUPS}/here.db")
        machine.paste("systemctl restart gardening")
        yield folder
    finally:
        machine.paste(f"cd /etc/systemd/system && rm {drop_in} && systemctl daemon-reload")


# In place of Debian's: no package is there, and one of the two commands fails.
NO_PACKAGES = """
cd /usr/local/bin && rm apt-get /run/called
cat >dpkg <<<'#!/bin/false'
cat >apt-get <<<'#!/bin/sh
echo "$@" >>/run/called
[ "$1" != "$FAILS" ]'
chmod 755 dpkg apt-get
"""


@pytest.mark.parametrize("fails", ["update", "install", "none"])
def test_install_ends_when_packages_cannot_be_installed(machine, fails):
    machine.paste(f"touch /run/called; {NO_PACKAGES}")
    process, status = workers(machine), 1 if fails != "none" else 0
    printed = machine.paste("/opt/gardening/deploy/install", status=status, FAILS=fails)
    machine.paste("cd /usr/local/bin && rm dpkg apt-get && ln -s /srv/apt-get .")
    assert ("Not installed." in printed, workers(machine) == process) == (status, status)
    called = ["update", "install --yes curl dbus python3-venv"]
    assert machine.paste("cat /run/called").splitlines() == called[: 1 if fails == "update" else 2]


def test_install_takes_no_argument(machine):
    started = main_pid(machine)
    printed = machine.paste("/opt/gardening/deploy/install --help", status=1)
    assert printed.startswith("deploy/install takes no arguments") and printed.count("\n") == 1
    assert main_pid(machine) == started


def test_install_from_the_hook_of_a_repository_leaves_that_alone(machine):
    printed = machine.paste("/opt/gardening/deploy/install", GIT_DIR="/srv/gardening/.git")
    assert f"Installed: {installed_release(machine).strip()}" in printed
    assert machine.paste("git -C /srv/gardening for-each-ref refs/installed") == ""


def test_install_names_a_backup_that_was_made(machine, no_backups):
    """Not one that the service's user, or a clock that was wrong, has named."""
    machine.paste("systemctl start gardening-backup")
    made = machine.paste(f"ls {BACKUPS}/*").strip()
    machine.paste(f"cd {BACKUPS} && touch 2098-01-01T000000Z.db $'2098\n\\e]0;Z.db'")
    printed = machine.paste("/opt/gardening/deploy/install")
    assert printed.endswith(f". Newest backup: {made}\n")


def test_install_that_was_interrupted_runs_again(machine):
    """At five moments, with all its processes; the first is when pip takes itself for installed."""
    clone, install = "/opt/gardening", "/opt/gardening/deploy/install"
    machine.paste(f"rm -r {clone}/.venv && git -C {clone} update-ref -d refs/installed")
    metadata = f"{clone}/.venv/lib/*/site-packages/pip-*/METADATA"
    moments = [f"until ls {metadata} 2>/dev/null; do sleep 0.01; done"]
    moments += [f"sleep {seconds}" for seconds in (0.5, 1.5, 3, 5)]
    for moment in moments:
        machine.paste(f"setsid {install} & {moment}; kill -KILL -- -$! || true")
    assert "Installed: " in machine.paste(install)
    assert curl(machine, "/health")[0] == 200
    machine.paste("gardening --version")


def test_two_installations_at_once_are_both_done(machine):
    machine.paste("rm -r /opt/gardening/.venv")
    printed = machine.paste("cd /opt/gardening; deploy/install & deploy/install && wait $!")
    assert printed.count("Installed: ") == 2
    assert machine.paste("stat --format='%U %a' /run/gardening-install.lock") == "root 600\n"


# Notes whether the commit is known to be installed.
SYNC = """#!/bin/sh
test -s /opt/gardening/.git/refs/installed; echo $? >>/run/synced
"""


def test_install_makes_anew_what_a_power_cut_has_emptied_and_syncs(
    machine, empty_account, saved_settings
):
    machine.paste("cat >/usr/local/bin/sync; chmod 755 /usr/local/bin/sync", input=SYNC)
    flask = ".venv/lib/python3*/site-packages/flask"
    emptied = f"{flask}/__init__.py {flask}-*/INSTALLER .git/refs/installed /etc/gardening.env"
    machine.paste(f"cd /opt/gardening && truncate --size=0 {emptied} && deploy/install")
    assert machine.paste("cat /run/synced; rm /run/synced /usr/local/bin/sync") == "1\n1\n0\n"
    assert names(machine, empty_account) == []


def test_install_from_a_clone_that_git_refuses_creates_no_database(machine):
    machine.paste(f"systemctl stop gardening && mv {DATABASE} {DATABASE}-lost")
    machine.paste("chown nobody /opt/gardening")
    try:
        printed = machine.paste("/opt/gardening/deploy/install", status=128)
        assert "dubious ownership" in printed
        machine.paste(f"ls {DATABASE}", status=2)
    finally:
        machine.paste("chown root /opt/gardening")
        machine.paste(f"mv {DATABASE}-lost {DATABASE} && systemctl start gardening")


def test_install_keeps_settings_and_creates_no_database(machine, saved_settings):
    machine.paste("sed -i s/gardening.db/gardning.db/ /etc/gardening.env")
    machine.paste("systemctl stop gardening")
    printed = machine.paste("/opt/gardening/deploy/install", status=1)
    assert printed.endswith("\nNot installed.\n")  # from this commit, no other can be gone back to
    assert "no database at" in machine.paste("journalctl -u gardening -n 20")
    machine.paste("grep -q gardning.db /etc/gardening.env")
    machine.paste("ls /var/lib/gardening/gardning.db", status=2)


# A release that raises the schema version of the database when it starts.
RAISING = """
if "LISTEN_PID" in os.environ:  # not at --check-config
    import sqlite3
    database = sqlite3.connect("/var/lib/gardening/gardening.db")
    database.execute("PRAGMA user_version = 99")
    database.close()
"""


def test_older_release_after_a_newer_one_needs_the_backup(machine, no_backups, empty_account):
    add_project(machine, empty_account, "Park")
    before = installed_release(machine)
    machine.paste("cat > /run/raising.py", input=RAISING)
    release(machine, "cat /run/raising.py >> gunicorn.conf.py")
    back = go_back_from(machine.paste(block("Upgrade", "pull"), status=1))
    machine.paste(back, status=1)
    assert "newer" in machine.paste("journalctl -u gardening -n 50")
    assert installed_release(machine) == before
    machine.paste(f"systemctl stop gardening; {RESTORE}; /opt/gardening/deploy/install")
    assert names(machine, empty_account) == ["Park"]
    release(machine, "git revert --no-edit --no-commit HEAD")


RESTORE = block("Backup and restore", "restore").strip()


def go_back(machine, printed):
    """What the last line of a restore says."""
    [command] = re.findall("\nTo go back: (gardening restore .*[.]db'?)\n\\Z", printed)
    return machine.paste(command)


def files(machine):
    """What is beside the database, but for SQLite's own."""
    return machine.paste("cd /var/lib/gardening && find . ! -name '*.db-*' | sort")


def test_newest_dated_backup_is_restored_and_the_restore_undone(
    machine, elsewhere, no_backups, empty_account
):
    add_project(machine, empty_account, "kept")
    machine.paste("systemctl start gardening-backup")
    machine.paste(f"cd {BACKUPS} && gardening backup manual.db")
    add_project(machine, empty_account, "lost")
    machine.paste(f"cd {BACKUPS} && gardening backup 2098-01-01T000000Z.db")  # the clock was wrong
    printed = machine.paste(RESTORE)
    assert re.search(r"\nRestored: accounts \d+, Projects 1, tokens \d+\.\n", printed)
    # A line of a script could be a setting of its unit.
    assert "/run/systemd/transient/" not in machine.paste("journalctl -n 100 _PID=1")
    assert names(machine, empty_account) == ["kept"]
    printed = go_back(machine, printed)
    assert names(machine, empty_account) == ["kept", "lost"]
    go_back(machine, printed)
    assert names(machine, empty_account) == ["kept"]
    left = machine.paste(f"cd {shlex.quote(str(elsewhere))} && stat --format='%U %a %n' ./*")
    kinds = {re.sub(r"before-20\S+Z", "before-DATE", line) for line in left.splitlines()}
    files = ["before-DATE.db", *(f"-g.db{part}" for part in ("", "-wal", "-shm", "-lock"))]
    assert kinds == {f"gardening 600 ./{name}" for name in files}


@pytest.fixture
def small_disk(machine):
    """Which holds the database for the test."""
    folder = "/var/lib/gardening"
    copy = f"cp -a {DATABASE} /run/ && mount -t tmpfs -o size=2M,mode=700"
    copy += f",uid=$(id -u gardening),gid=$(id -g gardening) tmpfs {folder}"
    machine.paste(f"systemctl stop gardening; {copy} && mv /run/gardening.db {DATABASE}")
    machine.paste("systemctl start gardening")
    yield
    machine.paste(f"systemctl stop gardening; umount {folder} && systemctl start gardening")


NEWEST = f"{BACKUPS}/2020-01-01T000000Z.db"
SHARED = "install -d -m 1777 /run/shared"
UNREADABLE = "this user cannot read it: "
REFUSED = [  # what is there, the argument, and what is said of it
    ("true", "--newest", f"no backup in {BACKUPS}"),
    ("true", "", "Missing argument 'FILE'."),
    ("true", "''", "not a regular file: /root/"),
    ("true", "a.db", "No such file or directory: /root/a.db"),
    ("mkfifo a.db", "a.db", "not a regular file: /root/a.db"),
    ("cp /etc/hostname a.db", "a.db", "file is not a database: /root/a.db"),
    ("head -c 3M /dev/zero >a.db", "a.db", "No space left on device"),
    ("touch $'a\nb.db'", "$'a\nb.db'", "has a control character"),
    ("touch $'a\x9bb.db'", "$'a\x9bb.db'", "or is not UTF-8"),
    # Only root can read what these lead to.
    (f"ln -s {NEWEST} /root/a.db && ln -s /etc/shadow {NEWEST}", "a.db", UNREADABLE),
    (
        f"gardening backup {NEWEST} && ln -s /etc/shadow {NEWEST}-wal",
        "--newest",
        "Error: unable to open",
    ),
    # Here others could put a -journal beside it.
    (f"{SHARED} && install -m 600 /etc/hostname /run/shared/a.db", "/run/shared/a.db", UNREADABLE),
    # The service has a /tmp of its own.
    ("install -m 644 /etc/hostname /tmp/a.db", "/tmp/a.db", "No such file or directory: /tmp/a"),
    # In it, SQLite reads the name of a file to delete.
    ("touch a.db a.db-journal", "a.db", "a -journal beside it: move that away."),
    (
        "touch a.db a.db-wal",
        "a.db",
        "a -wal beside it: `chown gardening` both, then move",
    ),
]


@pytest.mark.parametrize("creation, given, words", REFUSED)
def test_refused_restore_stops_nothing_and_leaves_nothing(
    machine, small_disk, no_backups, empty_account, creation, given, words
):
    add_project(machine, empty_account, "Park")
    process, before = main_pid(machine), files(machine)
    machine.paste(f"cd && rm -f ./*.db* && {creation} && chown -hR gardening {BACKUPS}")
    printed = machine.paste(f"cd; gardening restore {given} || exit 1", status=1)
    last = printed.splitlines()[-1]
    assert last.startswith(("gardening: ", "Error: ")) and words in last
    assert "/gardening-20" not in last  # a copy
    assert (main_pid(machine), files(machine)) == (process, before)
    assert names(machine, empty_account) == ["Park"]


@pytest.mark.parametrize(
    "setting, words", [("", "there are no settings"), ("/etc/a.db", "Read-only file system: /etc/")]
)
def test_restore_refuses_a_setting(machine, saved_settings, setting, words):
    setting = setting and f"GARDENING_DATABASE={setting}"
    machine.paste(f"systemctl start gardening-backup; echo -n {setting} >/etc/gardening.env")
    assert words in machine.paste(RESTORE, status=1)


@pytest.mark.parametrize("create", ["install -m 600", "ln -s"])
def test_file_of_root_may_have_any_name(machine, account_with_backup, create):
    name = r"-f ${HOME}\t.db"
    machine.paste(f"cd && {create} {BACKUPS}/* './{name}'")
    assert "Restored: " in machine.paste(f"cd; gardening restore -- '{name}'")
    machine.paste(f"cd && rm './{name}'")
    assert names(machine, account_with_backup) == ["Park"]


def test_standard_input_of_root_is_restored(machine, account_with_backup):
    assert "Restored: " in machine.paste(f"cat {BACKUPS}/* | gardening restore -")
    assert names(machine, account_with_backup) == ["Park"]


# Ends a restore, with all its group, once its unit has started.
ENDING = """#!/bin/sh
PATH=${PATH#*:}
case "$*" in *--unit=gardening-restore-*)
    systemd-run "$@" <&0 >/dev/null & until HAS_STARTED; do :; done
    kill -KILL 0 ;;
esac
exec systemd-run "$@"
"""
HAS_STARTED = "systemctl list-units 'gardening-restore-*' | grep -q restore-"
ENDING = ENDING.replace("HAS_STARTED", HAS_STARTED)


def test_restore_goes_on_if_nobody_waits_for_it_any_more(machine, account_with_backup):
    machine.paste("mkdir -p /run/e && cd /run/e && tee systemd-run && chmod +x *", input=ENDING)
    path = f"/run/e:{ENVIRONMENT['PATH']}"
    machine.paste(f"setsid --wait {RESTORE} || exit $?", status=137, PATH=path)
    machine.paste(f"while {HAS_STARTED}; do sleep 0.1; done")
    assert names(machine, account_with_backup) == ["Park"]


def test_restore_neither_stops_nor_starts_the_service(machine, account_with_backup):
    """Nor does an upgrade of systemd meanwhile."""
    process = main_pid(machine)
    machine.paste(
        f"{RESTORE} & until {HAS_STARTED}; do :; done; systemctl daemon-reexec; wait $! || true;"
        f"while {HAS_STARTED}; do sleep 0.1; done"
    )
    assert names(machine, account_with_backup) == ["Park"]
    assert main_pid(machine) == process
    machine.paste(f"systemctl stop gardening; {RESTORE}")
    machine.paste("systemctl is-active gardening", status=3)
    machine.paste("systemctl start gardening")
    assert names(machine, account_with_backup) == ["Park"]


# Stops its process when it opens the copy of the backup.
STOPPING = """
import os, signal, sys
def hook(event, arguments):
    if event == "sqlite3.connect" and ".partial/copy" in str(arguments):
        os.kill(os.getpid(), signal.SIGSTOP)
sys.addaudithook(hook)
"""


def test_ctrl_c_ends_the_wait_for_a_restore_that_hangs(machine, account_with_backup):
    """As with a backup that somebody made so. The unit may go on for as long as it takes."""
    with customized(machine, STOPPING):
        machine.paste(
            f"(echo {RESTORE}; until pgrep -r T -u gardening >/dev/null; do sleep 0.1; done;"
            " printf '\\3'; echo 'echo prompt $((1 + 1))'; echo exit) |"
            " timeout 60 script --quiet /dev/null | tee /run/printed"
        )
        assert "prompt 2" in machine.paste("cat /run/printed")
        shown = machine.paste("systemctl show --property=RuntimeMaxUSec 'gardening-restore-*'")
        assert shown.strip() == "RuntimeMaxUSec=infinity"
        go_on = "pkill -CONT -u gardening; sleep 0.1"  # it stops at several calls
        machine.paste(f"while {HAS_STARTED}; do {go_on}; done")
    assert names(machine, account_with_backup) == ["Park"]


def test_restore_gives_the_service_no_terminal_of_root(machine, no_backups):
    machine.paste("systemctl start gardening-backup")
    printed, seen = seen_by_the_service(machine, RESTORE)
    assert "Restored: " in printed and {*seen} == {str([False] * 3)}


def test_newest_14_backups_are_kept_and_all_of_them_after_a_failure(machine, no_backups):
    old = "touch --date='14 days ago'"
    machine.paste(f"cd {BACKUPS} && {old} mine.db 2020-01-{{10..30}}T030000Z.db")
    machine.paste("mv /opt/gardening/app.py /tmp/")
    try:
        machine.paste("systemctl start gardening-backup", status=1)
        assert len(machine.paste(f"ls {BACKUPS}/2020*").split()) == 21
    finally:
        machine.paste("mv /tmp/app.py /opt/gardening/ ")
    before = machine.paste(NOW).strip()
    machine.paste("systemctl start gardening-backup")
    after = machine.paste(NOW).strip()
    *dated, mine = machine.paste(f"ls {BACKUPS}").split()
    assert (len(dated), mine) == (14, "mine.db")
    assert before <= dated[-1] <= after
    owner = machine.paste(f"stat --format='%U %a' {BACKUPS}/{dated[-1]}")
    assert owner == "gardening 600\n"


def test_backup_is_kept_for_14_days_however_many_are_newer(machine, no_backups):
    """As upgrades make them, and a clock that was wrong."""
    machine.paste(f"cd {BACKUPS} && touch --date='13 days ago' 2020-01-01T030000Z.db")
    machine.paste(
        f"cd {BACKUPS} && touch 2020-02-{{10..25}}T030000Z.db 2098-01-{{10..25}}T030000Z.db"
    )
    machine.paste("systemctl start gardening-backup")
    assert len(machine.paste(f"ls {BACKUPS}").split()) == 1 + 16 + 1 + 16


def test_next_backup_deletes_what_one_that_was_killed_has_left(machine, no_backups):
    old = "gardening-1.partial gardening-2.partial-journal gardening-3.partial/copy"
    machine.paste(
        f"cd {BACKUPS} && mkdir gardening-3.partial && touch {old} gardening-of-me.db"
        " && chown -R gardening . && touch --date='25 hours ago' gardening-*"
        " && mv gardening-2.partial-journal /var/lib/gardening"  # of a restore
        " && touch gardening-4.partial"  # of a backup under way
        " && install -d gardening-5.partial/root && touch --date='25 hours ago' gardening-5.partial"
    )
    machine.paste("systemctl start gardening-backup")
    dated, *kept = machine.paste(f"ls {BACKUPS}").split()
    assert re.fullmatch(r"20[\d-]+T\d+Z\.db", dated)
    assert kept == ["gardening-4.partial", "gardening-5.partial", "gardening-of-me.db"]
    assert "partial" not in machine.paste("ls /var/lib/gardening")


@pytest.mark.parametrize(
    "unit, facts",
    [
        # A migration is long, and a process that grows ends alone.
        ("gardening", "UnitFileState=enabled TimeoutStartUSec=infinity OOMPolicy=continue"),
        ("gardening-backup", "TimeoutStartUSec=1h"),  # whatever it hangs at
        ("gardening-backup.timer", "ActiveState=active UnitFileState=enabled Persistent=yes"),
    ],
)
def test_unit_runs_when_it_should_and_for_as_long(machine, unit, facts):
    shown = machine.paste(f"systemctl show {unit}")
    assert {*facts.split()} <= {*shown.splitlines()}
    if unit.endswith("timer"):  # and at the latest a day later, whatever the clock does
        assert "OnCalendar=*-*-* 03:00:00 UTC" in shown
        assert "OnUnitInactiveUSec=1d 1h " in shown


def test_old_machine_stops_for_good_with_a_last_backup(machine, no_backups):
    try:
        paste_twice(machine, f"{NEW_NAME}\n{code('systemctl disable --now')}")
        units = "gardening.service gardening-backup.timer"
        states = {*machine.paste(f"systemctl is-active {units}", status=3).split()}
        states |= {*machine.paste(f"systemctl is-enabled {units}", status=1).split()}
        assert states == {"inactive", "disabled"}
        assert machine.paste(f"ls {BACKUPS}").endswith("Z.db\n")
    finally:
        machine.paste("systemctl enable --now gardening gardening-backup.timer")


def test_service_that_was_killed_refuses_requests_until_it_is_started_again(machine):
    killed = main_pid(machine)
    assert killed != "0"  # which would be the tests themselves
    machine.paste(f"kill -KILL {killed}; while curl -s {SOCKET}/health; do :; done")
    wait_for(lambda: main_pid(machine) not in ("0", killed))
    machine.paste("systemctl start gardening")  # waits until it responds
    machine.paste(block("Health").splitlines()[0])


def test_process_takes_as_much_memory_as_the_settings_say(machine):
    [said] = re.findall(r"Each takes about (\d+) MB", (ROOT / SETTINGS).read_text())
    usage = machine.paste(f"grep ^Rss: /proc/{workers(machine)[0]}/smaps_rollup")
    assert int(usage.split()[1]) / 1024 == pytest.approx(int(said), rel=0.5)


def test_process_that_grows_ends_alone(machine):
    """The kernel's part is tried by hand: few machines give a test a memory controller."""
    shown = machine.paste("systemctl show gardening")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    [limit] = re.findall(r"(?m)^MemoryMax=(\d+)$", shown)
    assert round(int(limit) / memory, 2) == 0.8


def test_health_check_of_the_page_notices_a_lost_database(machine):
    script = block("Health").splitlines()[0]
    assert machine.paste(script) == ""  # what took over the service could write to root's terminal
    machine.paste(f"mv {DATABASE} {DATABASE}-moved")
    try:
        machine.paste(script, status=22)
    finally:
        machine.paste(f"mv {DATABASE}-moved {DATABASE} && systemctl restart gardening")


def test_backup_that_was_not_made_is_noticed(machine, no_backups):
    script = block("Health").splitlines()[1]
    machine.paste(script, status=1)
    machine.paste(f"touch --date='37 hours ago' {BACKUPS}/2020-01-01T030000Z.db")
    machine.paste(f"touch --date=2098-01-01 {BACKUPS}/2098-01-01T030000Z.db")  # the clock was wrong
    machine.paste(script, status=1)
    machine.paste("systemctl start gardening-backup")
    paste_twice(machine, script)


def test_blocks_are_pasted_into_a_terminal_without_bracketed_paste(machine):
    """As a provider's web console: what a program reads there is lost to the shell."""
    machine.paste(f"rm /etc/nginx/conf.d/gardening.conf; {INSTALL}systemctl start gardening-backup")
    machine.paste("git -C /opt/gardening update-ref -d refs/installed")
    pasted = "".join([INSTALL, block("First token"), block("nginx"), RESTORE])
    pasted += "\necho pasted $((1 + 1)) blocks\nexit\n"
    terminal = "timeout 60 script --quiet --command 'bash --norc' /dev/null"
    printed = machine.paste(terminal, input=pasted)
    assert "Restored: " in printed and "pasted 2 blocks" in printed
    machine.paste("ls /etc/nginx/conf.d/gardening.conf")


def test_host_of_the_block_is_called_through_nginx(machine):
    script = block("nginx")
    assert HOST in script
    pair = "cat /etc/ssl/private/gardening.key /etc/ssl/certs/gardening.pem"
    issued = machine.paste(pair)
    try:
        printed = machine.paste(script.replace(HOST, "other.example.org"))
        assert printed.endswith("\n200\n")
        served = machine.paste("nginx -T 2>/dev/null")
        assert len(re.findall("server_name other.example.org;", served)) == 2
        limits = "^worker_rlimit_nofile 40000;$|^\tworker_connections 16384;$"
        assert len(re.findall(f"(?m){limits}", served)) == 2
        assert machine.paste(pair) == issued
    finally:
        machine.paste(script)


def test_origin_of_the_page_is_allowed(machine):
    install = re.findall("#     (.*\n)", (DEPLOY / "nginx-cors.conf").read_text())
    paste_twice(machine, f"{''.join(install)}{code('nginx -t', 'deploy/nginx-cors.conf')}")
    origin = "https://app.example.org"
    request = f"curl -sSik -H 'Origin: {origin}' https://127.0.0.1/api/v1/hello-service"
    # The old processes of nginx may serve for a moment.
    found = f"grep -qi 'access-control-allow-origin: {origin}' /tmp/response"
    printed = machine.paste(
        f"until {request} >/tmp/response && {found}; do sleep 0.1; done; cat /tmp/response"
    )
    assert "HTTP/1.1 200" in printed


def test_metrics_are_sent_once_the_setting_is_there(machine, saved_settings):
    listen = "import socket\ns = socket.socket(type=socket.SOCK_DGRAM)\n"
    listen += "s.bind(('127.0.0.1', 9125))\nprint('ready', flush=True)\n"
    listen += "while b'status' not in (m := s.recv(9999)): pass\nprint(m.decode())"
    machine.paste("cat > /tmp/listen.py", input=listen)
    wait = "until [ -s /tmp/received ]; do kill -0 $!; done"
    machine.paste(f"python3 /tmp/listen.py >/tmp/received 2>&1 & {wait}")
    *_, last = (ROOT / SETTINGS).read_text().splitlines()
    add_setting(machine, last.removeprefix("#"))
    assert curl(machine, "/health")[0] == 200
    sent = "gardening.gunicorn.request.status.200:1|c"
    wait_for(lambda: sent in machine.paste("cat /tmp/received"))


# In place of PostgreSQL's: says who runs it, and where its terminal is.
POSTGRES = """
mkdir -p /run/pg && cd /run/pg && tee createuser createdb dropdb psql >/dev/null <<<'#!/bin/sh
ps -o user=,tty= -p $$; readlink /proc/$$/fd/[012]'
chmod -R 755 .
"""


DROP = code("runuser --pty -u postgres -- dropdb", POSTGRESQL)
SET_PASSWORD = code("runuser --pty -u postgres -- psql", POSTGRESQL)


def test_program_of_another_user_has_no_terminal_of_root(machine):
    """It could type commands into root's shell, or read what root types."""
    pasted = [each for each in blocks(POSTGRESQL) if "runuser" in each]
    script = "\n".join(["tty", *pasted, DROP, SET_PASSWORD])
    machine.paste(f"{POSTGRES} cat >/run/pasted", input=script)
    shell = "timeout 60 script --quiet --command 'bash -eu /run/pasted' /dev/null"
    printed = machine.paste(shell, PATH=f"/run/pg:{ENVIRONMENT['PATH']}")
    assert printed.count("postgres ") == script.count("runuser")
    terminal, *others = printed.replace("/dev/", "").split()
    assert terminal not in others


PASSWORD = r"se:cr\et"
ADDRESS = "postgresql://gardening@localhost/gardening"  # for which it takes a password


def test_projects_move_to_postgresql_and_back(machine, empty_account, saved_settings):
    create_database, install_driver, store_password = blocks(POSTGRESQL, "Set up")
    backup, restore = blocks(POSTGRESQL, "Move from a file, and back")
    escaped = re.sub(r"[:\\]", r"\\\g<0>", PASSWORD)  # as the page has it
    version = CLUSTER.parent.name
    machine.paste(f"pg_dropcluster --stop {version} main 2>/dev/null; systemctl start dbus")
    machine.paste(f"pg_createcluster {version} main --start")
    machine.paste(create_database)
    paste_twice(machine, install_driver)
    typed = f"while echo '{PASSWORD}' && sleep 0.1; do :; done"  # what comes too early is lost
    machine.paste(f"{typed} 2>/dev/null | {SET_PASSWORD}")
    machine.paste(store_password, input=f"*:5432:gardening:gardening:{escaped}\n")
    machine.paste(store_password)  # again, which keeps the password
    owner = "stat --format='%U %a' /etc/gardening.pgpass"
    assert machine.paste(owner) == "gardening 600\n"
    psql = f"psql {ADDRESS} --no-password -c 'SELECT 1'"
    machine.paste(f"cd / && runuser -u gardening -- env PGPASSFILE=/etc/gardening.pgpass {psql}")
    on_this_machine, on_another = blocks(POSTGRESQL, "Set up", "ini")
    assert "PGPASSFILE=/etc/gardening.pgpass\n" in on_another

    add_project(machine, empty_account, "Park")
    kept = curl(machine, PROJECTS, token=empty_account)
    machine.paste(f"touch {BACKUPS}/2098-01-01T030000Z.db")  # the clock was wrong once
    paste_twice(machine, backup)
    machine.paste("sed -i /^GARDENING_DATABASE=/d /etc/gardening.env")
    machine.paste("cat >> /etc/gardening.env", input=on_this_machine)
    machine.paste(restore)
    machine.paste(restore, status=1)
    assert curl(machine, PROJECTS, token=empty_account) == kept

    # A newer release has raised the schema version.
    raise_version = f"COMMENT ON TABLE project IS '{MARK}99'"
    machine.paste(f'runuser -u postgres -- psql gardening -c "{raise_version}"')
    assert "a newer release" in machine.paste(restore, status=1)
    machine.paste("systemctl restart gardening", status=1)
    empty, back = blocks(POSTGRESQL, "Restore")
    machine.paste(f"systemctl stop gardening && {empty}")
    machine.paste(f"cd {BACKUPS} && head -c 9000 move.db | install -o gardening /dev/stdin a.db")
    machine.paste(f"gardening restore {BACKUPS}/a.db", status=1)
    machine.paste(back)
    machine.paste("systemctl restart gardening", status=1)  # the newer one is there again
    machine.paste(f"systemctl stop gardening; {empty}")
    machine.paste(restore)
    machine.paste(DROP)
    assert curl(machine, PROJECTS, token=empty_account) == kept
    add_project(machine, empty_account, "on PostgreSQL")
    kept = curl(machine, PROJECTS, token=empty_account)

    machine.paste(backup)
    machine.paste(f"cp {saved_settings} /etc/gardening.env")
    machine.paste(f"pg_ctlcluster {version} main stop")
    machine.paste(restore)
    assert curl(machine, PROJECTS, token=empty_account) == kept


def test_service_that_was_taken_over_ends_and_goes_back(machine, account_with_backup):
    """Without a signal to which a process that was changed could respond."""
    backup, taken = machine.paste(f"ls {BACKUPS}/*").strip(), main_pid(machine)
    socket = machine.paste("stat --format=%i /run/gardening/socket")
    script = replaced(block("If the service was taken over"), {"BACKUP": backup})
    machine.paste("systemd-run --unit=gardening-command-1 --uid=gardening sleep 99")
    machine.paste(script)
    printed = paste_twice(machine, script)  # beside the folders that it has moved away
    machine.paste("! systemctl is-active gardening-command-1 && rm -r /var/lib/gardening-*")
    assert "Restored: " in printed and " ann\n" in printed
    assert "Handling signal: term" not in machine.paste(f"journalctl _PID={taken}")
    machine.paste(code("systemctl start gardening(?!-)"))
    assert machine.paste("stat --format=%i /run/gardening/socket") != socket
    assert names(machine, account_with_backup) == ["Park"]


LEFT = "find /etc /opt /usr/local /var/backups /var/lib -name '*gardening*' ! -name 'stamp-*'"


def test_nothing_is_left_of_a_service_that_was_uninstalled(srv):
    """But for what the machine below has of its own, such as an image that somebody built."""
    before = run("sh", "-c", LEFT).stdout.splitlines()
    with installed(srv) as machine:
        machine.paste("systemd-run --unit=gardening-command-1 --uid=gardening sleep 99")
        machine.paste(block("Uninstall"))
        assert {*machine.paste(LEFT).splitlines()} <= {*before}
        machine.paste("! getent passwd gardening && systemctl is-active nginx")
        assert machine.paste("systemctl list-units --all --no-legend 'gardening*'") == ""
