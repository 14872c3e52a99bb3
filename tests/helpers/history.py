"""Clients that write down every call, and what such a history cannot hold, after Jepsen.

A Project is a register: at first it is not there (state 0), then it has one version after the
other, and in the end it is GONE. Each write sends a name of its own, so what is read shows who
wrote it, and the times of the calls tell when a state can have begun and ended. All that a response
says must have been so at one moment of its call.

Nothing here knows an engine or a fault.
"""

import json
import random
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from itertools import accumulate, combinations, count, pairwise
from math import inf
from typing import Any, NamedTuple

from helpers.running import LIMIT, PROJECTS, Client, wait_for

GONE = inf
UNKNOWN = "urn:gardening:outcome-unknown"
CROWD = 3  # Projects of an account: few, so that its clients meet
END_OF_MOVE = 0.1  # seconds in which the nodes of a cluster commit a move, one by one


class Call(NamedTuple):
    method: str
    path: str  # behind PROJECTS: of a list "" or its query, of a Project "/ID"
    start: float  # seconds
    end: float = inf  # of a call without a response, or with one that knows no outcome
    status: int | None = None  # None: likewise
    response: Any = None
    etag: str | None = None
    name: str | None = None  # that was sent
    key: str | None = None  # Idempotency-Key
    condition: str | None = None  # the ETag in If-Match, or a GET's in If-None-Match
    client: int = 0
    account: str = ""

    @property
    def id(self):
        return self.path[1:]

    @property
    def projects(self):
        """Those in the response."""
        if self.status not in (200, 201):
            return []
        if isinstance(self.response, list):
            return self.response
        return self.response.get("projectList", [self.response])


def version_of(etag):
    return int(etag.strip('"').partition("-")[0])


def check(calls, moves=()):
    """Raises AssertionError for what could not have been.

    At each of the moments `moves`, the move of a shard between two nodes had ended.
    """
    for account in {call.account for call in calls}:
        of_account = [call for call in calls if call.account == account]
        History(of_account, moves).check()


class History:
    """The calls of one account."""

    def __init__(self, calls, moves):
        self.calls, self.moves = calls, moves
        self.lists = {}  # by path and ETag
        self.versions = defaultdict(dict)  # of each id, the Project by version
        self.first_seen = defaultdict(lambda: inf)
        self.writes = defaultdict(list)  # those that may have been made, by name and id
        # Of the Projects, by what the POST gave each as its postal code, for good.
        self.ids = defaultdict(set)

    def check(self):
        for call in self.calls:
            self.read(call)
        names = Counter()
        for id, versions in self.versions.items():
            self.check_versions(id, versions, names)
        for call in self.calls:
            self.check_write(call)
        self.check_moments()

    def read(self, call):
        if call.method != "GET" and call.status in (None, 200, 201, 204):
            self.writes[call.name].append(call)
            self.writes[call.id].append(call)
        if call.status == 200 and not call.path.startswith("/"):
            same = self.lists.setdefault((call.path, call.etag), call.response)
            assert same == call.response, "one ETag, two contents"
        for project in call.projects:
            id, version = project["id"], project["version"]
            same = self.versions[id].setdefault(version, project)
            assert same == project, "one version, two contents"
            self.first_seen[id] = min(self.first_seen[id], call.end)

    def check_versions(self, id, versions, names):
        """Each was made by a write of its own."""
        for version, project in versions.items():
            by = {(call.method, call.path) for call in self.writes[project["name"]]}
            writer = ("POST", "") if version == 1 else ("PUT", f"/{id}")
            assert by == {writer}, f"refused, or written by nobody: {project}"
            self.ids[project["postal_code"]].add(id)
            name = project["name"]
            names[name] += 1
            assert names[name] <= len(self.writes[name]), f"one write, two versions: {project}"
        missing = set(range(1, max(versions))) - set(versions)
        unseen = {call.name for call in self.writes[id]} - {*names, None}
        assert len(missing) <= len(unseen), f"a version is missing: {id}, {missing}"

    def check_write(self, call):
        """It made what it says, and of no other version than it named."""
        response = call.response
        if call.status == 201:
            assert response["id"] in self.ids[call.key or call.name], "another's"
            assert call.key or response["version"] == 1, "not new"
        if call.status == 204:
            others = [each.status for each in self.writes[call.id]]
            assert others.count(204) == 1, "deleted twice"
        if call.method == "PUT" and call.status == 200:
            assert response["name"] == call.name, "not what was sent"
        if call.condition and call.method != "GET" and call.status in (200, 204):
            before = response["version"] - 1 if response else max(self.versions[call.id])
            assert version_of(call.condition) == before, "not what If-Match names"

    def check_moments(self):
        began = {id: self.began(id) for id in self.versions}
        for ids in self.ids.values():
            for one, other in combinations(ids, 2):  # one was gone before the other was there
                gone = began[one][GONE], began[other][GONE]
                seen = self.first_seen[other], self.first_seen[one]
                assert gone[0] <= seen[0] or gone[1] <= seen[1], "one key, two Projects"
        views = [(call, self.view(call, began)) for call in self.calls]
        ended = self.ended(views, began)
        for call, view in views:
            since = max([call.start, *(began[id][view[id]] for id in view)])
            until = min([call.end, *(ended[id][view[id]] for id in view)])
            is_right = since <= until or self.may_be_stale(call)
            assert is_right, f"so at no moment of the call: {call}, {view}"
            for older, newer in pairwise(call.projects):
                assert began[older["id"]][1] <= ended[newer["id"]][0], "not in order"
            if call.status == 200 and "total" in call.response:
                page = call.response
                left = page["total"] - page["page"] * page["size"]
                assert len(page["projectList"]) == max(0, min(left, page["size"]))

    def may_be_stale(self, call):
        """A node that has not yet committed a move reads what the shard left behind."""
        return call.method == "GET" and any(
            call.start <= moment and call.end >= moment - END_OF_MOVE for moment in self.moves
        )

    def began(self, id):
        """By state, the earliest moment at which it can have begun."""
        starts = dict.fromkeys(range(max(self.versions[id]) + 1), -inf)
        for version, project in self.versions[id].items():
            starts[version] = min(call.start for call in self.writes[project["name"]])
        deletions = [call for call in self.writes[id] if call.method == "DELETE"]
        starts[GONE] = min((call.start for call in deletions), default=inf)
        return dict(zip(starts, accumulate(starts.values(), max), strict=True))

    def ended(self, views, began):
        """By state, the latest moment at which it was so: before a later one was seen."""
        seen = {id: dict.fromkeys(reversed(states), inf) for id, states in began.items()}
        for call, view in views:
            for id, state in view.items():
                seen[id][state] = min(seen[id][state], call.end)
        return {
            id: dict(zip(ends, accumulate([inf, *ends.values()], min), strict=False))
            for id, ends in seen.items()
        }

    def view(self, call, began):
        """The states of Projects that a response shows."""
        if call.status in (204, 404):
            return {call.id: GONE}
        if call.status == 304 and call.path.startswith("/"):
            return {call.id: version_of(call.condition)}
        if call.status == 304:
            if (call.path, call.condition) not in self.lists:  # its 200 is not to be checked
                return {}
            response = self.lists[call.path, call.condition]
            call = call._replace(status=200, response=response)
        view = {project["id"]: project["version"] for project in call.projects}
        if isinstance(call.response, list):
            for id in began.keys() - view:
                if self.first_seen[id] < call.start:
                    view[id] = GONE
                elif began[id][GONE] > call.end:
                    view[id] = 0
        return view


class Scribe:
    """A client that writes down its calls, among those of its account."""

    def __init__(self, client, ports, account, calls, etags, keys):
        self.client, self.ports, self.account = client, ports, account
        self.calls, self.etags, self.keys = calls, etags, keys
        self.chance, self.numbers = random.Random(client), count()

    def work(self, ended):
        while not ended.is_set():
            if self.call(*self.choose()).status in (None, 503):
                ended.wait(0.05)

    def choose(self):
        """The next call: method, path, name, key, condition."""
        chance, name = self.chance, f"{self.client} {next(self.numbers)}"
        paths = [path for path in list(self.etags) if path.startswith("/")]
        method = chance.choice(["GET", "GET", "PUT", "PUT", "DELETE"])
        if not paths or method == "DELETE" and len(paths) < CROWD:
            key = chance.choice([None, name, *self.keys[-2:]])
            if key == name:
                self.keys.append(key)  # for the others, too
            return "POST", "", chance.choice([name, key or name]), key, None
        path = chance.choice(paths)
        if method == "GET":
            path = chance.choice([path, "", "", "?page=1&size=2"])
        condition = chance.choice([None, self.etags.get(path)])
        return method, path, name if method == "PUT" else None, None, condition

    def call(self, method, path, name=None, key=None, condition=None):
        body = {"name": name} if name else None
        if method == "POST":
            body["postal_code"] = key or name
        headers = {"Idempotency_Key": key} if key else {}
        if condition:
            headers["If_None_Match" if method == "GET" else "If_Match"] = condition
        sent = {"name": name, "key": key, "condition": condition}
        by = {"client": self.client, "account": self.account}
        port, whole_path = self.chance.choice(self.ports), PROJECTS + path
        call = Call(method, path, time.monotonic(), **sent, **by)
        with suppress(OSError, HTTPException), Client(port, self.account) as client:
            status, received, content = client.ask(method, whole_path, body, **headers)
            response = json.loads(content) if content else None
            if status != 503 or response["type"] != UNKNOWN:
                now, etag = time.monotonic(), received["ETag"]
                call = call._replace(end=now, status=status, response=response, etag=etag)
        self.calls.append(call)
        self.learn(call)
        return call

    def learn(self, call):
        for project in call.projects:
            etag = f'"{project["version"]}-{project["updated_at"]}"'
            self.etags[f"/{project['id']}"] = etag
        if call.method == "GET" and call.status == 200:
            self.etags[call.path] = call.etag
        if call.status in (204, 404):
            self.etags.pop(call.path, None)

    def read_everything(self):
        for path in ["", *{call.path for call in self.calls if call.method == "PUT"}]:
            wait_for(lambda path=path: self.call("GET", path).status in (200, 404))


def record(ports, tokens, faults, seconds=10, clients=8):
    """The calls of so many clients, each in the account of one of the tokens.

    Each call goes to one of the ports, a list that `faults` may change. That is called until the
    time is over, but once at least. Then everything is read once more.
    """
    shared = [(ports, token, [], {}, []) for token in tokens]
    scribes = [Scribe(i, *shared[i % len(shared)]) for i in range(clients)]
    ended, deadline = threading.Event(), time.monotonic() + seconds
    with ThreadPoolExecutor(clients) as threads:
        works = [threads.submit(scribe.work, ended) for scribe in scribes]
        try:
            faults()
            while time.monotonic() < deadline:
                faults()
        finally:
            ended.set()
        for each in works:
            each.result(LIMIT)
    readers = [Scribe(clients, *each) for each in shared]
    for reader in readers:
        reader.read_everything()
    return [call for reader in readers for call in reader.calls]
