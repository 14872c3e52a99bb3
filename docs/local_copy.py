"""A copy of an account's Projects, for a program that works offline or on several devices.

Copy this file. It needs requests alone. docs/api.md has the rules that it follows.
"""

import json
import os
from pathlib import Path
from typing import Any

import requests

Object = dict[str, Any]  # of JSON: a Project, some of its fields, or a problem document
NO_PROJECT = "urn:gardening:no-such-project"
SPENT = "urn:gardening:key-spent"
FULL = "urn:gardening:account-full"
REFUSED = (400, 412, 413, 415, 422)  # for good, whatever the type of the problem
SUCCESS = {"GET": 200, "POST": 201, "PUT": 200, "DELETE": 204}


class LocalCopy:
    """The Projects of an account, in a file. For one thread of one process.

    `projects` has each Project by id, as the service last sent it. `changes` has what is not sent
    yet, by the id of a Project or the key of a new one: first the Project as the user saw it, then
    the fields of each change, or None for a deletion. A new Project has None in the first place, or
    {} once it may have been sent. `ids` has the id of each Project that was created here, by key.
    `conflicts` has what was refused: the id or key, the changes, and what was found, which is the
    Project as the service has it, or its problem document.
    """

    def __init__(self, file: Path, url: str, token: str, timeout: float = 10) -> None:
        """`url` is the address of the list. Raises ValueError for a file of another address.

        A file belongs to one account, whose token may change.
        """
        self.file, self.url, self.timeout = file, url.rstrip("/"), timeout
        self.session = requests.Session()
        self.session.headers["Authorization"] = f"Bearer {token}"
        saved = json.loads(file.read_text()) if file.exists() else [self.url, None, {}, {}, {}, []]
        address, self.etag, self.projects, self.changes, self.ids, self.conflicts = saved
        if address != self.url:
            raise ValueError(f"{file} is a copy of {address}")

    def save(self) -> None:
        """Write all of it to the file, which a kill leaves as it was before or after.

        After an OSError, what has changed here is not in the file yet.
        """
        state = self.url, self.etag, self.projects, self.changes, self.ids, self.conflicts
        with open(f"{self.file}.new", "w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file)
        os.replace(file.name, self.file)

    def change(self, fields: Object | None, project: Object | str | None = None) -> str:
        """Create a Project, change one, or without fields delete one. `sync` sends it.

        `project` is the Project as the user saw it; or its id or key, for the Project as it is
        here. Returns its id, or the key of a new one. Raises KeyError if there is none, or if it is
        to be deleted.
        """
        if project is None:
            ref, seen = os.urandom(16).hex(), None
        elif isinstance(project, str):
            ref = self.ids.get(project, project)
            seen = self.changes[ref][0] if ref in self.changes else self.projects[ref]
        else:
            ref, seen = project["id"], project
        changes = self.changes.setdefault(ref, [seen])
        if None in changes[1:]:
            raise KeyError(f"{ref} is to be deleted")
        if seen and seen["version"] < changes[0]["version"]:
            changes[0] = seen  # so that all these changes become a conflict
        if fields is None and changes[0] is None:
            del self.changes[ref]  # nobody has heard of it
        else:
            changes.append(fields)
        self.save()
        return ref

    def sync(self) -> None:
        """Send the changes, then fetch the list.

        Raises requests.RequestException if a response is missing: call it again later. A change that
        is refused becomes a conflict, and a new Project for which there is no room waits.
        """
        failure = None
        for ref in [*self.changes]:
            next_ref: str | None = ref
            try:
                while next_ref:
                    next_ref = self._send(next_ref)
            except (requests.ConnectionError, requests.Timeout):
                raise  # nothing responds, and each of the others would wait for that, too
            except requests.RequestException as error:
                if error.response is not None and error.response.status_code in (401, 429):
                    raise  # which is about the caller, not the change
                failure = error
        self._fetch()
        if failure:
            raise failure

    def _send(self, ref: str) -> str | None:
        """Send the first change of a Project. Returns its id if there is another one to send."""
        if self.changes[ref][0] is None:
            self.changes[ref][0] = {}
            self.save()
        is_done, project, problem = self._submit(ref)
        base, fields, *later = self.changes[ref]
        if problem.get("type") == FULL and not is_done:
            self.changes[ref][0] = None  # it was not created, and waits for room
            self.save()
            return None
        del self.changes[ref]
        self.etag = None  # from now on, `projects` is not the list that this names
        if project:
            self.projects[project["id"]] = project
        elif not problem or problem.get("type") == NO_PROJECT:
            self.projects.pop(ref, None)
        if project and not base:
            self.ids[ref] = project["id"]
            # The user saw what they created, and no change of another device since.
            project = project | {"version": 1, "updated_at": project["created_at"]}
        left = [fields, *later]
        if is_done:
            left = later if project else []  # a deletion ends what is left
        next_ref = None
        if left and is_done and project["id"] not in self.changes:
            next_ref = str(project["id"])
            self.changes[next_ref] = [project, *left]
        elif left:
            # Refused; or the user has also changed a new Project as it came with the list.
            self.conflicts.append({"id": ref, "changes": left, "found": project or problem})
        self.save()
        return next_ref

    def _submit(self, ref: str) -> tuple[bool, Object, Object]:
        """Whether the first change of a Project is done now; and what `_call` returned last.

        It changes nothing here, so that it can be repeated after any error.
        """
        base, fields, *later = self.changes[ref]
        is_deleted = None in (fields, *later)
        if not base:
            project, problem = self._call("POST", self.url, fields, {"Idempotency-Key": ref})
            is_spent = problem.get("type") == SPENT and not later
            return bool(project) or is_deleted or is_spent, project, problem
        url = f"{self.url}/{base['id']}"
        method = "DELETE" if fields is None else "PUT"
        etag = f'"{base["version"]}-{base["updated_at"]}"'
        project, problem = self._call(method, url, fields, {"If-Match": etag})
        is_made = not problem
        if problem.get("status") == 412:
            project, problem = self._call("GET", url)
            # If all is as the user wanted it, the change was made, and its response was lost.
            before = {"version": base["version"], "updated_at": base["updated_at"]}
            is_made = fields is not None and project | before == base | fields
        return is_made or (is_deleted and problem.get("type") == NO_PROJECT), project, problem

    def _fetch(self) -> None:
        """Fetch the list, unless it is the one that is here."""
        response, found = self._request("GET", self.url, headers={"If-None-Match": self.etag})
        if response.status_code == 304 and self.etag:
            return
        is_list = isinstance(found, list) and all(map(is_project, found))
        if response.status_code != 200 or not is_list or "ETag" not in response.headers:
            raise undecided(response)
        self.projects = {project["id"]: project for project in found}
        self.ids = {key: id for key, id in self.ids.items() if id in self.projects}
        self.etag = response.headers["ETag"]
        self.save()

    def _call(
        self, method: str, url: str, fields: Object | None = None, headers: Any = None
    ) -> tuple[Object, Object]:
        """The Project, and the problem; one of them is {}, and both are after a deletion.

        Raises requests.RequestException if nothing came, or nothing that decides.
        """
        response, found = self._request(method, url, json=fields, headers=headers)
        status, media_type = response.status_code, response.headers.get("Content-Type", "")
        if status == SUCCESS[method] and (method == "DELETE" or is_project(found)):
            return found or {}, {}
        is_problem = media_type.startswith("application/problem+json") and isinstance(found, dict)
        if is_problem and (status in REFUSED or found.get("type") in (NO_PROJECT, SPENT, FULL)):
            return {}, found
        raise undecided(response)

    def _request(self, method: str, url: str, **options: Any) -> tuple[requests.Response, Any]:
        """A response, and the JSON in it, if any."""
        # A redirect would take the token elsewhere, and turn a PUT into a GET.
        options |= {"timeout": self.timeout, "allow_redirects": False}
        response = self.session.request(method, url, **options)
        try:
            return response, response.json()
        except ValueError:
            return response, None


def is_project(found: Any) -> bool:
    return isinstance(found, dict) and {"id", "created_at", "updated_at", "version"} <= {*found}


def undecided(response: requests.Response) -> requests.HTTPError:
    """The error for a response after which all is as if none had come."""
    text = f"{response.status_code} {response.reason} decides nothing: {response.url}"
    return requests.HTTPError(text, response=response)
