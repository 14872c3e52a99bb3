"""docs/local_copy.py on several devices, whatever fails and whoever responds."""

import errno
import gc
import json
import os
import random
import sys
from collections import Counter, defaultdict
from contextlib import ExitStack, suppress
from decimal import Decimal
from pathlib import Path

import pytest
import requests

from deployment.servers.oddproxy import (
    FIREWALL,
    GONE,
    JSON,
    LATE,
    MIXED_UP,
    ODDITIES,
    PORTAL,
    RESET,
    TOO_DEEP,
    TRANSFORMED,
    Odd,
    odd_proxy,
    problem,
)
from docs.local_copy import FULL, SPENT, LocalCopy
from helpers.running import LIMIT, POINT, PROJECTS, ROOT, blocks, flask_run, run
from helpers.testservice import call_projects, connect

FAILURES = ["429", "500", "502", "503", "503-unknown", "504", "dropped", "lost", "slow:1"]
ANOTHER = "0123456789abcdef01234567"  # the id of another Project
IMPATIENT = 0.2  # seconds, so that a slow response comes too late


class Device:
    """A device with a token of the account. What it has is in a file."""

    def __init__(self, gardening, folder, plan, address):
        self.token = gardening.issue_token(fail=plan)
        self.file = folder / f"{self.token}.json"
        self.url = address + PROJECTS
        self.restart()

    def restart(self, timeout=LIMIT):
        """Go on with what is in the file, as after a kill."""
        self.copy = LocalCopy(self.file, self.url, self.token, timeout)

    def sync(self):
        """Whether all was sent and fetched."""
        try:
            self.copy.sync()
        except requests.RequestException:
            return False
        return True

    def change_only(self, fields):
        """Change the only Project that there is."""
        [project] = self.copy.projects.values()
        self.copy.change(fields, project)

    def names(self):
        return names_of(self.copy.shown().values())

    def conflicts(self):
        """The changes of each conflict."""
        return [conflict["changes"] for conflict in self.copy.conflicts]

    def is_clean(self):
        """Whether nothing is left to send or to decide."""
        return not self.copy.changes and not self.copy.conflicts


def names_of(projects):
    return [project["name"] for project in projects]


@pytest.fixture
def device(gardening, tmp_path):
    """A function that starts another device, with a plan of failures, or behind an odd proxy."""
    with ExitStack() as proxies:

        def device(*plan, choose=None):
            address = gardening.url
            if choose:
                address = proxies.enter_context(odd_proxy(address, choose))
            return Device(gardening, tmp_path, plan, address)

        yield device


@pytest.fixture
def odds():
    """What is odd in response to `phone`, by method."""
    return {}


@pytest.fixture
def phone(device, odds):
    return device(choose=lambda method, _: odds.get(method))


@pytest.fixture
def two_devices(device, phone):
    """A phone behind the proxy, and a laptop. Both have one Project."""
    laptop = device()
    phone.copy.change({"name": "Park"})
    assert phone.sync() and laptop.sync()
    return phone, laptop


def projects_on(gardening):
    status, projects = call_projects(gardening.url, gardening.token)
    assert status == 200
    return projects


def changes_on(device):
    """What makes each kind of change, and the names of the Projects after it."""
    yield lambda: device.copy.change({"name": "Park"}), ["Park"]
    yield lambda: device.change_only({"name": "City park"}), ["City park"]
    yield lambda: device.change_only(None), []


@pytest.mark.parametrize("plan", [*FAILURES, "none 503"])  # the last one meets the list
def test_change_is_made_once_and_shown_whatever_fails(device, gardening, gardening_service, plan):
    phone = device()
    for make_change, names in changes_on(phone):
        make_change()
        gardening_service.plan(phone.token, plan.split())
        phone.restart(IMPATIENT)
        assert not phone.sync()
        phone.restart()
        assert phone.names() == names
        assert phone.sync()
        assert names_of(projects_on(gardening)) == phone.names() == names
        assert phone.is_clean()


def test_example_of_the_page_prints_what_it_has_created(gardening, tmp_path):
    """And goes on in the same file, whatever its folder is by then."""
    [program] = blocks("docs/local-copy.md", "In Python", "python")
    program += "os.chdir('another')\ncopy.change({})\n"
    (tmp_path / "another").mkdir()
    where = {"SERVICE": gardening.url, "TOKEN": gardening.token, "PYTHONPATH": str(ROOT / "docs")}
    printed = run(sys.executable, "-c", program, folder=tmp_path, environment=os.environ | where)
    assert printed.stdout == "City park\n"
    assert len(json.loads((tmp_path / "copy.json").read_text())["changes"]) == 1


@pytest.mark.parametrize("later", [None, {"name": "late"}])
def test_project_that_is_to_be_deleted_cannot_be_changed(two_devices, gardening, later):
    """Also if another device has deleted it, and the list lacks it already."""
    phone, laptop = two_devices
    [park] = phone.copy.projects.values()
    laptop.change_only(None)
    assert laptop.sync() and phone.sync()
    for fields in ({"name": "Wood"}, None):
        phone.copy.change(fields, park)
    with pytest.raises(KeyError, match="is to be deleted"):
        phone.copy.change(later, park)
    assert phone.sync()
    assert projects_on(gardening) == phone.names() == []
    assert phone.is_clean()


def test_change_of_what_the_user_saw_before_other_changes_is_a_conflict(
    two_devices, gardening, gardening_service
):
    """By itself: one of those was made, and its response was lost."""
    phone, laptop = two_devices
    [seen] = phone.copy.projects.values()
    laptop.change_only({"name": "Theirs"})
    assert laptop.sync() and phone.sync()
    phone.change_only({"postal_code": "1"})
    gardening_service.plan(phone.token, ["lost"])
    assert not phone.sync()
    phone.copy.change({"name": "Mine"}, seen)
    assert phone.sync()
    [project] = projects_on(gardening)
    assert (project["name"], project["postal_code"]) == ("Theirs", "1")
    assert phone.conflicts() == [[{"name": "Mine"}]]


def test_changes_of_before_and_after_a_restore_are_a_conflict(two_devices, gardening):
    """A restored server has an earlier version, and later changes."""
    phone, laptop = two_devices
    laptop.change_only({"name": "Theirs"})
    assert laptop.sync() and phone.sync()
    [park] = phone.copy.projects.values()
    before = park | {"name": "Wood", "version": 3, "updated_at": park["created_at"]}
    for fields, seen in ({"name": "Mine"}, before), ({"postal_code": "1"}, park):
        phone.copy.change(fields, seen)
    assert phone.sync()
    assert projects_on(gardening) == [park]
    assert phone.conflicts() == [[{"name": "Mine"}, {"postal_code": "1"}]]


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
    assert phone.conflicts() == ([] if mine == theirs else [changes])


def test_change_whose_response_was_lost_is_no_conflict_whatever_else_is_there(
    two_devices, gardening_service
):
    """A field of a later release, and those that a program sends back as it saw them."""
    phone, _ = two_devices
    [park] = phone.copy.projects.values()
    seen = park | {"area": 1}  # which a later release computes
    del seen["location"]  # which an earlier one did not have
    for name in ("City park", "Wood"):
        phone.copy.change(park | {"name": name}, seen)
    phone.copy.change({"postal_code": "1"}, phone.copy.change({"name": "Lake"}))
    for plan in (["lost"], ["none", "none", "lost"], ["none", "lost"]):
        gardening_service.plan(phone.token, plan)
        assert not phone.sync()
    assert phone.sync()
    assert phone.names() == ["Wood", "Lake"]
    assert phone.is_clean()


def test_refused_change_is_a_conflict_and_holds_up_no_other(device):
    """With a deletion that follows it: what was refused may be there."""
    phone = device("lost")
    key = phone.copy.change({"nmae": "Park"})
    assert not phone.sync()
    for fields, ref in ((None, key), ({"naem": "Park"}, None), ({"name": "Park"}, None)):
        phone.copy.change(fields, ref)
    assert phone.sync()
    assert phone.names() == ["Park"]
    phone.restart()
    conflict, _ = phone.copy.conflicts
    assert (conflict["id"], conflict["changes"]) == (key, [{"nmae": "Park"}, None])
    assert list(conflict["found"]["errors"]) == ["nmae"]
    phone.copy.drop(conflict)
    phone.restart()
    assert phone.conflicts() == [[{"naem": "Park"}]]


REFUSALS = [problem(status) for status in (400, 411, 413, 415, 422)]


@pytest.mark.parametrize(
    ("method", "refusals", "others"),
    [
        ("POST", REFUSALS, [GONE, problem(412), problem(409, SPENT)]),  # of another creation
        ("PUT", [*REFUSALS, GONE], [problem(409, FULL), problem(409, SPENT)]),
        ("DELETE", [], [*REFUSALS, problem(409, SPENT)]),
        ("GET", [GONE], [*REFUSALS, problem(412)]),  # after a PUT and its 412
    ],
)
def test_problem_refuses_what_the_service_may_refuse_so(
    two_devices, odds, method, refusals, others
):
    phone, _ = two_devices
    [park] = phone.copy.projects.values()
    for odd in [*refusals, *others]:
        odds |= {"PUT": problem(412), method: odd}
        fields = None if method == "DELETE" else {"name": "City park"}
        ref = phone.copy.change(fields, None if method == "POST" else park)
        phone.sync()
        assert phone.conflicts() == ([[fields]] if odd in refusals else []), odd
        if odd in refusals:
            phone.copy.drop(phone.copy.conflicts[0])
        else:
            phone.copy.take_back(ref)


def test_creation_waits_until_the_account_has_room(environment, token, tmp_path):
    """To delete one that was sent does not forget it: the request may still arrive."""
    odd = []
    with (
        flask_run(environment | {"GARDENING_MAX_PROJECTS": "1"}) as (address, _),
        odd_proxy(address, lambda *_: odd.pop() if odd else None) as proxy,
    ):
        copy = LocalCopy(tmp_path / "copy.json", proxy + PROJECTS, token)
        copy.change({"name": "Park"})
        copy.sync()
        garden = copy.change({"name": "Garden"})
        odd.append(FIREWALL)
        with pytest.raises(requests.HTTPError):
            copy.sync()
        wood, lake = [copy.change({"name": name}) for name in ("Wood", "Lake")]
        copy.sync()
        for new in (garden, wood):
            copy.change(None, new)
        assert [*copy.changes] == [garden, lake]
        [park] = copy.projects.values()
        copy.change(None, park)
        copy.sync()
        with connect(address, token) as late:
            header = {"Content-Type": "application/json", "Idempotency-Key": garden}
            assert late.fetch("POST", PROJECTS, '{"name": "Garden"}', **header)[0] == 201
        copy.sync()
        assert names_of(copy.projects.values()) == ["Lake"]
        assert (copy.changes, copy.conflicts) == ({}, [])


@pytest.fixture
def no_collection():
    """No collection of garbage: its finalizers may raise where the parser has used up the stack."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("odd", [*ODDITIES, *TOO_DEEP], ids=lambda odd: str(odd)[:99])
def test_response_that_is_not_of_the_service_decides_nothing(phone, odds, gardening, odd):
    """Neither of a change nor of the list, where a redirect leads to a 200."""
    methods = "POST", "PUT", "DELETE"
    for method, (make_change, names) in zip(methods, changes_on(phone), strict=True):
        make_change()
        odds[method] = odd
        assert not phone.sync()
        assert method == "DELETE" or phone.copy.changes  # since the list decides a deletion
        phone.restart()
        odds.clear()
        assert phone.sync()
        odds["GET"] = odd
        assert odd.status == 304 or not phone.sync()
        odds.clear()
        assert names_of(projects_on(gardening)) == phone.names() == names
        assert phone.is_clean()


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("POST", {"name": "Wood", "version": 1}),
        ("POST", {"postal_code": "1", "version": 1}),
        ("POST", {"version": 2}),  # although this was not sent before
        ("PUT", {"id": ANOTHER}),
        ("PUT", {"version": 1}),
        ("PUT", {"version": 3}),
        ("PUT", {"name": "Wood"}),
        ("PUT", {"postal_code": "1"}),  # which nobody here has seen
        ("GET", {"id": ANOTHER}),
    ],
)
def test_success_that_does_not_show_the_change_decides_nothing(
    two_devices, odds, gardening, method, wrong
):
    """As from a cache, or from a proxy that has mixed up two responses."""
    phone, _ = two_devices
    [park] = phone.copy.projects.values()
    shown = park | {"name": "City park", "version": 2} | wrong
    success = Odd(201 if method == "POST" else 200, JSON, json.dumps(shown))
    odds |= {"PUT": problem(412), method: success}
    ref = phone.copy.change({"name": "City park"}, None if method == "POST" else park)
    assert not phone.sync()
    phone.restart()
    assert [*phone.copy.changes] == [ref]
    assert projects_on(gardening) == [park]
    odds.clear()
    assert phone.sync()
    assert "City park" in phone.names()
    assert phone.is_clean()


@pytest.mark.parametrize("earlier", [[], [{"name": "Wood"}]])
@pytest.mark.parametrize("odd", [PORTAL, GONE, RESET, FIREWALL], ids=str)
def test_deletion_is_repeated_until_the_list_lacks_the_project(
    two_devices, odds, gardening, earlier, odd
):
    """Whoever responds, and whatever came before it. Until then, it is not shown."""
    phone, _ = two_devices
    for fields in [*earlier, None]:
        phone.change_only(fields)
    odds |= {"DELETE": odd, "PUT": odd}
    for _ in range(2):  # the second list is a 304
        phone.sync()
        phone.restart()
        assert phone.names() == []
        assert names_of(projects_on(gardening)) == ["Park"]
        assert len(phone.copy.changes) == 1
    odds.clear()
    assert phone.sync()
    assert projects_on(gardening) == phone.names() == []
    assert phone.is_clean()


def test_change_that_waits_is_shown_whatever_the_list_has_of_its_project(two_devices, odds):
    phone, laptop = two_devices
    phone.change_only({"postal_code": "1"})
    odds |= {"PUT": RESET, "GET": Odd(200, JSON, "[]", etag='"old"')}
    assert not phone.sync()
    assert phone.copy.projects == {}
    assert phone.names() == ["Park"]
    assert [*phone.copy.ids.values()] == [*phone.copy.changes]
    laptop.change_only({"name": "Theirs"})
    assert laptop.sync()
    del odds["GET"]
    assert not phone.sync()
    [project] = phone.copy.shown().values()
    assert (project["name"], project["postal_code"]) == ("Theirs", "1")


def test_older_state_from_a_cache_is_not_the_change(two_devices, odds):
    phone, _ = two_devices
    [park] = phone.copy.projects.values()
    phone.change_only({"name": "Wood"})
    assert phone.sync()
    phone.change_only({"name": "Park"})
    odds |= {"PUT": problem(412), "GET": Odd(200, JSON, json.dumps(park))}
    phone.sync()
    assert phone.conflicts() == [[{"name": "Park"}]]


@pytest.mark.parametrize("odd", [TRANSFORMED, Odd(304), Odd(307, location=PROJECTS)], ids=str)
def test_list_is_neither_transformed_nor_redirected_nor_unchanged_at_first(device, odd):
    asked = []
    phone = device(choose=lambda method, _: asked.append(method) or odd)
    assert not phone.sync()
    assert asked == ["GET"]


def test_change_after_which_nothing_responds_holds_up_no_other(device):
    """A firewall may cut the client off for a while, and the program start anew each time."""
    cut_off = []

    def choose(_, body):
        cut_off.extend([True] * (b"<script>" in body))
        return RESET if cut_off else None

    phone = device(choose=choose)
    key, _ = [phone.copy.change({"name": name}) for name in ("<script>", "Park")]
    for _ in range(2):
        assert not phone.sync()
        phone.restart()
        cut_off.clear()
    assert [*phone.copy.changes] == [key]


@pytest.mark.parametrize(
    ("plan", "count"),
    [
        ("401", 1),
        ("429", 1),
        ("503", 4),  # the others and the list
        ("dropped", 5),  # and a short list before them
        ("dropped dropped", 2),
        ("dropped none dropped dropped", 4),
    ],
)
def test_only_a_failure_that_the_others_would_meet_as_well_ends_the_attempt(
    device, gardening_service, plan, count
):
    phone = device(*plan.split())
    names = ["Park", "Wood", "Lake"]
    for name in names:
        phone.copy.change({"name": name})
    assert not phone.sync()
    assert len(gardening_service.requests(phone.token)) == count
    assert phone.sync()
    assert sorted(phone.names()) == sorted(names)


def test_list_is_fetched_whole_once_a_change_is_entered_or_made(device, gardening_service):
    """It may be as it was before, if a backup was restored. A deletion alters no copy."""
    phone = device()
    for make_change, _ in changes_on(phone):
        make_change()
        gardening_service.plan(phone.token, ["503"])
        assert not phone.sync()
        assert phone.sync()
        phone.restart()
        assert phone.sync()
    lists = [each for each in gardening_service.requests(phone.token) if each["method"] == "GET"]
    whole = ["If-None-Match" not in each["headers"] for each in lists]
    assert whole == [True, True, False, True, True, False, True, False, False]
    assert [each["status"] for each in lists] == [200, 200, 304] * 3


def test_objects_of_the_caller_are_its_own(device, gardening_service):
    phone = device()
    form = {"name": "Park", "location": POINT}
    phone.copy.change(form)
    form["name"] = "edited"
    assert phone.sync()
    [park] = phone.copy.shown().values()
    phone.copy.change({"postal_code": "1"}, park)
    park["name"] = "edited"
    park["location"]["coordinates"][0] = 1
    gardening_service.plan(phone.token, ["lost", "503", "503"])
    assert not phone.sync()
    assert phone.copy.projects[park["id"]]["location"] == POINT
    assert phone.sync()
    assert phone.names() == ["Park"]
    assert phone.is_clean()


@pytest.mark.parametrize("value", [{1}, Decimal(1), b"Park", float("nan")], ids=str)
def test_what_json_cannot_hold_is_refused_at_once(two_devices, value):
    phone, _ = two_devices
    [park] = phone.copy.projects.values()
    for project in (None, park):
        with pytest.raises((TypeError, ValueError)):
            phone.copy.change({"name": value}, project)
    assert phone.is_clean()


def test_change_that_raised_was_not_made(two_devices, gardening):
    phone, _ = two_devices
    wood, lake = [phone.copy.change({"name": name}) for name in ("Wood", "Lake")]
    full_disk = Path(f"{phone.file}.new")
    for make_change in (
        lambda: phone.copy.change({"name": "Garden"}),
        lambda: phone.copy.change({"name": "City"}, wood),
        lambda: phone.copy.change(None, lake),  # which takes it back
        lambda: phone.change_only({"name": "Mine"}),
        lambda: phone.change_only({"postal_code": "1"}),
        lambda: phone.change_only(None),
    ):
        before = json.dumps(phone.copy.changes)
        full_disk.symlink_to("/dev/full")
        with pytest.raises(OSError):
            make_change()
        assert json.dumps(phone.copy.changes) == before
        full_disk.unlink()
        make_change()
    assert phone.sync()
    assert names_of(projects_on(gardening)) == ["City", "Garden"]


def test_file_is_its_owners_and_goes_to_another_address_with_what_is_not_sent(device):
    phone = device()
    phone.url += "/"
    phone.restart()
    phone.copy.change({"name": "Park"})
    assert phone.file.stat().st_mode & 0o777 == 0o600
    saved = json.loads(phone.file.read_text())
    assert saved.keys() == {"url", "etag", "projects", "changes", "ids", "conflicts"}
    # A program of another version may write fewer members, or more.
    other = {"url": "https://old.example.org", "changes": saved["changes"], "new": 1}
    phone.file.write_text(json.dumps(other))
    with pytest.raises(ValueError, match=r"is a copy of https://old\.example\.org"):
        phone.restart()
    phone.file.write_text(json.dumps(other | {"url": saved["url"]}))  # as the page says
    phone.restart()
    assert phone.sync()
    assert phone.names() == ["Park"]


@pytest.fixture
def netrc(tmp_path, monkeypatch):
    """Logins of the user, one of them for any host."""
    (tmp_path / "netrc").write_text("default login ann password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_token_is_sent_as_it_is_wherever_it_comes_from(device, gardening, tmp_path, netrc):
    phone = device()
    phone.token += "\n"
    phone.restart()
    assert phone.sync()
    [program] = blocks("docs/api.md", "A short client", "python")
    where = {"SERVICE": gardening.url, "TOKEN": phone.token}
    run(sys.executable, "-c", program, folder=tmp_path, environment=os.environ | where)


def test_new_project_is_changed_before_it_was_ever_sent(device, gardening, gardening_service):
    """By the key that its creation has returned, and after a restart between any two requests."""
    phone = device()
    key = phone.copy.change({"name": "Park"})
    for fields in ({"name": "City park"}, {"postal_code": "1"}):
        assert phone.copy.change(fields, key) == key
    for made in range(1, 3):
        gardening_service.plan(phone.token, ["none", "dropped"])
        assert not phone.sync()
        phone.restart()
        [project] = projects_on(gardening)
        assert project["version"] == made
    assert phone.copy.change({"name": "Wood"}, key) == project["id"]
    phone.copy.take_back(key)
    assert phone.sync()
    assert names_of(projects_on(gardening)) == phone.names() == ["City park"]
    assert phone.copy.ids == {key: project["id"]}
    for ref in (key, project["id"], "unknown"):  # the user has to look again
        with pytest.raises(KeyError, match="as the user saw it"):
            phone.copy.change({"name": "Wood"}, ref)
    phone.change_only(None)
    assert phone.sync()
    assert phone.copy.ids == {}


@pytest.mark.parametrize(
    ("before", "theirs", "after"),  # before and after a sync
    [
        ([], {"name": "Theirs"}, [{"name": "Mine"}]),
        ([], {"name": "Theirs"}, [None]),
        ([], {"name": "Mine", "postal_code": "1"}, [{"name": "Mine"}]),
        ([{"postal_code": "1"}], {"name": "Theirs", "postal_code": "1"}, [{"name": "Mine"}]),
        ([], None, [{"name": "Mine"}]),
        ([], None, [None]),
        ([], None, []),
    ],
)
def test_change_of_a_new_project_that_another_device_changed_first_is_a_conflict(
    device, gardening, before, theirs, after
):
    """The response to its creation is lost, so that the other device is first."""
    phone, laptop = device("lost"), device()
    key = phone.copy.change({"name": "Park"})
    for fields in before:
        phone.copy.change(fields, key)
    assert not phone.sync()
    laptop.sync()
    laptop.change_only(theirs)
    assert laptop.sync()
    expected = projects_on(gardening)
    for fields in after:
        phone.copy.change(fields, key)
    assert phone.sync()
    assert projects_on(gardening) == expected == [*phone.copy.projects.values()]
    assert phone.copy.changes == {}
    agree = theirs is None and after in ([], [None])
    assert [changes[-1:] for changes in phone.conflicts()] == ([] if agree else [after])


def test_new_project_that_also_came_with_the_list_loses_no_change(phone, odds, gardening):
    """Its creation was made, and something else responded."""
    odds["POST"] = FIREWALL._replace(is_passed_on=True)
    key = phone.copy.change({"name": "Park"})
    assert not phone.sync()
    odds.clear()
    phone.change_only({"name": "as it came"})
    phone.copy.change({"name": "as it was created"}, key)
    odds["PUT"] = FIREWALL
    assert not phone.sync()
    assert phone.conflicts() == [[{"name": "as it was created"}]]
    with pytest.raises(KeyError):  # it would go behind what the user saw with the other
        phone.copy.change({"name": "late"}, key)
    odds.clear()
    assert phone.sync()
    assert names_of(projects_on(gardening)) == ["as it came"]


def test_new_project_is_shown_once_while_its_creation_waits(two_devices, odds):
    """Whoever saw two and deleted one would lose both. Those of others are shown as they are."""
    phone, laptop = two_devices
    [park] = phone.copy.projects
    key = phone.copy.change({"name": "Park"})
    odds["POST"] = FIREWALL
    assert not phone.sync()
    assert [*phone.copy.shown()] == [park, key]
    laptop.copy.change({"name": "Park"})
    assert laptop.sync()
    odds["POST"] = FIREWALL._replace(is_passed_on=True)
    assert not phone.sync()
    laptop.copy.change({"name": "Lake"})
    assert laptop.sync() and not phone.sync()
    _, theirs, _, lake = phone.copy.projects
    assert [*phone.copy.shown()] == [park, theirs, lake, key]
    phone.copy.change(None, key)
    assert [*phone.copy.shown()] == [park, theirs, lake]
    odds |= {"POST": None, "DELETE": RESET}
    assert not phone.sync()
    assert [*phone.copy.shown()] == [park, theirs, lake]
    odds.clear()
    assert phone.sync()
    assert [*phone.copy.projects] == [park, theirs, lake]
    new = phone.copy.change({"name": "Park"})  # which has not been sent
    assert [*phone.copy.shown()] == [park, theirs, lake, new]


class Killed(Exception):
    """As if the power had failed."""


class User(LocalCopy):
    """Uses a device whose disk may be full, and which may be killed in `sync`, at any write.

    Each change adds a mark to the name that the user sees. So if a mark is nowhere in the end,
    somebody has overwritten it without having seen it.
    """

    def __init__(self, file, url, token, chance):
        super().__init__(file, url, token, IMPATIENT)
        self.token, self.chance, self.risk = token, chance, 0
        self.form = {}  # of the program, which fills it anew for each change
        self.marks = set()
        self.deletions = defaultdict(list)  # by the first mark, what was seen of the Project

    def save(self, **changed):
        if self.chance.random() < 0.03:
            raise OSError(errno.ENOSPC, "No space left on device")
        for write in (super().save, dict):
            if self.chance.random() < self.risk:
                raise Killed
            write(**changed)

    def restart(self):
        """Go on with what is in the file."""
        super().__init__(self.file, self.url, self.token, self.timeout)

    def names_shown(self):
        """The name of each Project that the user sees, by its id, or by the key of a new one."""
        return {ref: each["name"] for ref, each in self.shown().items()}

    def act(self, mark):
        """Create, change or delete a Project, and perhaps synchronize."""
        names = self.names_shown()
        ref = self.chance.choice([*names, None])
        is_deletion = ref and self.chance.random() < 0.1
        self.enter(mark, names.get(ref), self.projects.get(ref, ref), is_deletion)
        if self.chance.random() < 0.6:
            new = [pair for pair in self.names_shown().items() if pair[0] not in self.projects]
            self.risk = 0.03
            try:
                self.sync()
            except Killed:
                self.restart()
            except OSError:  # also if a response is missing
                if self.chance.random() < 0.5:
                    self.restart()
            self.risk = 0
            if new and self.chance.random() < 0.5:  # the user has not looked since
                key, name = self.chance.choice(new)
                self.enter(f"{mark}-late", name, key)

    def enter(self, mark, name, project, is_deletion=False):
        text = self.chance.choice([*DISLIKED]) if self.chance.random() < 0.03 else ""
        self.form["name"] = f"{name or ''} {mark}{text}".strip()
        with suppress(OSError, KeyError):  # and then nothing has changed
            self.change(None if is_deletion else self.form, project)
            if is_deletion:
                self.deletions[marks_in(name)[0]].append(marks_in(name))
            else:
                self.marks.add(mark)

    def sync_at_last(self):
        """With room on the disk, and nothing odd but what dislikes a text."""
        self.timeout, self.save = LIMIT, super().save
        with suppress(requests.RequestException):
            self.sync()

    def not_made(self):
        """The marks of the changes that were not made, and how many deletions of each Project."""
        marks, deletions = set(), Counter()
        for conflict in self.conflicts:
            name = conflict["found"].get("name")
            for fields in conflict["changes"]:
                if fields is None:
                    deletions[marks_in(name)[0]] += 1
                else:
                    name = fields["name"]
                    marks.add(marks_in(name)[-1])
        return marks, deletions


DISLIKED = {" <script>": FIREWALL, " <reset>": RESET}  # by something on the way


def marks_in(name):
    return [word for word in name.split() if word[0] != "<"]


def test_three_devices_end_with_what_the_server_has(gardening, gardening_service, tmp_path):
    """Behind a proxy where one response in six is odd, and with failures of the service."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance, is_odd, is_disliked = random.Random(seed), True, True

    def choose(_, body):
        for text, odd in DISLIKED.items():
            if is_disliked and text.encode() in body:
                return odd
        if is_odd and chance.random() < 1 / 12:
            return chance.choice([MIXED_UP, LATE, PORTAL, GONE])
        return chance.choice(ODDITIES) if is_odd and chance.random() < 1 / 12 else None

    with odd_proxy(gardening.url, choose) as address:
        users = []
        for number in range(3):
            plan = FAILURES + 60 * ["none"]
            chance.shuffle(plan)
            token = gardening.issue_token(fail=plan)
            users.append(User(tmp_path / f"{number}.json", address + PROJECTS, token, chance))
        for step in range(210):
            users[step % 3].act(str(step))

        is_odd = False
        for user in users:
            gardening_service.plan(user.token, [])
            user.sync_at_last()
        # When this request ends, so have all that were too slow for a device.
        slowest = gardening.issue_token(fail=["slow:2"])
        call_projects(gardening.url, slowest)
        for user in users:
            user.sync_at_last()
            assert [*user.projects.values()] == projects_on(gardening)
            for pending in user.changes.values():
                assert any(text in str(pending["changes"]) for text in DISLIKED)
        is_disliked = False
        for user in users:
            user.sync()
        projects = projects_on(gardening)
        for user in users:
            user.sync()
            assert [*user.projects.values()] == projects
            assert user.changes == {}

    made = Counter(mark for project in projects for mark in marks_in(project["name"]))
    assert {*made.values()} == {1}, "Something was made twice."
    known = {*made}
    assert known <= set.union(*(user.marks for user in users)), "What raised was made."
    for user in users:
        marks, deletions = user.not_made()
        known |= marks
        for first, seen in user.deletions.items():
            if deletions[first] < len(seen):  # one was made
                assert not made.keys() & {*seen[-1]}, "A Project came back."
                known.update(*seen)  # an old list may have shown it once more
    for user in users:
        assert user.marks <= known, "A change was lost."
