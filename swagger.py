"""The page in a browser that describes the API, if the package for it is installed."""

import base64
import hashlib
import re

from flask import Flask, Response, redirect, request

POLICY = (  # Content Security Policy, level 3
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'none'; frame-ancestors 'none'"
)
VIEWPORT = b'<meta name="viewport" content="width=device-width, initial-scale=1">'


def add_to(app: Flask, title: str) -> None:
    """Add `/docs/`, to which `/` and `/docs` lead."""
    try:
        from flask_swagger_ui import get_swaggerui_blueprint
    except ImportError:
        return
    app.extensions["docs"] = "/docs/"
    # No badge, which would call another host; no box for other descriptions.
    look = {"validatorUrl": None, "layout": "BaseLayout", "app_name": title}
    page = get_swaggerui_blueprint(".", "../openapi.json", look)
    page.before_request(ignore_dates)
    page.after_request(adapt)
    app.register_blueprint(page, url_prefix="/docs")
    # Relative to either path, so that it also works behind a proxy that adds a prefix.
    app.add_url_rule("/", "index", lambda: redirect("docs/"))
    app.add_url_rule("/docs", "index")


def ignore_dates() -> None:
    """Leave caching to ETags: Werkzeug raises OverflowError for dates far ahead."""
    request.environ.pop("HTTP_IF_MODIFIED_SINCE", None)
    if request.environ.pop("HTTP_IF_RANGE", None):
        request.environ.pop("HTTP_RANGE", None)  # send it all (RFC 9110 13.1.5)


def adapt(response: Response) -> Response:
    """Allow only the page's own scripts, forbid framing, and fit it to phones."""
    if response.mimetype != "text/html":
        return response
    hashes = ""
    if not response.direct_passthrough:  # the page itself, not a file of the package
        response.data = response.data.replace(b"<head>", b"<head>" + VIEWPORT, 1)
        for script in re.findall(b"<script>(.*?)</script>", response.data, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
            hashes += f" 'sha256-{digest}'"
    policy = f"{POLICY}; script-src 'self'{hashes}"
    response.headers["Content-Security-Policy"] = policy
    return response
