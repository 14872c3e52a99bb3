"""Measure the service next to an empty Flask view, under the same gunicorn settings.

    .venv/bin/python tests/benchmark.py [ROUNDS [SECONDS]]

Needs Linux and wrk. The rounds of the measures take turns, so that what else the machine
does meets all of them; the ratios of one run can be compared, the figures of two cannot.
"""

import json
import os
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
CONNECTIONS = 8
SCRIPT = """
wrk.method, wrk.path, wrk.body = {method}, {path}, {body}
wrk.headers["Authorization"] = "Bearer " .. {token}
wrk.headers["Content-Type"] = "application/json"
wrk.headers["If-None-Match"] = {etag}
{request}
function done(summary, latency)
  local e = summary.errors
  print(string.format("RESULT %f %f %f %d", summary.requests / summary.duration * 1e6,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    e.status + e.connect + e.read + e.write + e.timeout))
end
"""
# One write in five requests; the others read what it changes.
MIX = """
local count = 0
function request()
  count = count + 1
  return wrk.format(count % 5 == 0 and "PUT" or "GET")
end
"""


class Measure:
    """A request that wrk repeats; `found` gets requests/s, p50 and p99 (ms) a round."""

    def __init__(
        self, title, served, path, token="", method="GET", body=None, etag=None, mix=""
    ):
        self.title, self.found = title, []
        self.process, self.port = served
        lua = {"method": method, "path": path, "body": body}
        lua |= {"token": token, "etag": etag}
        texts = {
            name: "nil" if text is None else json.dumps(text)
            for name, text in lua.items()
        }
        self.script = SCRIPT.format(request=mix, **texts)

    def take(self, seconds):
        with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
            file.write(self.script)
            file.flush()
            command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s"]
            url = f"http://127.0.0.1:{self.port}"
            command += ["-s", file.name, url]
            output = subprocess.check_output(command, text=True)
        *figures, errors = map(float, output.split("RESULT ")[1].split())
        if errors:
            sys.exit(f"{self.title}: {errors:.0f} requests failed; no figure is valid")
        self.found.append(figures)

    def medians(self):
        return [statistics.median(figures) for figures in zip(*self.found)]

    def peak_memory(self):
        """The peak of the processes' resident memory, in MB, shared pages once for each."""
        pids = [self.process.pid, *workers(self.process)]
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
    one, change = f"{PROJECTS}/{project['id']}", json.dumps({"name": "Buena Vista"})
    return [
        Measure("empty Flask view", empty, "/"),
        Measure("read", service, one, small),
        Measure("list of 20", service, PROJECTS, small),
        Measure("list of 1,000", service, PROJECTS, large),
        Measure("list of 1,000, unchanged (304)", service, PROJECTS, large, etag=tag),
        Measure("write (PUT)", service, one, small, "PUT", change),
        Measure("one PUT in five", service, one, small, body=change, mix=MIX),
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
