"""What the log shows of a request: never its query, which may hold anything, and no line break."""

from string import punctuation
from urllib.parse import quote
from wsgiref.types import WSGIEnvironment

MAX_LENGTH = 200  # characters, so that no client can fill the disk with lines of 8 KB


def logged_request(environ: WSGIEnvironment) -> dict[str, str]:
    """Its method, path and request id."""
    # As it was sent, where the server says so: PATH_INFO is decoded.
    path = environ.get("RAW_URI") or environ.get("REQUEST_URI")
    if not path:
        path = quote(environ.get("SCRIPT_NAME", "") + environ["PATH_INFO"], encoding="latin-1")
    return {
        "method": shown(environ["REQUEST_METHOD"]),
        "path": shown(path.partition("?")[0]),
        # Without a proxy it is the client's, who may send U+0085, a line break to many programs.
        "request_id": shown(environ.get("HTTP_X_REQUEST_ID") or "-"),
    }


def shown(text: str) -> str:
    """Its start, in printable ASCII without a space."""
    start = text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]}..."
    return quote(start, punctuation, "latin-1", "replace")
