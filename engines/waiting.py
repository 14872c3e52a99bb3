"""Who waits for a database, and who fails at once.

Callers do not wait one after another for nothing.

It depends on no engine and runs no statement.
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from engines.base import OutcomeUnknown, Unavailable
from engines.files import locked

SHORT_PATIENCE = 0.1  # seconds, after somebody has waited in vain
PATIENCE = 2.5  # seconds that a writer of a file waits for others
SILENCE = 2.0  # seconds: the shortest wait in vain for a server
WAITED = 1.0  # seconds after which a failure means that somebody has waited in vain
PAUSE = 0.5  # seconds before the next trial
TRIAL = 5.0  # seconds after which another may try, though a trial may not have ended


class Queue:
    """The writers of a file, one at a time: those of one process queue for a lock, and the
    first of each process for an flock on the file `-lock`.

    By itself, SQLite polls less often the longer a writer has waited, which starves it.
    After a failed write, all have a short patience, until one succeeds.
    """

    def __init__(self, path: str | None) -> None:
        """`path` of the file to lock, or None if one process has the database alone."""
        self.patience = PATIENCE
        self._path = path
        self._first: dict[int, threading.Lock] = defaultdict(threading.Lock)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Raises Unavailable if the patience ends first."""
        try:
            with ExitStack() as held:
                deadline = time.monotonic() + self.patience
                first = self._first[os.getpid()]
                if not first.acquire(timeout=self.patience):
                    raise Unavailable("other writers take too long")
                held.callback(first.release)
                if self._path:
                    held.enter_context(locked(self._path, deadline))
                yield
        except Unavailable:
            self.patience = SHORT_PATIENCE
            raise
        self.patience = PATIENCE


class Breaker:
    """A circuit breaker: while callers wait in vain, one at a time tries.

    Closed, it lets all pass. It opens when one has waited in vain, unless it knows of a
    success meanwhile. Then, after a pause, one passes, and what that one finds closes it or
    opens it anew; the others fail at once.
    """

    def __init__(self) -> None:
        # Both on the clock of time.monotonic().
        self._succeeded_at = 0.0
        self._retry_at: float | None = None  # None: closed
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raises Unavailable for a caller that may not pass now."""
        if self._retry_at is None:
            return
        with self._lock:
            now = time.monotonic()
            if self._retry_at is not None:
                if now < self._retry_at:
                    raise Unavailable("others waited in vain; trying again shortly")
                self._retry_at = now + TRIAL

    def close(self) -> None:
        """One has succeeded, or failed without waiting."""
        self._succeeded_at, self._retry_at = time.monotonic(), None

    def open(self, waited: float = SILENCE, pause: float = PAUSE) -> None:
        """One has waited in vain, for so many seconds; the next trial is after a pause."""
        now = time.monotonic()
        another_succeeded = now - self._succeeded_at < waited
        self._retry_at = None if another_succeeded else now + pause


class Breakers:
    """One for each account, since one may be locked and others not; and one for all.

    An account's opens whenever one of its callers has waited in vain. That of all opens
    when two accounts have and none has succeeded in between, or when a commit has, which
    waits for a standby, not for a lock.
    """

    def __init__(self) -> None:
        self._of_account: dict[str, Breaker] = {}
        self._of_all = Breaker()
        self._in_vain: set[str] = set()

    @contextmanager
    def watch(self, account: str) -> Iterator[None]:
        """Let the account through, and learn from it. Raises Unavailable.

        An empty name stands for look-ups by token, which belong to no account.
        """
        breaker = self._of_account.get(account)
        if breaker:
            breaker.check()
        try:
            if account:
                self._of_all.check()
        except Unavailable:
            if breaker:
                breaker.open()  # nobody made the trial that check() has granted
            raise
        started, waited_in_vain = time.monotonic(), False
        try:
            yield
        except Unavailable as error:
            waited = time.monotonic() - started
            waited_in_vain = waited > WAITED
            if waited_in_vain:
                self._of_account.setdefault(account, Breaker()).open()
                if account:
                    self._in_vain.add(account)
                if isinstance(error, OutcomeUnknown):
                    self._of_all.open(waited)
                elif len(self._in_vain) > 1:
                    # An account that is not locked may find that out at once.
                    self._of_all.open(waited, pause=0)
            raise
        finally:
            if not waited_in_vain:
                self._of_account.pop(account, None)
                if account:
                    self._in_vain.clear()
                    self._of_all.close()
