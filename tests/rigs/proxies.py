"""Real proxies with the files of deploy/, for whatever a test puts behind them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rigs import nginx
from rigs.running import needs

PROXIES = [pytest.param("nginx", marks=needs("nginx"))]


@contextmanager
def start_proxy(
    name: str, folder: Path, upstream: int, changes: dict[str, str] | None = None
) -> Iterator[nginx.Proxy]:
    """The proxy with its file of deploy/, in front of the port `upstream`."""
    with nginx.proxy(folder, upstream, changes) as running:
        yield running
