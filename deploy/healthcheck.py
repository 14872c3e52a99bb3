"""Docker's health check: whether the service responds where its settings let gunicorn listen."""

import socket
import sys
from http.client import HTTPConnection
from typing import Any

from gunicorn.app.wsgiapp import WSGIApplication

address: Any = WSGIApplication().cfg.address[0]  # as gunicorn reads its settings
if isinstance(address, str):
    family = socket.AF_UNIX
else:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
with socket.socket(family) as client:
    client.settimeout(8)  # seconds; Docker waits for 10
    client.connect(address)
    connection = HTTPConnection("gardening")  # the name is for the header Host alone
    connection.sock = client
    connection.request("GET", "/health")
    sys.exit(connection.getresponse().status != 200)
