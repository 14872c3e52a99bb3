"""What may name an account, and what may be the note of a token.

Commands print both, and the log prints names, so neither can hold a line break or an escape
sequence.
"""

import unicodedata


class BadName(ValueError):
    """The text cannot name an account."""


class BadNote(ValueError):
    """The text cannot be the note of a token."""


def account_name(text: str) -> str:
    """The name in NFC (UAX 15), which is the same however it was typed. Raises BadName."""
    name = unicodedata.normalize("NFC", text)
    if not (0 < len(name) <= 255 and name.isprintable() and name == name.strip()):
        raise BadName(
            "An account name must be 1 to 255 printable characters, "
            "with no leading or trailing spaces."
        )
    return name


def check_note(text: str) -> str:
    """The note itself. Raises BadNote."""
    if not (0 < len(text) <= 100 and text.isprintable()):
        raise BadNote("A note must be 1 to 100 printable characters, without a line break.")
    return text
