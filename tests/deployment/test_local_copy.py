"""The client of docs/api.md that keeps a local copy, as printed, on several devices."""

import random
from collections import Counter, defaultdict
from runpy import run_path

import pytest
import requests

from helpers.running import LIMIT, PROJECTS, blocks, flask_run
from helpers.testservice import call_projects

FAILURES = ["429", "500", "502", "503", "503-unknown", "504", "dropped", "lost", "slow:1"]
IMPATIENT = 0.2  # seconds, so that a slow response comes too late


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """The class that is printed."""
    [program] = blocks("docs/api.md", "Keeping a local copy", "python")
    file = tmp_path_factory.mktemp("client") / "local_copy.py"
    file.write_text(program)
    return run_path(str(file))["LocalCopy"]


class Device:
    """A device with a token of the account. What it has is in a file."""

    def __init__(self, client, gardening, folder, plan):
        self.token = gardening.issue_token(fail=plan)
        self.file = folder / f"{self.token}.json"
        self.client, self.url = client, gardening.url + PROJECTS
        self.restart()

    def restart(self, timeout=LIMIT):
        """Go on with what is in the file, as after a kill."""
        self.copy = self.client(self.file, self.url, self.token, timeout)

    def sync(self):
        """Whether all was sent and fetched."""
        try:
            self.copy.sync()
        except requests.RequestException:
            return False
        return True

    def change(self, fields, id=None):
        """Change a Project as it is here, or create one."""
        self.copy.change(fields, self.copy.projects[id] if id else None)

    def change_only(self, fields):
        """Change the only Project that there is."""
        [id] = self.copy.projects
        self.change(fields, id)

    def names(self):
        return [project["name"] for project in self.copy.projects.values()]

    def names_shown(self):
        """The names by id, as the user sees them: also what is not sent yet."""
        names = {id: project["name"] for id, project in self.copy.projects.items()}
        for id, (base, *changes) in self.copy.changes.items():
            if base and changes[-1] is None:
                del names[id]
            elif base:
                names[id] = changes[-1]["name"]
        return names


@pytest.fixture
def device(client, gardening, tmp_path):
    """A function that starts another device, with this plan of failures."""
    return lambda *plan: Device(client, gardening, tmp_path, plan)


def projects_on(gardening):
    status, projects = call_projects(gardening.url, gardening.token)
    assert status == 200
    return projects


def changes_on(device):
    """What makes each kind of change, and the names of the Projects after it."""
    yield lambda: device.change({"name": "Park"}), ["Park"]
    yield lambda: device.change_only({"name": "City park"}), ["City park"]
    yield lambda: device.change_only(None), []


@pytest.mark.parametrize("failure", FAILURES)
def test_change_is_made_once_whatever_fails(device, gardening, gardening_service, failure):
    phone = device()
    for make_change, names in changes_on(phone):
        make_change()
        gardening_service.plan(phone.token, [failure])
        phone.restart(IMPATIENT)
        assert not phone.sync()
        phone.restart()
        assert phone.sync()
        assert [project["name"] for project in projects_on(gardening)] == phone.names() == names
        assert (phone.copy.changes, phone.copy.conflicts) == ({}, [])


def test_change_that_was_sent_is_in_the_copy_before_the_list_is_fetched(device, gardening_service):
    phone = device()
    for make_change, names in changes_on(phone):
        make_change()
        gardening_service.plan(phone.token, ["none", "503"])
        assert not phone.sync()
        phone.restart()
        assert phone.names() == names


def test_copy_is_there_after_a_restart(two_devices):
    _, laptop = two_devices
    laptop.restart()
    assert laptop.names() == ["Park"]


def test_changes_made_offline_are_sent_in_their_order(device, gardening):
    phone = device()
    phone.change({"name": "Park"})
    phone.sync()
    for fields in ({"name": "City park"}, {"postal_code": "1"}, {"postal_code": "2"}):
        phone.change_only(fields)
    assert phone.sync()
    [project] = projects_on(gardening)
    assert (project["name"], project["postal_code"], project["version"]) == ("City park", "2", 4)
    assert phone.copy.projects == {project["id"]: project}


@pytest.mark.parametrize("later", [None, {"name": "late"}])
def test_deletion_ends_the_changes_of_its_project(device, gardening, later):
    phone = device()
    phone.change({"name": "Park"})
    phone.sync()
    for fields in (None, later):
        phone.change_only(fields)
    assert phone.sync()
    assert projects_on(gardening) == phone.names() == []
    assert (phone.copy.changes, phone.copy.conflicts) == ({}, [])


def test_creation_that_another_device_deleted_does_not_come_back(device, gardening):
    phone, laptop = device("lost"), device()
    phone.change({"name": "Park"})
    assert not phone.sync()
    laptop.sync()
    laptop.change_only(None)
    assert laptop.sync()
    assert phone.sync()
    assert projects_on(gardening) == phone.names() == []
    assert (phone.copy.changes, phone.copy.conflicts) == ({}, [])


@pytest.fixture
def two_devices(device):
    """A phone and a laptop that both have one Project."""
    phone, laptop = device(), device()
    phone.change({"name": "Park"})
    assert phone.sync() and laptop.sync()
    return phone, laptop


@pytest.mark.parametrize("mine", [{"name": "Mine"}, None])
@pytest.mark.parametrize(
    "theirs",
    [{"name": "Theirs"}, {"postal_code": "1"}, {"name": "Mine", "postal_code": "1"}, {}, None],
)
def test_change_of_what_another_device_changed_first_is_a_conflict(
    two_devices, gardening, mine, theirs
):
    """With all changes that follow it. Only two deletions agree."""
    phone, laptop = two_devices
    laptop.change_only(theirs)
    assert laptop.sync()
    changes = [mine] if mine is None else [mine, {"name": "Mine, too"}]
    for fields in changes:
        phone.change_only(fields)
    expected = projects_on(gardening)
    assert phone.sync()
    assert projects_on(gardening) == expected == [*phone.copy.projects.values()]
    if mine != theirs:
        [conflict] = phone.copy.conflicts
        assert conflict["changes"] == changes


def test_same_change_on_two_devices_is_no_conflict(two_devices, gardening):
    for device in two_devices:
        device.change_only({"name": "City park"})
        assert device.sync()
        assert device.copy.conflicts == []
    [project] = projects_on(gardening)
    assert (project["name"], project["version"]) == ("City park", 2)


def test_change_that_was_made_and_overwritten_is_not_sent_again(
    two_devices, gardening, gardening_service
):
    phone, laptop = two_devices
    gardening_service.plan(phone.token, ["lost"])
    phone.change_only({"name": "Mine"})
    assert not phone.sync()
    laptop.sync()
    assert laptop.names() == ["Mine"]
    laptop.change_only({"name": "Park"})
    assert laptop.sync()
    assert phone.sync()
    assert [project["name"] for project in projects_on(gardening)] == phone.names() == ["Park"]
    [conflict] = phone.copy.conflicts
    assert conflict["changes"] == [{"name": "Mine"}]


def test_refused_change_is_a_conflict_and_holds_up_no_other(device):
    phone = device()
    for fields in ({"nmae": "Park"}, {"name": "Park"}):
        phone.change(fields)
    assert phone.sync()
    assert phone.names() == ["Park"]
    [conflict] = phone.copy.conflicts
    assert conflict["changes"] == [{"nmae": "Park"}]
    assert list(conflict["found"]["errors"]) == ["nmae"]


def test_creation_waits_until_the_account_has_room(client, environment, token, tmp_path):
    with flask_run(environment | {"GARDENING_MAX_PROJECTS": "1"}) as (address, _):
        copy = client(tmp_path / "copy.json", address + PROJECTS, token)
        for name in ("Park", "Garden"):
            copy.change({"name": name})
        copy.sync()
        [park] = copy.projects.values()
        assert (park["name"], len(copy.changes)) == ("Park", 1)
        copy.change(None, park)
        copy.sync()
        copy.sync()
        assert [project["name"] for project in copy.projects.values()] == ["Garden"]
        assert (copy.changes, copy.conflicts) == ({}, [])


class User:
    """Uses a device. Each change adds a mark to the name that the user sees.

    So if a mark is nowhere in the end, somebody has overwritten it without having seen it.
    """

    def __init__(self, device, chance):
        self.device, self.chance = device, chance
        device.restart(IMPATIENT)
        self.marks = set()
        self.deletions = defaultdict(list)  # by id, what was seen of the Project

    def act(self, mark):
        """Create, change or delete a Project; perhaps synchronize; perhaps be killed then."""
        names = self.device.names_shown()
        id = self.chance.choice([*names, None])
        if id and self.chance.random() < 0.1:
            self.deletions[id].append(names[id].split())
            self.device.change(None, id)
        else:
            self.marks.add(mark)
            self.device.change({"name": f"{names[id]} {mark}"} if id else {"name": mark}, id)
        if self.chance.random() < 0.6 and not self.device.sync() and self.chance.random() < 0.5:
            self.device.restart(IMPATIENT)

    def conflicts(self):
        """The marks of the changes, and the ids of the deletions, that were not made."""
        marks, ids = set(), Counter()
        for conflict in self.device.copy.conflicts:
            for fields in conflict["changes"]:
                if fields is None:
                    ids[conflict["id"]] += 1
                else:
                    marks.add(fields["name"].split()[-1])
        return marks, ids


def test_three_devices_end_with_what_the_server_has(device, gardening, gardening_service):
    chance = random.Random(1)
    users = []
    for _ in range(3):
        plan = 3 * FAILURES + 50 * ["none"]
        chance.shuffle(plan)
        users.append(User(device(*plan), chance))
    for step in range(330):
        users[step % 3].act(str(step))
    for user in users:
        gardening_service.plan(user.device.token, [])
        user.device.restart()
        assert user.device.sync()

    # When this request ends, so have all that were too slow for a device.
    slowest = gardening.issue_token(fail=["slow:2"])
    _, projects = call_projects(gardening.url, slowest)
    for user in users:
        assert user.device.sync()
        assert [*user.device.copy.projects.values()] == projects
        assert user.device.copy.changes == {}

    made = Counter(mark for project in projects for mark in project["name"].split())
    assert {*made.values()} == {1}, "Something was made twice."
    known = {*made}
    for user in users:
        marks, ids = user.conflicts()
        known |= marks
        for id, seen in user.deletions.items():
            if ids[id] < len(seen):  # the last one was made
                assert not made.keys() & {*seen[-1]}, "A Project came back."
                known.update(seen[-1])
    for user in users:
        assert user.marks <= known, "A change was lost."
