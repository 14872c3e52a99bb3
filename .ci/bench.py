"""How fast the service is, beside an empty Flask view under the same gunicorn.

    PYTHONPATH=.:tests .venv/bin/python .ci/bench.py

It needs wrk, a quiet machine, and about two minutes. Compare only its ratios with those of another
machine.
"""

import os
import re
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median

from helpers import running
from helpers.running import PROJECTS, closing_store, gunicorn

ROUNDS = 10  # of a second for each kind of request
WORKERS = f"--workers={2 * len(os.sched_getaffinity(0))}"  # as gunicorn.conf.py has it
EMPTY = "from flask import Flask\napp = Flask('empty')\napp.get('/')(lambda: '')\n"
SCRIPT = """
local requests, turn = {%s}, 0
function init()
    for i, each in ipairs(requests) do
        requests[i] = wrk.format(each[1], each[2], nil, each[3])
    end
end
function request()
    turn = turn %% #requests + 1
    return requests[turn]
end
"""


def fill(database, account, count):
    """A token of an account with so many Projects, and their addresses."""
    fields = {"name": "Park", "postal_code": "94117", "location": running.POINT}
    with closing_store(database) as store:
        store.engine.open_database(creates=True)
        ids = [store.create_project(account, fields).id for _ in range(count)]
    return running.token_on(database, account), [f"{PROJECTS}/{id}" for id in ids]


def measure(folder, port, token="none", requests=("{'GET', '/'}",), *options):
    """Requests a second, over eight connections."""
    (folder / "script.lua").write_text(SCRIPT % ",".join(requests))
    command = ["wrk", "-t1", "-c8", "-d1s", "-s", folder / "script.lua", *options]
    command += ["-H", f"Authorization: Bearer {token}"]
    command += ["-H", "Content-Type: application/json"]
    printed = running.run(*command, f"http://127.0.0.1:{port}").stdout
    assert "Non-2xx" not in printed and "Socket errors" not in printed, printed
    return float(re.findall(r"Requests/sec: +([\d.]+)", printed)[0])


with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # /tmp may be memory
    folder, database, figures = Path(name), f"{name}/gardening.db", defaultdict(list)
    (folder / "empty.py").write_text(EMPTY)
    small, addresses = fill(database, "small", 20)
    large, _ = fill(database, "large", 1000)
    gets = [f"{{'GET', '{address}'}}" for address in addresses]
    puts = [f"{{'PUT', '{address}', '{{}}'}}" for address in addresses]
    kinds = {
        "read": (small, gets),
        "list of 20": (small, [f"{{'GET', '{PROJECTS}'}}"]),
        "list of 1,000": (large, [f"{{'GET', '{PROJECTS}'}}"]),
        "unchanged list": (large, [f"{{'GET', '{PROJECTS}'}}"], "-HIf-None-Match: *"),
        "write": (small, puts),
        "three reads, one write": (small, [*gets[:3], puts[0]]),
    }
    start = partial(gunicorn, running.environment_of(database), WORKERS)
    with start() as (_, port), start(f"--pythonpath={name}", "empty:app") as (_, empty):
        for each in port, empty:
            running.Client(each, "none").fetch("GET", "/")  # waits until it has started
        for _ in range(ROUNDS):
            for kind, options in kinds.items():
                beside, speed = measure(folder, empty), measure(folder, port, *options)
                figures[kind].append((speed, speed / beside))
for kind, found in figures.items():
    speed, ratio = (median(each) for each in zip(*found, strict=True))
    print(f"{kind:22} {speed:8.0f}/s, {ratio:.2f} of an empty view")
