#!/usr/bin/python3 -I
"""/usr/local/bin/gardening: `gardening token list` runs `flask token list` for the service.

For root, in any folder: as the service's user, in the service's sandbox, with its settings alone.
"""

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

CLONE = "/opt/gardening"
SETTINGS = "/etc/gardening.env"
CONTROL = r"[\0-\x1f\x7f-\x9f\ud800-\udfff]"  # or a byte that is not UTF-8


def main(words: list[str]) -> int:
    if os.geteuid() != 0:
        fail("only root can run this")
    if not os.path.exists(SETTINGS) or not os.path.getsize(SETTINGS):
        fail(f"there are no settings in {SETTINGS}")
    match words:
        case ["backup", file] | ["backup", "--", file] if is_file(words):
            return back_up(file)
        case ["restore", "--newest"]:
            return restore(newest_backup())
        case ["restore", file] | ["restore", "--", file] if is_file(words):
            return restore(file)
        case ["restore", "-"]:
            return run("restore", words)
    return run("command", words)


def fail(reason: str) -> NoReturn:
    sys.exit(f"gardening: {re.sub(CONTROL, '?', reason)}.")


def is_file(words: list[str]) -> bool:
    """Whether the last word is no option."""
    return words[-2] == "--" or not words[-1].startswith("-")


def back_up(file: str) -> int:
    """In the sandbox, a relative path could lead elsewhere, and the backup be lost."""
    folder, name = os.path.split(file)
    folder = os.path.realpath(folder)
    # The sandbox can write to no folder but that of the database. With / there would be no sandbox.
    quoted = re.sub(r'([\\"])', r"\\\1", folder)
    access = [f'--property=BindPaths=-"{quoted}"'] if folder != "/" else []
    return run("command", ["backup", os.path.join(folder, name)], access)


def newest_backup() -> str:
    file = subprocess.check_output([f"{CLONE}/deploy/newest-backup"], text=True).strip()
    if not file:
        fail("no backup in /var/backups/gardening")
    print(f"Restoring {file}", flush=True)
    return file


def restore(file: str) -> int:
    """Root opens a file only where nobody else can put one; elsewhere, the service's user does."""
    given = os.path.join(os.getcwd(), file)
    try:
        path, is_roots = resolve(given)
        if not is_roots:
            return run("restore", ["restore", path])
        backup = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        fail(f"{error.strerror}: {given}")
    if not stat.S_ISREG(os.fstat(backup).st_mode):
        fail(f"not a regular file: {given}")
    refuse_companions(path)
    return run("restore", ["restore", "--name", given, "-"], stdin=backup)


def resolve(path: str) -> tuple[str, bool]:
    """The path without root's links, and whether only root can put a file there."""
    folder, name = os.path.split(path)
    if folder != path:
        folder, is_roots = resolve(folder)
        path = os.path.join(folder, name)
        if not is_roots:
            return path, False
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode) and found.st_uid == 0:
        return resolve(os.path.join(folder, os.readlink(path)))
    if stat.S_ISREG(found.st_mode):
        return path, True  # its folders decide, not its owner
    return path, found.st_uid == 0 and not found.st_mode & 0o022


def refuse_companions(path: str) -> None:
    """Refuse a copy of a database in use: of its files, root would pass on only this one."""
    found = [part for part in ("-journal", "-wal") if os.path.lexists(path + part)]
    if found:
        advice = "move that away"
        if found == ["-wal"]:
            advice = "`chown gardening` both, then move both to the database's folder"
        fail(f"{path} is no backup, since there is a {found[0]} beside it: {advice}")


def run(kind: str, words: list[str], access: Sequence[str] = (), stdin: int | None = None) -> int:
    """Run the command in a unit of this kind. Returns its status.

    The service's user must not get root's terminal, from which it could read what root types next.
    If all three streams are a terminal, --pty makes another one, but not for a restore: it would
    swallow what is pasted after it. Otherwise, the command reads no terminal, and writes to one
    through cat, which keeps the lines of both streams in order.
    """
    terminals = [stream for stream in range(3) if os.isatty(stream)]
    if kind == "command" and len(terminals) == 3:
        return subprocess.call(unit(kind, "--pty", words, access))
    command = unit(kind, "--pipe", words, access)
    if stdin is None and 0 in terminals:
        stdin = subprocess.DEVNULL
    shown = [stream for stream in terminals if stream != 0]
    if not shown:
        return subprocess.call(command, stdin=stdin)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=shown[0]) as cat:
        stdout, stderr = (cat.stdin if stream in shown else None for stream in (1, 2))
        return subprocess.call(command, stdin=stdin, stdout=stdout, stderr=stderr)


def unit(kind: str, streams: str, words: list[str], access: Sequence[str]) -> list[str]:
    """The command that runs the words in a unit of this kind, as the service's user."""
    if re.search(CONTROL, "".join(words)):
        fail("an argument has a control character, or is not UTF-8")
    # Root asks git for the commit that --version prints, since only root may be able to read .git.
    git = ["git", f"--git-dir={CLONE}/.git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    return [
        *("systemd-run", "--quiet", "--wait", "--collect", streams, "--uid=gardening"),
        *(f"--unit=gardening-{kind}-{os.getpid()}", "--description=gardening", *access),
        f"--property=EnvironmentFile={SETTINGS}",
        # For PostgreSQL, a restore copies the backup there. /tmp may be memory.
        "--setenv=TMPDIR=/var/tmp",
        *(f"--setenv=PYTHONPATH={CLONE}", f"--setenv=CLONE_COMMIT={commit}"),
        *(f"{CLONE}/.venv/bin/python", "-Pm", "app"),
        *(word.replace("$", "$$") for word in words),  # systemd would expand a "$"
    ]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # or Ctrl-C would end in a traceback
    os.environ["SYSTEMD_ADJUST_TERMINAL_TITLE"] = "0"  # or systemd 257 shows the command there
    sys.exit(main(sys.argv[1:]))
