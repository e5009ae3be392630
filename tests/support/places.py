"""The places in files that messages name."""

import re


def without_places(message: str) -> str:
    """Return a message without the ` (FILE:LINE)` of a user's file."""
    return re.sub(r" \([^()]*\.py:\d+(, `[^`]*`)?\)", "", message)
