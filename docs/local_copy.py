"""A copy of an account's Projects, for a program that works offline or on several devices.

Copy this file. It needs requests alone. docs/api.md has the rules that it follows.
"""

import json
import os
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import requests

Object = dict[str, Any]  # of JSON: a Project, some of its fields, or a problem document
Answer = tuple[int | str, Object]  # the status or type that decides; the Project or the problem
SETTABLE = ("name", "postal_code", "location")  # and what you set of a later release
READ_ONLY = {"id": str, "created_at": int, "updated_at": int, "version": int}
moment = itemgetter("updated_at", "version")  # of a Project: a restore may lower its version
NO_PROJECT = "urn:gardening:no-such-project"
SPENT = "urn:gardening:key-spent"
FULL = "urn:gardening:account-full"
REFUSED = (400, 412, 413, 415, 422, NO_PROJECT, SPENT, FULL)  # status or type of a problem document
SUCCESS = {"GET": 200, "POST": 201, "PUT": 200, "DELETE": 204}


class Pending(TypedDict):
    """The changes of a Project that the service has not made yet."""

    seen: Object | None  # the Project as the user saw it before them; None if it is new
    may_exist: bool  # whether a new one has been sent
    changes: list[Any]  # the fields of each, in order; None deletes the Project


class Outcome(NamedTuple):
    """What became of the first change of a Project, and so of those behind it."""

    found: Object  # the Project as the service has it, or a problem document; {} if it is deleted
    left: list[Any]  # the changes that are not made
    seen: Object | None = None  # what the user saw before these; None if they are refused


class LocalCopy:
    """The Projects of one account, in a file. For one thread of one process.

    `change` notes in `changes` what the user does. `sync` sends that, and fetches `projects`, which
    never show what is not sent yet. What the service refuses goes into `conflicts`.
    """

    def __init__(self, file: Path, url: str, token: str, timeout: float = 10) -> None:
        """`url` is the list's, `timeout` in seconds. Raises ValueError if the file has another."""
        self.file, self.url, self.timeout = file, url.rstrip("/"), timeout
        self.session = Session()
        self.session.headers["Authorization"] = f"Bearer {token.strip()}"
        self.session.auth = lambda request: request  # or a login of ~/.netrc replaces the token
        saved: Object = json.loads(file.read_text()) if file.exists() else {}
        address = saved.get("url", self.url)
        if address != self.url:
            raise ValueError(f"{file} is a copy of {address}")
        self.etag: str | None = saved.get("etag")  # of the list, while `projects` are that list
        self.projects: dict[str, Object] = saved.get("projects", {})  # by id
        self.changes: dict[str, Pending] = saved.get("changes", {})  # by id, or key of a new one
        self.ids: dict[str, str] = saved.get("ids", {})  # of what was created here, by key
        # Each has an `id` or key, the `changes`, and the Project or problem that was `found`.
        self.conflicts: list[Object] = saved.get("conflicts", [])

    def save(self, **changed: Any) -> None:
        """Write all to the file, with these members changed, and only then change them here.

        A kill leaves the file as it was before or after, and so does a power failure, which may
        undo the last seconds. An OSError leaves all as it was.
        """
        members = ("url", "etag", "projects", "changes", "ids", "conflicts")
        text = json.dumps({name: getattr(self, name) for name in members} | changed)
        with open(f"{self.file}.new", "w", opener=lambda to, how: os.open(to, how, 0o600)) as file:
            file.write(text)
            file.flush()
            os.fsync(file)
        os.replace(file.name, self.file)
        vars(self).update(changed)

    def change(self, fields: Object | None, project: Object | str | None = None) -> str:
        """Create a Project, change one, or without fields delete one. `sync` sends it.

        `project` is the Project as the user saw it; or its id or key, for the Project as it is
        here. Returns its id, or the key of a new one.

        Raises KeyError if there is none, or if it is to be deleted; TypeError or ValueError for
        what JSON cannot hold, such as NaN; OSError. Whatever it raises, nothing has changed.
        """
        seen: Object | None = None
        if project is None:
            ref = os.urandom(16).hex()
        elif isinstance(project, str):
            ref = self.ids.get(project, project)
            seen = self.changes[ref]["seen"] if ref in self.changes else self.projects[ref]
        else:
            ref, seen = project["id"], project
        # A copy, since the caller may go on to use these objects.
        fields, seen = json.loads(json.dumps([fields, seen], allow_nan=False))
        pending = self.changes.get(ref) or Pending(seen=seen, may_exist=False, changes=[])
        if None in pending["changes"]:
            raise KeyError(f"{ref} is to be deleted")
        if seen and pending["seen"]:
            # If the user saw an older state this time, all these changes become a conflict.
            seen = min(seen, pending["seen"], key=moment)
        if fields is not None:
            fields = {name: value for name, value in fields.items() if name not in READ_ONLY}
        left = [*pending["changes"], fields]
        changes = {**self.changes, ref: {**pending, "seen": seen, "changes": left}}
        if fields is None and not seen and not pending["may_exist"]:
            del changes[ref]  # nobody has heard of it
        self.save(changes=changes)
        return ref

    def sync(self) -> None:
        """Send the changes, then fetch the list.

        Raises requests.RequestException if a response is missing, and OSError if the file cannot be
        written: call it again later. A new Project for which there is no room waits.
        """
        failure = None
        for ref in [*self.changes]:
            try:
                while ref in self.changes and self._send(ref):
                    ref = self.ids.get(ref, ref)  # a new Project has an id by now
            except requests.RequestException as error:
                is_silent = isinstance(error, (requests.ConnectionError, requests.Timeout))
                if is_silent or getattr(error.response, "status_code", None) in (401, 429):
                    raise  # the others would meet that as well
                failure = error
        self._fetch()
        if failure:
            raise failure

    def _send(self, ref: str) -> bool:
        """Send the first change of a Project. Returns whether it is decided."""
        seen, changes = self.changes[ref]["seen"], self.changes[ref]["changes"]
        outcome = self._change(seen, *changes) if seen else self._create(ref, *changes)
        if outcome:
            self._file(ref, outcome)
        return outcome is not None

    def _create(self, key: str, fields: Object, *later: Object | None) -> Outcome | None:
        """Returns None if there is no room for it yet."""
        before, headers = self.changes, {"Idempotency-Key": key}
        self.save(changes={**before, key: {**before[key], "may_exist": True}})
        verdict, found = self._call("POST", "", fields, json=fields, headers=headers)
        if verdict == FULL:
            # This request has created nothing, but an earlier one may still arrive.
            self.save(changes=before)
            return None
        if verdict == 201:
            # The user saw what they entered, and nothing that others have changed since.
            first = {"version": 1, "updated_at": found["created_at"]}
            seen = found | dict.fromkeys(SETTABLE) | fields | first
            return Outcome(found, [*later], seen)
        if None in later or (verdict == SPENT and not later):
            return Outcome({}, [])
        return Outcome(found, [fields, *later])

    def _change(self, seen: Object, fields: Object | None, *later: Object | None) -> Outcome:
        """Change or delete a Project, unless it is no longer what the user saw."""
        path = f"/{seen['id']}"
        headers = {"If-Match": f'"{seen["version"]}-{seen["updated_at"]}"'}
        if fields is None:
            verdict, found = self._call("DELETE", path, {}, headers=headers)
        else:
            after = fields | {"id": seen["id"], "version": seen["version"] + 1}
            verdict, found = self._call("PUT", path, after, json=fields, headers=headers)
        is_made = verdict == 200
        if verdict == 412:
            verdict, found = self._call("GET", path, {"id": seen["id"]})
            # If all is as the user wanted it, the change was made, and its response was lost.
            wanted = {name: seen.get(name) for name in SETTABLE} | (fields or {})
            is_as_wanted = is_project(found, wanted) and moment(found) > moment(seen)
            is_made = is_as_wanted and fields is not None
        if is_made:
            return Outcome(found, [*later], seen=found)
        if verdict == 204 or (verdict == NO_PROJECT and None in (fields, *later)):
            return Outcome({}, [])
        return Outcome(found, [fields, *later])

    def _file(self, ref: str, outcome: Outcome) -> None:
        """Take the first change of a Project out, and put each thing where it belongs."""
        found, left, seen = outcome
        projects, changes, ids = {**self.projects}, {**self.changes}, {**self.ids}
        conflicts = self.conflicts
        del changes[ref]
        if is_project(found):
            projects[found["id"]] = found
            if found["id"] != ref:
                ids[ref] = found["id"]
        elif not found:
            projects.pop(ref, None)
        if left and seen and seen["id"] not in changes:
            changes[seen["id"]] = Pending(seen=seen, may_exist=True, changes=left)
        elif left:
            # Refused; or the user has also changed a new Project as it came with the list.
            conflicts = [*conflicts, {"id": ref, "changes": left, "found": found}]
        # From now on, `projects` are not the list of any ETag.
        self.save(etag=None, projects=projects, changes=changes, ids=ids, conflicts=conflicts)

    def _fetch(self) -> None:
        """Fetch the list, unless it is the one that is here."""
        response, found = self._request("GET", "", headers={"If-None-Match": self.etag})
        if response.status_code == 304 and self.etag:
            return
        etag = response.headers.get("ETag", "").strip()
        is_list = isinstance(found, list) and all(map(is_project, found))
        if response.status_code != 200 or not is_list or not etag:
            raise requests.HTTPError(f"{response} decides nothing", response=response)
        self.save(etag=etag, projects={project["id"]: project for project in found})

    def _call(self, method: str, path: str, shown: Object, **options: Any) -> Answer:
        """Raises requests.RequestException if nothing came, or nothing that decides."""
        response, found = self._request(method, path, **options)
        status, media_type = response.status_code, response.headers.get("Content-Type", "")
        if method == "POST" and is_project(found) and found["version"] > 1:
            shown = {}  # it was created by an earlier request, and others have changed it since
        if status == SUCCESS[method] and (method == "DELETE" or is_project(found, shown)):
            return status, found or {}
        is_problem = media_type.startswith("application/problem+json") and isinstance(found, dict)
        verdicts = (found.get("type"), status) if is_problem else ()
        for verdict in verdicts:
            if verdict in REFUSED:
                return verdict, found
        raise requests.HTTPError(f"{response} decides nothing", response=response)

    def _request(self, method: str, path: str, **options: Any) -> tuple[requests.Response, Any]:
        """A response, and the JSON in it, if any."""
        response = self.session.request(method, self.url + path, timeout=self.timeout, **options)
        try:
            return response, response.json()
        except (ValueError, RecursionError):
            return response, None


class Session(requests.Session):
    def get_redirect_target(self, resp: requests.Response) -> None:
        """None: a redirect would take the token elsewhere, and turn a PUT into a GET."""


def is_project(found: Any, shown: Object | None = None) -> bool:
    """Whether this is a Project, and has these members."""
    is_one = isinstance(found, dict) and all(type(found.get(n)) is READ_ONLY[n] for n in READ_ONLY)
    return is_one and found["id"].isalnum() and found | (shown or {}) == found
