"""A copy of an account's Projects, for a program that works offline or on several devices.

Copy this file. It needs Python 3.10 and requests. docs/local-copy.md has the rules that it follows.
"""

import json
import os
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypedDict

import requests

Object = dict[str, Any]  # of JSON: a Project, some of its fields, or a problem document
Outcome = Literal["made", "refused", "dropped", "waits"]  # what became of a change
SETTABLE = ("name", "postal_code", "location")  # add what you set of a later release
READ_ONLY = {"id": str, "created_at": int, "updated_at": int, "version": int}
moment = itemgetter("updated_at", "version")  # of a Project: a restore may lower its version
NO_PROJECT = "urn:gardening:no-such-project"
SPENT = "urn:gardening:key-spent"
FULL = "urn:gardening:account-full"
DECISIVE = {  # by method: the status of a success, and the types and statuses of problems
    "POST": (201, FULL, SPENT, 400, 411, 413, 415, 422),
    "PUT": (200, NO_PROJECT, 400, 411, 412, 413, 415, 422),
    "DELETE": (204, NO_PROJECT, 412),
    "GET": (200, NO_PROJECT),
}


class Pending(TypedDict):
    """The changes of a Project that the service has not made yet."""

    seen: Object | None  # the Project as the user saw it before them; None if it is new
    may_exist: bool  # the mark of a new one: whether it has been sent
    changes: list[Any]  # the fields of each, in order; None deletes the Project


class LocalCopy:
    """The Projects of one account, in a file. For one thread of one process.

    `change` notes what the user does, and `sync` sends it. What the service refuses goes into
    `conflicts`, for the user to decide.
    """

    def __init__(self, file: Path | str, url: str, token: str, timeout: float = 10) -> None:
        """`url` is the list's, `timeout` in seconds. Raises ValueError if the file has another."""
        file = self.file = Path(file).absolute()
        self.url, self.timeout = url.rstrip("/"), timeout
        self.session = Session()
        self.session.headers["Authorization"] = f"Bearer {token.strip()}"
        self.session.auth = lambda request: request  # or a login of ~/.netrc replaces the token
        saved: Object = json.loads(file.read_text()) if file.exists() else {}
        address = saved.get("url", self.url)
        if address != self.url:
            raise ValueError(f"{file} is a copy of {address}")
        self.etag: str | None = saved.get("etag")  # of the list, while `projects` are that list
        self.projects: dict[str, Object] = saved.get("projects", {})  # by id, as last received
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

    def shown(self) -> dict[str, Object]:
        """The Projects as the user should see them, by id, or by the key of a new one."""
        shown, known = {**self.projects}, {*self.ids.values()}
        for ref, pending in self.changes.items():
            if pending["may_exist"]:
                # The list may have it already. Whoever saw two and deleted one would lose both.
                same = new_project(pending["changes"][0]).items()
                alike = [id for id in shown if id not in known and same <= shown[id].items()]
                for id in alike[-1:]:
                    del shown[id]
            if None in pending["changes"]:
                shown.pop(ref, None)
                continue
            project = shown.get(ref) or pending["seen"] or dict.fromkeys(SETTABLE)
            for fields in pending["changes"]:
                project = project | fields
            shown[ref] = project
        copy: dict[str, Object] = json.loads(json.dumps(shown))
        return copy

    def change(self, fields: Object | None, project: Object | str | None = None) -> str:
        """Create a Project, change one, or without fields delete one. `sync` sends it.

        `project` is the Project as the user saw it; or the id or key of one for which changes
        wait, to add this one. Returns its id, or the key of a new one.

        Raises KeyError if none wait, or if it is to be deleted; TypeError or ValueError for what
        JSON cannot hold, such as NaN; OSError. Whatever it raises, nothing has changed.
        """
        seen: Object | None = None
        if project is None:
            ref = os.urandom(16).hex()
        elif isinstance(project, str):
            ref = self.ids.get(project, project)
            if ref not in self.changes:
                raise KeyError(f"Nothing waits for {project}: pass the Project as the user saw it")
        else:
            ref, seen = project["id"], project
        # A copy, since the caller may go on to use these objects.
        fields, seen = json.loads(json.dumps([fields, seen], allow_nan=False))
        pending = self.changes.get(ref) or Pending(seen=seen, may_exist=False, changes=[])
        if None in pending["changes"]:
            raise KeyError(f"{ref} is to be deleted")
        if fields is not None:
            fields = {name: value for name, value in fields.items() if name not in READ_ONLY}
        changes, conflicts = {**self.changes}, self.conflicts
        if seen and pending["seen"] and moment(seen) < moment(pending["seen"]):
            # The user has not seen what the others go on from.
            conflicts = self._with_conflict(ref, [fields], pending["seen"])
        elif fields is None and not pending["seen"] and not pending["may_exist"]:
            changes.pop(ref, None)  # nobody has heard of it
        else:
            changes[ref] = {**pending, "changes": [*pending["changes"], fields]}
        # Without the ETag, the next list is whole, and decides a deletion.
        self.save(etag=None, changes=changes, conflicts=conflicts)
        return ref

    def take_back(self, ref: str) -> None:
        """Forget what waits for this id or key. If a `sync` has failed, it may have been made."""
        self.save(changes=without(self.ids.get(ref, ref), self.changes))

    def drop(self, conflict: Object) -> None:
        """Forget one of `conflicts`, since the user has decided it."""
        conflicts = [*self.conflicts]
        conflicts.remove(conflict)
        self.save(conflicts=conflicts)

    def sync(self) -> None:
        """Send the changes, then fetch the list.

        Raises requests.RequestException if a response is missing, and OSError if the file cannot be
        written: call it again later. A new Project for which there is no room waits, and so does a
        deletion until a list lacks the Project.
        """
        failure = None
        for ref in [*self.changes]:
            try:
                while ref in self.changes and self._send(ref):
                    ref = self.ids.get(ref, ref)  # a new Project has an id by now
            except requests.RequestException as error:
                failure = error
                if error.response is None:
                    # Save it as the last one: the next sync may be that of another process.
                    self.save(changes={**without(ref, self.changes), ref: self.changes[ref]})
                    self._request("GET", "?size=1")  # raises if that meets silence, too
                elif error.response.status_code in (401, 429):
                    raise  # the others would meet that as well
        self._fetch()
        if failure:
            raise failure

    def _send(self, ref: str) -> bool:
        """Send the first change of a Project. Returns whether the next one can be sent."""
        pending = self.changes[ref]
        seen, changes = pending["seen"], pending["changes"]
        if seen:
            outcome, found = self._change(seen, *changes)
        else:
            outcome, found = self._create(ref, pending["may_exist"], *changes)
        if outcome == "made":
            self._made(ref, found)
        elif outcome == "refused":
            conflicts = self._with_conflict(ref, changes, found)
            self.save(changes=without(ref, self.changes), conflicts=conflicts)
        elif outcome == "dropped":
            self.take_back(ref)
        return outcome == "made"

    def _create(
        self, key: str, may_exist: bool, fields: Object, *later: Object | None
    ) -> tuple[Outcome, Object]:
        """Create a Project, and return what came of it, with the Project or problem found."""
        before, headers = self.changes, {"Idempotency-Key": key}
        self.save(changes={**before, key: {**before[key], "may_exist": True}})
        entered = new_project(fields)
        verdict, found = self._call("POST", "", entered, may_exist, json=fields, headers=headers)
        if verdict == 201:
            return "made", found
        if verdict == FULL:
            # This request has created nothing, but an earlier one may still arrive.
            self.save(changes=before)
            return "waits", found
        is_dropped = verdict == SPENT and (not later or None in later)
        return "dropped" if is_dropped else "refused", found

    def _change(
        self, seen: Object, fields: Object | None, *later: Object | None
    ) -> tuple[Outcome, Object]:
        """Change or delete a Project, if it is still what the user saw. The `later` ones wait."""
        id, headers = seen["id"], {"If-Match": f'"{seen["version"]}-{seen["updated_at"]}"'}
        wanted = {"id": id} | {name: seen.get(name) for name in SETTABLE} | (fields or {})
        after = wanted | {"version": seen["version"] + 1}
        if fields is None:
            verdict, found = self._call("DELETE", f"/{id}", {}, headers=headers)
        else:
            verdict, found = self._call("PUT", f"/{id}", after, json=fields, headers=headers)
        is_made = verdict == 200
        if verdict == 412:
            verdict, found = self._call("GET", f"/{id}", {"id": id})
            # If all is as the user wanted it, the change was made, and its response was lost.
            is_as_wanted = is_project(found, wanted) and moment(found) > moment(seen)
            is_made = is_as_wanted and fields is not None
        if is_made:
            return "made", found
        # The list decides a deletion.
        waits = verdict == 204 or (verdict == NO_PROJECT and None in (fields, *later))
        return "waits" if waits else "refused", found

    def _made(self, ref: str, found: Object) -> None:
        """Go on from what the user has seen by now."""
        pending, conflicts = self.changes[ref], self.conflicts
        changes = without(ref, self.changes)
        id, (fields, *left) = found["id"], pending["changes"]
        if left and id in changes:
            # The user has also changed the new Project as it came with the list.
            conflicts = self._with_conflict(ref, left, found)
        elif left:
            seen = found
            if not pending["seen"]:
                # The user saw what they entered, and nothing that others have changed since.
                seen = found | new_project(fields) | {"updated_at": found["created_at"]}
            changes[id] = Pending(seen=seen, may_exist=False, changes=left)
        projects = {**self.projects, id: found}
        ids = self.ids if id in self.changes else {**self.ids, ref: id}
        # From now on, `projects` are not the list of any ETag.
        self.save(etag=None, projects=projects, changes=changes, ids=ids, conflicts=conflicts)

    def _with_conflict(self, ref: str, changes: list[Any], found: Object) -> list[Object]:
        return [*self.conflicts, {"id": ref, "changes": changes, "found": found}]

    def _fetch(self) -> None:
        """Fetch the list, unless it is the one that is here."""
        response, found = self._request("GET", "", headers={"If-None-Match": self.etag})
        if response.status_code == 304 and self.etag:
            return
        etag = response.headers.get("ETag", "").strip()
        is_list = isinstance(found, list) and all(map(is_project, found))
        if response.status_code != 200 or not is_list or not etag:
            raise requests.HTTPError(f"{response} decides nothing", response=response)
        projects = {project["id"]: project for project in found}
        changes = {**self.changes}
        for ref, pending in self.changes.items():
            if pending["seen"] and None in pending["changes"] and ref not in projects:
                del changes[ref]  # deleted, by whomever
        ids = {key: id for key, id in self.ids.items() if id in projects or id in changes}
        self.save(etag=etag, projects=projects, changes=changes, ids=ids)

    def _call(
        self, method: str, path: str, expected: Object, may_exist: bool = False, **options: Any
    ) -> tuple[int | str, Object]:
        """The status or type that decides, and the Project or problem that came with it.

        A success has to show what is expected. Raises requests.RequestException if nothing came, or
        nothing that decides.
        """
        response, found = self._request(method, path, **options)
        status, media_type = response.status_code, response.headers.get("Content-Type", "")
        success, *problems = DECISIVE[method]
        if may_exist and is_project(found) and found["version"] > expected["version"]:
            expected = {}  # others have changed the new Project meanwhile
        if status == success and (method == "DELETE" or is_project(found, expected)):
            return status, found or {}
        if media_type.startswith("application/problem+json") and isinstance(found, dict):
            for verdict in (found.get("type", ""), status):
                # Nobody can have deleted what was never sent before.
                if verdict in problems and (verdict != SPENT or may_exist):
                    return verdict, found
        raise requests.HTTPError(f"{response} decides nothing", response=response)

    def _request(self, method: str, path: str, **options: Any) -> tuple[requests.Response, Any]:
        """A response, and the JSON in it, if any."""
        response = self.session.request(method, self.url + path, timeout=self.timeout, **options)
        try:
            return response, response.json()
        except (ValueError, RecursionError):
            return response, None


def without(ref: str, changes: dict[str, Pending]) -> dict[str, Pending]:
    """Raises KeyError if none wait for this one."""
    left = {**changes}
    del left[ref]
    return left


def new_project(fields: Object) -> Object:
    """What a Project with these fields has when it is created."""
    return dict.fromkeys(SETTABLE) | fields | {"version": 1}


class Session(requests.Session):
    def get_redirect_target(self, resp: requests.Response) -> None:
        """None: a redirect would take the token elsewhere, and turn a PUT into a GET.

        With `allow_redirects=False`, requests still parses a Location, which may be no address.
        """


def is_project(found: Any, expected: Object | None = None) -> bool:
    """Whether this is a Project, and has these members."""
    is_one = isinstance(found, dict) and all(type(found.get(n)) is READ_ONLY[n] for n in READ_ONLY)
    # The id becomes a part of a path.
    return is_one and found["id"].isalnum() and found | (expected or {}) == found
