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


class Measure:
    """A request that wrk repeats; `found` gets requests/s, p50 and p99 (ms) a round."""

    def __init__(self, title, served, path, token="", script="", etag='""'):
        self.title, self.script, self.found = title, script, []
        self.process, port = served
        headers = {"Authorization": f"Bearer {token}", "If-None-Match": etag}
        headers["Content-Type"] = "application/json"
        self.command = ["wrk", "-t1", f"-c{CONNECTIONS}", "--latency"]
        self.command += [f"-H{name}: {text}" for name, text in headers.items()]
        self.command += [f"http://127.0.0.1:{port}{path}"]

    def take(self, seconds):
        with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
            file.write(self.script)
            file.flush()
            command = [*self.command, f"-d{seconds}s", "-s", file.name]
            printed = subprocess.check_output(command, text=True)
        if failed := re.search("Non-2xx.*|Socket errors.*", printed):
            sys.exit(f"{self.title}: {failed[0]}; no figure is valid")
        [rate] = re.findall(r"Requests/sec: +([\d.]+)", printed)
        times = re.findall(r"(?:50|99)% +([\d.]+)(\w+)", printed)
        milliseconds = [float(number) * UNITS[unit] for number, unit in times]
        self.found.append([float(rate), *milliseconds])

    def medians(self):
        return [statistics.median(figures) for figures in zip(*self.found)]

    def peak_memory(self):
        """The peak of the processes' resident memory, in MB, shared pages once for each."""
        pids = [self.process.pid, *workers(self.process.pid)]
        status = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
        return sum(int(s.split("VmHWM:")[1].split()[0]) for s in status) / 1000


def measures(empty, service, database):
    small, large = token_on(database, "small"), token_on(database, "large")
    with Client(service[1], small) as client:
        for _ in range(20):
            project = client.call("POST", PROJECTS, MEMBERS)[1]
    with Client(service[1], large) as client:
        for _ in range(1000):
            client.call("POST", PROJECTS, MEMBERS)
        tag = client.ask("GET", PROJECTS)[1]["ETag"]
    one = f"{PROJECTS}/{project['id']}"
    return [
        Measure("empty Flask view", empty, "/"),
        Measure("read", service, one, small),
        Measure("list of 20", service, PROJECTS, small),
        Measure("list of 1,000", service, PROJECTS, large),
        Measure("list of 1,000, unchanged (304)", service, PROJECTS, large, etag=tag),
        Measure("write (PUT)", service, one, small, PUT),
        Measure("one PUT in five", service, one, small, MIX),
    ]


def main(rounds=5, seconds=2):
    if not shutil.which("wrk"):
        sys.exit("wrk is missing: install it (Debian: apt-get install wrk)")
    options = [f"--workers={2 * os.cpu_count()}", "--access-logfile=/dev/null"]
    empty_app = [f"--pythonpath={ROOT}/tests/rigs", "empty:app"]
    with tempfile.TemporaryDirectory() as folder:
        database = f"{folder}/gardening.db"
        settings = environment_of(database)
        with (
            gunicorn(settings, *options, *empty_app) as empty,
            gunicorn(settings, *options) as service,
        ):
            every = measures(empty, service, database)
            for _ in range(rounds):
                for measure in every:
                    measure.take(seconds)
            memory = [measure.peak_memory() for measure in every]
    print(
        f"{date.today()}, {os.cpu_count()} cores, {CONNECTIONS} connections, ", end=""
    )
    print(f"median of {rounds} rounds of {seconds} s\n")
    print("| | requests/s | to the empty view | p50 ms | p99 ms | peak MB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    base = every[0].medians()[0]
    for measure, megabytes in zip(every, memory):
        rate, p50, p99 = measure.medians()
        print(f"| {measure.title} | {rate:,.0f} | {rate / base:.2f} |", end=" ")
        print(f"{p50:.1f} | {p99:.1f} | {megabytes:.0f} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
