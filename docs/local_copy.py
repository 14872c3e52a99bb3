"""A copy of an account's Projects, for a program that works offline or on several devices.

Copy this file. It needs requests alone. docs/api.md has the rules that it follows.
"""

import json
import os
from pathlib import Path
from typing import Any

import requests

Object = dict[str, Any]  # of JSON: a Project, some of its fields, or a problem document
FULL = "urn:gardening:account-full"
GONE = ("urn:gardening:no-such-project", "urn:gardening:key-spent")
REFUSED = (400, 412, 413, 415, 422)  # for good, whatever the type of the problem
SUCCESS = {"GET": 200, "POST": 201, "PUT": 200, "DELETE": 204}


class LocalCopy:
    """The Projects of an account, in a file. For one thread of one process.

    `projects` has each Project by id, as the service last sent it. `changes` has what is not sent
    yet, by the id of a Project or the key of a new one: first the Project as the user saw it, then
    the fields of each change, or None for a deletion. A new Project has None in the first place, or
    {} once it may have been sent. `ids` has the id of each Project that was created here, by key.
    `conflicts` has the changes that were not made, and what the service has instead.
    """

    def __init__(self, file: Path, url: str, token: str, timeout: float = 10) -> None:
        """`url` is the address of the list. Raises ValueError if the file is a copy of another.

        A file belongs to one account. Its token may change.
        """
        self.file, self.url, self.timeout = file, url.rstrip("/"), timeout
        self.session = requests.Session()
        self.session.headers["Authorization"] = f"Bearer {token}"
        saved = json.loads(file.read_text()) if file.exists() else [self.url, None, {}, {}, {}, []]
        address, self.etag, self.projects, self.changes, self.ids, self.conflicts = saved
        if address != self.url:
            raise ValueError(f"{file} is a copy of {address}")

    def save(self) -> None:
        """Write all of it to the file, which a kill leaves as it was before or after."""
        state = self.url, self.etag, self.projects, self.changes, self.ids, self.conflicts
        with open(f"{self.file}.new", "w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file)
        os.replace(file.name, self.file)

    def change(self, fields: Object | None, project: Object | str | None = None) -> str:
        """Create a Project, change one, or without fields delete one. `sync` sends it.

        `project` is the Project as the user saw it; or its id or key, for the Project as it is
        here. Returns its id, or the key of a new one. Raises KeyError for an unknown id or key.
        """
        if project is None:
            name = os.urandom(16).hex()
            self.changes[name] = [None]
        elif isinstance(project, str):
            name = self.ids.get(project, project)
            if name not in self.changes:
                self.changes[name] = [self.projects[name]]
        else:
            name = project["id"]
            self.changes.setdefault(name, [project])
        if fields is None and self.changes[name][0] is None:
            del self.changes[name]  # nobody has heard of it
        else:
            self.changes[name].append(fields)
        self.save()
        return name

    def sync(self) -> None:
        """Send the changes, then fetch the list.

        Raises requests.RequestException unless all of that succeeded: call it again later.
        """
        failure = None
        for name in [*self.changes]:
            next_name: str | None = name
            try:
                while next_name:
                    next_name = self.send(next_name)
            except (requests.ConnectionError, requests.Timeout):
                raise  # nothing responds, and each of the others would wait for that, too
            except requests.RequestException as error:
                if error.response is not None and error.response.status_code in (401, 429):
                    raise  # which is about the caller, not the change
                failure = error
        self.fetch()
        if failure:
            raise failure

    def send(self, name: str) -> str | None:
        """Send the first change with this name. Returns the name of the next one, if any is left."""
        if self.changes[name][0] is None:
            self.changes[name][0] = {}
            self.save()
        is_done, project, problem = self.submit(name)
        base, fields, *later = self.changes[name]
        if problem.get("type") == FULL and not is_done:
            self.changes[name][0] = None  # it was not created, and waits for room
            self.save()
            return None
        del self.changes[name]
        self.etag = None  # from now on, `projects` is not the list that this names
        if project:
            self.projects[project["id"]] = project
        elif base and (not problem or problem.get("type") in GONE):
            self.projects.pop(name, None)
        if project and not base:
            self.ids[name] = project["id"]
            # The user saw what they created, and no change of another device since.
            project = project | {"version": 1, "updated_at": project["created_at"]}
        left = [fields, *later]
        if is_done:
            left = later if project else []  # a deletion ends what is left
        next_name = None
        if left and is_done and project["id"] not in self.changes:
            next_name = str(project["id"])
            self.changes[next_name] = [project, *left]
        elif left:
            # Refused; or the user has also changed a new Project as it came with the list.
            self.conflicts.append({"id": name, "changes": left, "found": project or problem})
        self.save()
        return next_name

    def submit(self, name: str) -> tuple[bool, Object, Object]:
        """Whether the first change with this name is done now; and what `call` returned last.

        It changes nothing here, so that it can be repeated after any error.
        """
        base, fields, *later = self.changes[name]
        is_deleted = None in (fields, *later)  # by the user
        if not base:
            project, problem = self.call("POST", self.url, fields, {"Idempotency-Key": name})
            is_spent = problem.get("type") in GONE and not later
            return bool(project) or is_deleted or is_spent, project, problem
        url = f"{self.url}/{base['id']}"
        method = "DELETE" if fields is None else "PUT"
        etag = f'"{base["version"]}-{base["updated_at"]}"'
        project, problem = self.call(method, url, fields, {"If-Match": etag})
        is_made = not problem
        if problem.get("status") == 412:
            project, problem = self.call("GET", url)
            # If all is as the user wanted it, the change was made, and its response was lost.
            versions = {name: base[name] for name in ("version", "updated_at")}
            is_made = fields is not None and project | versions == base | fields
        return is_made or (is_deleted and problem.get("type") in GONE), project, problem

    def fetch(self) -> None:
        """Fetch the list, unless it is the one that is here."""
        response, found = self.request("GET", self.url, headers={"If-None-Match": self.etag})
        if response.status_code == 304 and self.etag:
            return
        is_list = isinstance(found, list) and all(map(is_project, found))
        if response.status_code != 200 or not is_list or "ETag" not in response.headers:
            raise undecided(response)
        self.projects = {project["id"]: project for project in found}
        self.ids = {key: id for key, id in self.ids.items() if id in self.projects}
        self.etag = response.headers["ETag"]
        self.save()

    def call(
        self, method: str, url: str, fields: Object | None = None, headers: Any = None
    ) -> tuple[Object, Object]:
        """The Project, and the problem; one of them is {}, and both are after a deletion.

        Raises requests.RequestException if nothing came, or nothing that decides.
        """
        response, found = self.request(method, url, json=fields, headers=headers)
        status, media_type = response.status_code, response.headers.get("Content-Type", "")
        if status == SUCCESS[method] and (method == "DELETE" or is_project(found)):
            return found or {}, {}
        is_problem = media_type.startswith("application/problem+json") and isinstance(found, dict)
        if is_problem and (status in REFUSED or found.get("type") in (FULL, *GONE)):
            return {}, found
        raise undecided(response)

    def request(self, method: str, url: str, **options: Any) -> tuple[requests.Response, Any]:
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
