"""Measure the service next to an empty Flask view, under the same gunicorn settings.

    .venv/bin/python tests/benchmark.py [ROUNDS [SECONDS]]

Needs Linux and wrk. The rounds of the measures take turns, so that what else the machine
does meets all of them; the ratios of one run can be compared, the figures of two cannot.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from rigs.running import (
    POINT,
    PROJECTS,
    ROOT,
    Client,
    environment_of,
    gunicorn,
    token_on,
    workers,
)

MEMBERS = {"name": "Buena Vista Park,SF", "postal_code": "94117", "location": POINT}
CHANGE = json.dumps({"name": "Buena Vista"})
CONNECTIONS = 8
UNITS = {"us": 0.001, "ms": 1, "s": 1000}
# Scripts for wrk, which by itself sends GET.
PUT = f"wrk.method, wrk.body = 'PUT', '{CHANGE}'"
# One write in five requests; the others read what it changes.
MIX = f"""
local count = 0
function request()
  count = count + 1
  if count % 5 == 0 then return wrk.format('PUT', nil, nil, '{CHANGE}') end
  return wrk.format('GET')
end
"""


def wrk(url, seconds, token="", script="", etag='""'):
    """Requests/s, and the times in ms within which 50 and 99 in 100 are answered."""
    headers = {"Authorization": f"Bearer {token}", "If-None-Match": etag}
    headers["Content-Type"] = "application/json"
    sent = [f"-H{name}: {text}" for name, text in headers.items()]
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
        file.write(script)
        file.flush()
        command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--latency"]
        command += [*sent, "-s", file.name, url]
        printed = subprocess.check_output(command, text=True)
    if failed := re.search("Non-2xx.*|Socket errors.*", printed):
        sys.exit(f"{url}: {failed[0]}; no figure is valid")
    [rate] = re.findall(r"Requests/sec: +([\d.]+)", printed)
    times = re.findall(r"(?:50|99)% +([\d.]+)(\w+)", printed)
    return [float(rate), *(float(number) * UNITS[unit] for number, unit in times)]


def measures(empty, service, database):
    """What wrk is called with, by its title."""
    small, large = token_on(database, "small"), token_on(database, "large")
    with Client(service, small) as client:
        for _ in range(20):
            project = client.call("POST", PROJECTS, MEMBERS)[1]
    with Client(service, large) as client:
        for _ in range(1000):
            client.call("POST", PROJECTS, MEMBERS)
        etag = client.ask("GET", PROJECTS)[1]["ETag"]
    projects = f"http://127.0.0.1:{service}{PROJECTS}"
    one = f"{projects}/{project['id']}"
    return {
        "empty Flask view": {"url": f"http://127.0.0.1:{empty}"},
        "read": {"url": one, "token": small},
        "list of 20": {"url": projects, "token": small},
        "list of 1,000": {"url": projects, "token": large},
        "list of 1,000, unchanged (304)": {
            "url": projects,
            "token": large,
            "etag": etag,
        },
        "write (PUT)": {"url": one, "token": small, "script": PUT},
        "one PUT in five": {"url": one, "token": small, "script": MIX},
    }


def peak_memory(process):
    """The peak of the processes' resident memory, in MB, shared pages once for each."""
    pids = [process.pid, *workers(process.pid)]
    status = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    return sum(int(s.split("VmHWM:")[1].split()[0]) for s in status) / 1000


def main(rounds=5, seconds=2):
    if not shutil.which("wrk"):
        sys.exit("wrk is missing: install it (Debian: apt-get install wrk)")
    options = [f"--workers={2 * os.cpu_count()}", "--access-logfile=/dev/null"]
    empty_app = [f"--pythonpath={ROOT}/tests/rigs", "empty:app"]
    with tempfile.TemporaryDirectory() as folder:
        database = f"{folder}/gardening.db"
        settings = environment_of(database)
        with (
            gunicorn(settings, *options, *empty_app) as (empty, empty_port),
            gunicorn(settings, *options) as (service, port),
        ):
            every = measures(empty_port, port, database)
            found = {title: [] for title in every}
            for _ in range(rounds):
                for title, called in every.items():
                    found[title].append(wrk(seconds=seconds, **called))
            memory = [peak_memory(process) for process in (empty, service)]
    print(
        f"{date.today()}, {os.cpu_count()} cores, {CONNECTIONS} connections,", end=" "
    )
    print(f"median of {rounds} rounds of {seconds} s; peak memory of all processes:")
    print("the empty view {:.0f} MB, the service {:.0f} MB\n".format(*memory))
    print("| | requests/s | relative to the empty view | p50 ms | p99 ms |")
    print("| --- | ---: | ---: | ---: | ---: |")
    base = statistics.median(rate for rate, *_ in found["empty Flask view"])
    for title, figures in found.items():
        rate, p50, p99 = map(statistics.median, zip(*figures))
        print(f"| {title} | {rate:,.0f} | {rate / base:.2f} | {p50:.1f} | {p99:.1f} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
