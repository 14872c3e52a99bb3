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

from auth import digest
from engines.base import OutcomeUnknown, Unavailable

PROXY = {  # Retry-After in seconds, and the detail
    "429": (1, "Send fewer requests per second."),
    "502": (5, "The service sent no response: read before you repeat a write."),
    "504": (5, "The service sent no response in time: read before you repeat a write."),
}
RAISED = {"500": RuntimeError, "503": Unavailable, "503-unknown": OutcomeUnknown}
FAILURES = sorted([*PROXY, *RAISED, "401", "dropped", "lost", "none", "slow"])
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
    with suppress(FileNotFoundError), open(plan_file(folder, token), "r+") as plan:
        fcntl.flock(plan, fcntl.LOCK_EX)  # until the file is closed
        failure, _, rest = plan.read().partition("\n")
        plan.seek(0)
        plan.truncate()
        plan.write(rest)
        return failure
    return "none"


def refusal(failure: str) -> tuple[str, int, dict[str, str]]:
    """What the proxy says: content, status and headers."""
    (seconds, detail), status = PROXY[failure], HTTPStatus(int(failure))
    problem = {"type": "about:blank", "status": status, "title": status.phrase}
    body = json.dumps(problem | {"detail": detail})
    headers = {"Cache-Control": "no-store", "Retry-After": str(seconds)}
    return body, status, headers | {"Content-Type": "application/problem+json"}


def end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def create_app(lifeline: int) -> Callable[..., Iterable[bytes]]:
    """The WSGI application; gunicorn ends when the lifeline's other end closes."""
    threading.Thread(target=end_with, args=[lifeline], daemon=True).start()
    # Slow, and nothing to the command, which writes plans.
    from flask import Response, request

    from app import create_app

    app = create_app()
    folder = os.path.dirname(app.config["DATABASE"])
    store = app.extensions["store"]
    find_caller = store.find_caller

    def fail_or_find(digest: bytes) -> Any:
        failure = request.environ.get(FAILURE)
        if failure in RAISED:
            raise RAISED[failure](PLANNED)
        return None if failure == "401" else find_caller(digest)

    store.find_caller = fail_or_find  # the first thing that a call with a token needs

    def serve(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")[2].strip()
        failure = next_failure(folder, token)
        if failure == "503-unknown" and environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            failure = "503"  # what changes nothing has no unknown outcome
        if failure == "slow":
            time.sleep(SLOWNESS)
        if failure in ("lost", "503-unknown", "504"):
            Response.from_app(app, environ)  # and nobody receives it
        if failure in ("lost", "dropped"):
            raise ConnectionResetError(errno.ECONNRESET, PLANNED)  # gunicorn closes
        environ[FAILURE] = failure
        response = Response(*refusal(failure)) if failure in PROXY else app
        return response(environ, start_response)

    return serve
