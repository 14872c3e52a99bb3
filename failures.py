"""The service and its proxy, with the failures that a token's plan asks for.

Only the test service starts it. A plan is a file beside the database, named by the token's
digest, with a line for each request. What the service says is raised where it is raised in
production; 429, 502 and 504 are what nginx says with the operators' configuration.
"""

import errno
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from flask import Response, request

from auth import digest
from store import OutcomeUnknown, Unavailable

UNANSWERED = "The service sent no response{}: read before you repeat a write."
PROXY = {  # Retry-After in seconds, and the detail
    "429": (1, "Send fewer requests per second."),
    "502": (5, UNANSWERED.format("")),
    "504": (5, UNANSWERED.format(" in time")),
}
OTHERS = ["401", "500", "503", "503-unknown", "dropped", "lost", "none", "slow"]
FAILURES = sorted([*PROXY, *OTHERS])
WRITES = ["create_project", "update_project", "delete_project"]
SLOWNESS = 3  # seconds
FAILURE = "gardening.failure"  # of a request, in its WSGI environment
PLANNED = "planned for this token"


def plan_file(folder: str, token: str) -> str:
    return os.path.join(folder, digest(token).hex())


def write_plan(folder: str, token: str, failures: list[object]) -> None:
    """Raises ValueError, which names the known failures, and OSError."""
    if unknown := [failure for failure in failures if failure not in FAILURES]:
        raise ValueError(f"{unknown[0]!r} is not one of {FAILURES}")
    with open(plan_file(folder, token), "w") as plan:
        plan.writelines(f"{failure}\n" for failure in failures)


def next_failure(folder: str, token: str) -> str:
    """Take the first line off the token's plan, if it has one."""
    if not os.path.exists(plan_file(folder, token)):
        return "none"
    with open(plan_file(folder, token), "r+") as plan:
        fcntl.flock(plan, fcntl.LOCK_EX)  # until the file is closed
        failure, _, rest = plan.read().partition("\n")
        plan.seek(0)
        plan.truncate()
        plan.write(rest)
    return failure


def let_fail(store: Any, name: str) -> None:
    """Make this method of the store fail for requests that are to fail in it."""
    method = getattr(store, name)

    def call(*arguments: Any, **options: Any) -> Any:
        match request.environ[FAILURE]:
            case "401":
                return None  # from find_account, after which no other is called
            case "500":
                raise RuntimeError(PLANNED)
            case "503":
                raise Unavailable(PLANNED)
            case "503-unknown" if name in WRITES:
                with suppress(Exception):  # a refusal is lost, too
                    method(*arguments, **options)
                raise OutcomeUnknown(PLANNED)
        return method(*arguments, **options)

    setattr(store, name, call)


def end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def refusal(failure: str) -> Response:
    """What the proxy says."""
    (seconds, detail), status = PROXY[failure], HTTPStatus(int(failure))
    problem = {"type": "about:blank", "status": status, "title": status.phrase}
    body = json.dumps(problem | {"detail": detail})
    response = Response(body, status)
    response.content_type = "application/problem+json"
    response.headers.update({"Cache-Control": "no-store", "Retry-After": seconds})
    return response


def create_app(lifeline: int) -> Callable[..., Iterable[bytes]]:
    """The WSGI application; gunicorn ends once nobody holds the lifeline's other end."""
    threading.Thread(target=end_with, args=[lifeline], daemon=True).start()
    from app import create_app  # slow, and nothing to the command, which writes plans

    app = create_app()
    folder = os.path.dirname(app.config["DATABASE"])
    for name in ["find_account", *WRITES]:
        let_fail(app.extensions["store"], name)

    def serve(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")[2].strip()
        failure = next_failure(folder, token)
        if failure == "503-unknown" and environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            failure = "503"  # what changes nothing has no unknown outcome
        environ[FAILURE] = failure
        if failure == "slow":
            time.sleep(SLOWNESS)
        if failure in ("lost", "504"):
            Response.from_app(app, environ)  # and nobody receives it
        if failure in ("lost", "dropped"):
            raise ConnectionResetError(errno.ECONNRESET, PLANNED)  # gunicorn closes
        return (refusal(failure) if failure in PROXY else app)(environ, start_response)

    return serve
