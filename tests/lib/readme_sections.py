"""Pages in Markdown: parts that are made from data, each between ``<!-- name -->`` and ``<!-- /name -->``, and lines of
at most 120 characters in what people write."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

WIDTH = 120
"""Most characters of a line of prose."""

_SPACE = "\0"
_MARK = re.compile(r"<!-- (?P<end>/?)(?P<name>.+) -->")
_ITEM = re.compile(r" *(?:[*-]|\d+\.) +")
_WORD = re.compile(r"(?:`[^`]*`|\S)+")
"""What is in backticks stays on one line."""
_BEGINS_A_BLOCK = re.compile(r"[*+>-]|#+|\d+[.)]")
"""A word that would begin a list, a quotation or a heading at the start of a line."""


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


def markdown_table(heads: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    """A table, each cell as `str` shows it.

    Args:
        heads: the columns' heads.
        rows: the cells of each line.
    """
    head, *others = (f"| {' | '.join(map(str, cells))} |" for cells in (heads, *rows))
    return "\n".join([head, "|---" * len(heads) + "|", *others])


def paragraph(*sentences: str) -> str:
    """Sentences as a paragraph with lines of at most 120 characters; what is in backticks stays on one line."""
    text = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", _SPACE), " ".join(sentences))
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False).replace(_SPACE, " ")


def prose(page: str) -> Iterator[tuple[int, str]]:
    """The lines that people write as running text, with their numbers from 0: no tables, headings, tags, code and
    parts that are made from data. Lines of a paragraph, or of an item of a list, follow each other."""
    part, in_code = "", False
    for number, line in enumerate(page.splitlines()):
        text = line.strip()
        if text.startswith("```"):
            in_code = not in_code
        elif not in_code and (mark := _MARK.fullmatch(text)):
            part = "" if mark["end"] else mark["name"]
        elif text and not in_code and not part and not text.startswith(("|", "#", "<", ">")):
            yield number, line


def filled(page: str) -> str:
    """The page with its running text in full lines: no longer than `WIDTH`, and none to which the next word could have
    been added. What is in backticks stays on one line."""
    lines: list[str | None] = list(page.splitlines())
    paragraphs: list[list[int]] = []
    for number, line in prose(page):
        if not paragraphs or number != paragraphs[-1][-1] + 1 or _ITEM.match(line):
            paragraphs.append([])
        paragraphs[-1].append(number)
    for numbers in paragraphs:
        text = "\n".join(str(lines[number]) for number in numbers)
        for number in numbers[1:]:
            lines[number] = None
        lines[numbers[0]] = _fill(text)
    return "".join(f"{line}\n" for line in lines if line is not None)


def _fill(text: str) -> str:
    """A paragraph, or an item of a list, in full lines."""
    item = _ITEM.match(text)
    indent = item.end() if item else len(text) - len(text.lstrip())
    found = [text[:indent]]
    for word in _WORD.findall(" ".join(text[indent:].split())):
        begun = len(found[-1]) > indent
        if begun and len(found[-1]) + 1 + len(word) > WIDTH and not _BEGINS_A_BLOCK.fullmatch(word):
            found.append(" " * indent + word)
        else:
            found[-1] += " " * begun + word
    return "\n".join(found)


def _cut(page: str, name: str) -> tuple[str, str, str]:
    """The page up to the end of the first mark, between the marks, and from the second on."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"there is no one part {begin.strip()} ... {end}")
    head, _, rest = page.partition(begin)
    inside, _, tail = rest.partition(end)
    return head + begin, inside, end + tail
