"""What an engine raises for an outage."""

HOW_TO_BEGIN = "restore a backup, or run `init-db` for an empty database"


class Unavailable(Exception):
    """The database is locked, full or out of reach.

    Nothing was changed, except perhaps by a write that raises OutcomeUnknown.
    """


class OutcomeUnknown(Unavailable):
    """A write may or may not have been made.

    Its connection, its disk or its file was lost, or a cluster failed at its COMMIT.
    """
