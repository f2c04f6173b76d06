"""Parts of a page that are made from data: each stands between ``<!-- name -->`` and ``<!-- /name -->``."""

from __future__ import annotations

import re
import textwrap

_SPACE = "\0"


def part(page: str, name: str) -> str:
    """What stands between the marks.

    Raises:
        ValueError: the page has not one such part.
    """
    return _cut(page, name)[1].strip()


def with_part(page: str, name: str, text: str) -> str:
    """The page with other text between the marks.

    Raises:
        ValueError: the page has not one such part.
    """
    before, _, after = _cut(page, name)
    return f"{before}{text}\n{after}"


def paragraph(*sentences: str) -> str:
    """Sentences as a paragraph with lines of at most 120 characters; what is in backticks stays on one line."""
    text = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", _SPACE), " ".join(sentences))
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False).replace(_SPACE, " ")


def _cut(page: str, name: str) -> tuple[str, str, str]:
    """The page up to the end of the first mark, between the marks, and from the second on."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"there is no one part {begin.strip()} ... {end}")
    head, _, rest = page.partition(begin)
    inside, _, tail = rest.partition(end)
    return head + begin, inside, end + tail
