"""What an engine raises for an outage: an error that an operator can fix, or a retry get past."""


class Unavailable(Exception):
    """The database is locked, full or out of reach.

    Nothing was changed, except perhaps by a write that raises OutcomeUnknown.
    """


class OutcomeUnknown(Unavailable):
    """A write may or may not have been made: its connection or its disk failed."""
