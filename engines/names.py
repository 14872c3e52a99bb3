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
    if not is_account_name(name):
        raise BadName(
            "An account name must be 1 to 255 printable characters, "
            "with no leading or trailing spaces."
        )
    return name


def is_account_name(text: str) -> bool:
    """Whether account_name returns the text as it is."""
    is_nfc = unicodedata.is_normalized("NFC", text)
    return is_nfc and 0 < len(text) <= 255 and is_printable(text) and text == text.strip()


def check_note(text: str) -> None:
    """Raises BadNote."""
    if not is_note(text):
        raise BadNote("A note must be 1 to 100 printable characters, without a line break.")


def is_note(text: str) -> bool:
    return 0 < len(text) <= 100 and is_printable(text)


def is_printable(text: str) -> bool:
    """Whether each character is printable, or unknown to this Python's Unicode (Cn).

    A newer Python may know it, and what is backed up there must be restored here, too.
    """
    return all(each.isprintable() or unicodedata.category(each) == "Cn" for each in text)
