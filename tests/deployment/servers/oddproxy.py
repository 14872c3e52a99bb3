"""A proxy that responds in the service's place, as firewalls, portals and gateways do."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import NamedTuple

from helpers.running import LIMIT, PROJECTS, port_of

HTML, JSON, PROBLEM = "text/html", "application/json", "application/problem+json"


class Odd(NamedTuple):
    """What the client gets."""

    status: int
    media_type: str = HTML
    body: str = ""
    location: str = ""
    etag: str = ""
    is_passed_on: bool = False  # whether the service gets the request all the same


def problem(status: int, type: str = "about:blank") -> Odd:
    return Odd(status, PROBLEM, json.dumps({"type": type, "status": status}))


CUT = Odd(0, is_passed_on=True)  # half of the service's response
TRANSFORMED = Odd(203, is_passed_on=True)  # all of it (RFC 9110 15.3.4)
MIXED_UP = Odd(1, is_passed_on=True)  # a success of the same method, but of another request
LATE = Odd(2)  # none: the request reaches the service after it was repeated
RESET = Odd(3)  # none
PAGE = "<html>Blocked</html>"
FIREWALL = Odd(403, body=PAGE)
PORTAL = Odd(204)
GONE = problem(404, "urn:gardening:no-such-project")  # of another request
NO_PROJECTS = [  # each would be a Park, but for one member
    json.dumps({"id": "1", "created_at": 1, "updated_at": 1, "version": 1, "name": "Park"} | wrong)
    for wrong in ({"id": []}, {"id": "\ud800"}, {"updated_at": None}, {"version": True})
]
IN_PLACE = [
    *(Odd(status, body=PAGE) for status in (200, 201, *range(400, 418), 422, 429, 431, 451)),
    *(Odd(status, body=PAGE) for status in (500, 502, 503, 504)),
    *(Odd(status) for status in (200, 201, 202, 300, 304, 403, 404, 412)),
    *(Odd(status, location=PROJECTS) for status in (301, 302, 303, 307, 308)),  # to a 200
    Odd(307, location="http://[::1"),
    *(Odd(status, JSON, body) for status in (200, 201) for body in ("{}", "[]", "null")),
    *(Odd(200, JSON, body, etag='"1"') for body in ("{}", "[1]", "[{}]", "null")),
    *(Odd(201, JSON, body) for body in NO_PROJECTS),
    *(Odd(200, JSON, f"[{body}]", etag='"1"') for body in NO_PROJECTS),
    Odd(200, JSON, "[]", etag="\xa0"),  # which is no ETag, and which requests would not send back
    *(Odd(status, JSON, '{"error": "no"}') for status in (403, 404, 409, 412, 422, 500)),
    *map(problem, (403, 404, 405, 409, 500)),
    Odd(409, PROBLEM, '{"type": []}'),
]
TOO_DEEP = [Odd(status, JSON, 200_000 * "[", etag='"1"') for status in (200, 201)]  # for Python
ODDITIES = [*IN_PLACE, *(odd._replace(is_passed_on=True) for odd in IN_PLACE), CUT]
Request = tuple[str, str, bytes, dict[str, str]]
Response = tuple[int, dict[str, str], bytes]
Choice = Callable[[str, bytes], Odd | None]  # for a method and a body; None: nothing odd


def ask(upstream: str, method: str, path: str, body: bytes, headers: dict[str, str]) -> Response:
    """Raises HTTPException or OSError if there is no response."""
    with closing(HTTPConnection("127.0.0.1", port_of(upstream), timeout=LIMIT)) as service:
        service.request(method, path, body, headers)
        response = service.getresponse()
        kept = {name: value for name, value in response.getheaders() if name != "Connection"}
        return response.status, kept, response.read()


@contextmanager
def odd_proxy(upstream: str, choose: Choice, link: str | None = None) -> Iterator[str]:
    """The address of a proxy in front of this one, which adds a `Link` to each response."""
    successes: dict[str, Response] = {}  # the last one, by method
    late: list[Request] = []

    class Handler(BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65_537)
            if not self.raw_requestline or not self.parse_request():
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = (self.command, self.path, body, dict(self.headers))
            odd = choose(self.command, body)
            if odd == LATE:
                late.append(request)
            if odd in (LATE, RESET):
                return
            if odd is None or odd.is_passed_on:
                try:
                    response = ask(upstream, *request)
                    while request in late:
                        late.remove(request)
                        ask(upstream, *request)
                except (HTTPException, OSError):  # a planned failure
                    return
                if response[0] in (200, 201):
                    last = successes.get(self.command, response)
                    successes[self.command] = response
                    response = last if odd == MIXED_UP else response
                status, headers, content = response
            if odd in (None, MIXED_UP):
                self.respond(status, headers, content)
            elif odd == CUT:
                if content:
                    self.respond(status, headers, content[: len(content) // 2])
            elif odd == TRANSFORMED:
                self.respond(203, headers, content)
            else:
                headers = {"Location": odd.location, "ETag": odd.etag}
                headers |= {"Content-Type": odd.media_type, "Content-Length": str(len(odd.body))}
                self.respond(odd.status, headers, odd.body.encode())

        def respond(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if value:
                    self.send_header(name, value)
            if link:
                self.send_header("Link", link)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client has not waited."""

    with Server(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
