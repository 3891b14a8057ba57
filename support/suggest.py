"""Guess which name a mistyped word stood for, to say it in an error."""

import difflib
import re
from collections.abc import Iterable


def likely(word: str, names: Iterable[str]) -> str:
    """The one of `names` that `word` was probably meant to be, or "" if none is close.

    Upper and lower case count the same. The initials of a name stand for it: lr for learning_rate.
    """
    wanted = word.lower()
    spellings = {name.lower(): name for name in names}
    if wanted in spellings:
        return spellings[wanted]
    for spelling, name in spellings.items():
        parts = re.split("[_-]", spelling)
        initials = "".join(part[:1] for part in parts)
        if len(parts) > 1 and initials == wanted:
            return name
    closest = difflib.get_close_matches(wanted, spellings, n=1)
    return spellings[closest[0]] if closest else ""
