"""A machine of its own, with systemd: this one's files under a layer that is thrown away.

It sees the processes, mounts and network of nobody else, and nobody sees its own.
"""

import os
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

from helpers.running import LIMIT, ONE_WORKER, run, wait_for

LONG = 10 * LIMIT  # seconds: a boot and an installation take long on a busy machine
HOME = os.path.expanduser("~root")
ENVIRONMENT = {"HOME": HOME, "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
# The folder $0 has the root of the machine, and what overlayfs keeps. The folder $1 becomes the
# machine's /srv; $2 is a setting for its services; $3 names its cgroup. Their time zone is not UTC.
# In the cgroup of another one, systemd would wait for processes that it can neither see nor end.
BOOT = """
mount --make-rprivate /
mount -t tmpfs tmpfs "$0"
mkdir "$0/upper" "$0/scratch" "$0/machine" "$0/cgroup"
mount -t cgroup2 cgroup2 "$0/cgroup"
mkdir "$0/cgroup/$3"
echo 0 >"$0/cgroup/$3/cgroup.procs"
mount -t overlay -o "lowerdir=/,upperdir=$0/upper,workdir=$0/scratch" overlay "$0/machine"
cd "$0/machine"
mount --rbind "$1" srv
mount -t proc proc proc
mount -t sysfs sysfs sys
for folder in dev run tmp; do mount -t tmpfs -o mode=755 tmpfs "$folder"; done
chmod 1777 tmp
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
mount -t tmpfs tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mknod -m 666 dev/null c 1 3
mknod -m 666 dev/zero c 1 5
mknod -m 666 dev/full c 1 7
mknod -m 666 dev/random c 1 8
mknod -m 666 dev/urandom c 1 9
mknod -m 666 dev/tty c 5 0
rm -rf etc/systemd/system/*.wants
mkdir -p etc/systemd/system.conf.d
printf '[Manager]\nDefaultEnvironment=%s TZ=LOCAL-14\n' "$2" >etc/systemd/system.conf.d/few.conf
ln -sf /lib/systemd/system/basic.target etc/systemd/system/default.target
mkdir old
pivot_root . old
umount -l /old
exec unshare --cgroup sh -ec 'mount -t cgroup2 cgroup2 /sys/fs/cgroup; exec /lib/systemd/systemd'
"""
# Its processes end after `unshare` does.
CLEAR = """
mount -t cgroup2 cgroup2 /mnt
while grep -qs 'populated 1' "/mnt/$0/cgroup.events"; do sleep 0.1; done
[ ! -e "/mnt/$0" ] || find "/mnt/$0" -depth -type d -exec rmdir {} +
"""


class Machine:
    """A running machine, in which root pastes shell scripts."""

    def __init__(self, pid, environment):
        self._environment = ENVIRONMENT | environment
        self._enter = ["nsenter", f"--target={pid}", "--all", "--root", "--wd"]

    def paste(self, script, status=0, input="", **environment):
        """What the script prints, its errors included; it must end with this status.

        The shell is a strict one: new files are its user's alone, and unset names are errors.
        """
        ended = subprocess.run(
            [*self._enter, "bash", "-c", f"umask 077\nset -u\n{script}"],
            env=self._environment | environment,
            input=input,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LONG,
            check=False,
        )
        assert ended.returncode == status, ended.stdout
        return ended.stdout


@contextmanager
def start_machine(folder, environment):
    """A machine that has started, with what is in the folder in /srv.

    The shells of root have the environment.
    """
    private = ["--mount", "--pid", "--net", "--uts", "--ipc", "--fork"]
    with (
        tempfile.TemporaryDirectory() as place,
        subprocess.Popen(
            # It ends with us, however we end.
            ["setpriv", "--pdeathsig=KILL", "unshare", *private, "--kill-child"]
            + ["sh", "-ec", BOOT, place, str(folder), ONE_WORKER, Path(place).name],
            env=ENVIRONMENT | {"container": "oci"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        ) as unshare,
    ):
        try:
            children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
            pid = int(wait_for(children.read_text, LONG))
            wait_for(lambda: Path(f"/proc/{pid}/comm").read_text() == "systemd\n", LONG)
            new = Machine(pid, environment)

            def has_started():
                assert unshare.poll() is None
                state = "systemctl is-system-running || true"
                return new.paste(state).strip() in ("running", "degraded")

            wait_for(has_started, LONG)
            yield new
        finally:
            unshare.kill()
            run("unshare", "--mount", "sh", "-ec", CLEAR, Path(place).name)
