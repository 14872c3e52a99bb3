"""A circuit breaker: after a caller's timeout, others are refused for a while."""

import time

from engines.errors import Unavailable

PAUSE = 1.0  # seconds for which an open breaker refuses everybody
TRIAL_INTERVAL = 5.0  # seconds between two callers whom a half-open breaker admits


class Breaker:
    """A timeout opens it for PAUSE seconds, in which it admits nobody.

    Then it is half-open: about one caller may try, and one more after each TRIAL_INTERVAL. (Two
    threads may pass at once.) Any response closes it, even to a caller who was admitted earlier.
    """

    def __init__(self) -> None:
        # Everybody is refused until then (time.monotonic()). None: the breaker is closed.
        self._retry_at: float | None = None

    def admit(self) -> None:
        """Raises Unavailable unless the caller may try."""
        retry_at = self._retry_at
        if retry_at is None:
            return
        now = time.monotonic()
        if now < retry_at:
            raise Unavailable("not tried: requests have just timed out")
        self._retry_at = now + TRIAL_INTERVAL

    def record_response(self) -> None:
        """An error is a response, too."""
        self._retry_at = None

    def record_timeout(self) -> None:
        self._retry_at = time.monotonic() + PAUSE
