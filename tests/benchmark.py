"""Measure the service next to an empty Flask view, under the same gunicorn settings.

    .venv/bin/python tests/benchmark.py [ROUNDS [SECONDS]]

Needs Linux and wrk. The rounds of the measures take turns, so that what else the machine
does meets all of them; the ratios of one run can be compared, the figures of two cannot.
"""

import http.client
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from flask import Flask

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
PROJECTS = "/api/v1/gardening/projects"
MEMBERS = {
    "name": "Buena Vista Park,SF",
    "postal_code": "94117",
    "location": {"type": "Point", "coordinates": [-122.4410896675, 37.768361565]},
}
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


def create_empty_app():
    app = Flask(__name__)
    app.add_url_rule("/", view_func=lambda: {"hello": "world"})
    return app


class Gunicorn:
    """gunicorn as gunicorn.conf.py has it, on a port of its own."""

    def __init__(self, folder, *arguments):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.environment = os.environ | {
            "GARDENING_BIND": f"127.0.0.1:{self.port}",
            "FLASK_DATABASE": f"{folder}/gardening.db",
        }
        command = [
            BIN / "gunicorn",
            "--log-level=warning",
            "--access-logfile=/dev/null",
        ]
        self.process = subprocess.Popen(
            [*command, *arguments], cwd=ROOT, env=self.environment
        )

    def request(self, method, path, token="", body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
        }
        connection.request(method, path, json.dumps(body), headers)
        response = connection.getresponse()
        content = json.loads(response.read()) if response.status < 300 else None
        connection.close()
        return response.headers, content

    def wait(self):
        while self.process.poll() is None:
            try:
                return self.request("GET", "/")
            except ConnectionRefusedError:
                continue
        sys.exit("gunicorn did not start")

    def token(self, account):
        command = [BIN / "flask", "token", "create", account]
        environment = self.environment
        output = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
        return output.strip()

    def peak_memory(self):
        """The peak of the processes' resident memory, in MB, shared pages once for each."""
        master = self.process.pid
        children = Path(f"/proc/{master}/task/{master}/children").read_text().split()
        status = [
            Path(f"/proc/{pid}/status").read_text() for pid in [master, *children]
        ]
        return sum(int(s.split("VmHWM:")[1].split()[0]) for s in status) / 1000


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
        self, title, target, path, token="", method="GET", body=None, etag=None, mix=""
    ):
        self.title, self.target, self.found = title, target, []
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
            command = [
                "wrk",
                "-t1",
                f"-c{CONNECTIONS}",
                f"-d{seconds}s",
                "-s",
                file.name,
            ]
            url = f"http://127.0.0.1:{self.target.port}"
            output = subprocess.check_output([*command, url], text=True)
        *figures, errors = map(float, output.split("RESULT ")[1].split())
        if errors:
            sys.exit(f"{self.title}: {errors:.0f} requests failed; no figure is valid")
        self.found.append(figures)

    def medians(self):
        return [statistics.median(figures) for figures in zip(*self.found)]


def measures(empty, service):
    small, large = service.token("small"), service.token("large")
    for _ in range(20):
        project = service.request("POST", PROJECTS, small, MEMBERS)[1]
    for _ in range(1000):
        service.request("POST", PROJECTS, large, MEMBERS)
    one = f"{PROJECTS}/{project['id']}"
    tag = service.request("GET", PROJECTS, large)[0]["ETag"]
    change = json.dumps({"name": "Buena Vista"})
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
    with tempfile.TemporaryDirectory() as folder:
        empty = Gunicorn(
            folder, f"--pythonpath={ROOT}/tests", "benchmark:create_empty_app()"
        )
        service = Gunicorn(folder)
        try:
            empty.wait()
            service.wait()
            every = measures(empty, service)
            for _ in range(rounds):
                for measure in every:
                    measure.take(seconds)
            memory = {target: target.peak_memory() for target in (empty, service)}
        finally:
            for target in (empty, service):
                target.process.terminate()
                target.process.wait()
    print(
        f"{date.today()}, {os.cpu_count()} cores, {CONNECTIONS} connections,", end=" "
    )
    print(f"median of {rounds} rounds of {seconds} s\n")
    print("| | requests/s | to the empty view | p50 ms | p99 ms | peak MB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    base = every[0].medians()[0]
    for measure in every:
        rate, p50, p99 = measure.medians()
        print(f"| {measure.title} | {rate:,.0f} | {rate / base:.2f} |", end=" ")
        print(f"{p50:.1f} | {p99:.1f} | {memory[measure.target]:.0f} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
