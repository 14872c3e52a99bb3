"""Pytest fixtures for other teams: the real service, with an account per test."""

from collections.abc import Iterator

import pytest

from . import run
from .client import Gardening, Service


@pytest.fixture(scope="session")
def gardening_service() -> Iterator[Service]:
    """The service, from the first test that needs it to the end of the last."""
    with run() as service:
        yield service


@pytest.fixture
def gardening(gardening_service: Service) -> Gardening:
    """The service for one test, with an account that no other test has."""
    return gardening_service.with_new_account()
