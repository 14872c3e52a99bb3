"""The page in a browser that describes the API, if the package for it is installed.

Swagger UI's files are those of flask-swagger-ui; the page around them is our own.
"""

from pathlib import Path

from flask import Blueprint, Flask, Response, redirect

POLICY = (  # Content Security Policy, level 3
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'none'; frame-ancestors 'none'"
)
# All paths are relative, so that the page also works below a prefix.
HTML = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="files/favicon-32x32.png">
<link rel="stylesheet" href="files/swagger-ui.css">
<div id="page"></div>
<script src="files/swagger-ui-bundle.js"></script>
<script src="start.js"></script>
</html>
"""
START = 'SwaggerUIBundle({dom_id: "#page", url: "../openapi.json"})\n'


def add_to(app: Flask, title: str) -> None:
    """Add `/docs/`, to which `/` and `/docs` lead."""
    try:
        import flask_swagger_ui
    except ImportError:
        return
    app.extensions["docs"] = "/docs/"
    files = Path(flask_swagger_ui.__file__).with_name("dist")
    docs = Blueprint("docs", __name__, static_folder=files, static_url_path="/files")
    docs.add_url_rule("/", "page", lambda: HTML.format(title=title))
    docs.add_url_rule("/start.js", "start", lambda: Response(START, mimetype="text/javascript"))
    docs.after_request(add_policy)
    app.register_blueprint(docs, url_prefix="/docs")
    app.add_url_rule("/", "index", lambda: redirect("docs/"))
    app.add_url_rule("/docs", "index")


def add_policy(response: Response) -> Response:
    response.headers["Content-Security-Policy"] = POLICY
    return response
