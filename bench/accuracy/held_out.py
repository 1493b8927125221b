"""The held-out text and what is asked of it: passages, last words of lines, next lines to choose among.

The text is this repository's own modules. pico was trained on Python's standard library alone, and which of
its files were held out then depends on the Python that runs it (models/pico/pico_data.py); these never were
among it.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
PASSAGES_FROM = ("kv_transfer", "proxy", "decode_node")
LINES_FROM = "lockstep"

LINE_CHARACTERS = 30
"""At least, without indentation: of a line whose last word is asked for."""

WORD_CHARACTERS = (3, 20)

PREFIX_CHARACTERS = (16, 40, 90, 160, 250, 340, 480, 680, 850, 1000)
"""Before what is asked for, in turn: 6 to 400 tokens, so one to four blocks of 128."""

CHOICES = 4
SEED = 8

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """How much of each; at least 64 requests are there to be sent at once."""

    passages: int
    passage_characters: int
    endings: int
    choices: int


FULL = Size(passages=2, passage_characters=90_000, endings=192, choices=48)
QUICK = Size(passages=1, passage_characters=60_000, endings=64, choices=16)


def package_text(package: str) -> str:
    """All modules of a package, one after the other; what protoc wrote is left out."""
    paths = sorted((REPOSITORY / package).rglob("*.py"))
    return "".join(path.read_text(encoding="utf-8") for path in paths if "generated" not in path.parts)


def passages(texts: list[str], size: Size) -> list[Document]:
    """The beginnings of the texts: {"text"}."""
    return [{"text": text[: size.passage_characters]} for text in texts[: size.passages]]


def endings(text: str, size: Size) -> list[Document]:
    """Text up to the last word of a line, and that word: {"prefix", "ending"}."""
    lines = [(start, line) for start, line in _lines(text) if _has_last_word(line)]
    documents = []
    for number, (start, line) in enumerate(_spread(lines, size.endings)):
        before, _, word = line.rpartition(" ")
        # Without the space, which pico's tokens have in front of a word. lm-eval strips the answer.
        documents.append({"prefix": _before(text, start + len(before), number), "ending": word})
    return documents


def next_lines(text: str, size: Size) -> list[Document]:
    """Text up to a line, that line among others of the same text: {"prefix", "lines", "right"}."""
    rng = random.Random(SEED)
    lines = [(start, line) for start, line in _lines(text) if len(line.strip()) >= WORD_CHARACTERS[0]]
    others = sorted({line for _, line in lines})
    documents = []
    for number, (start, line) in enumerate(_spread(lines, size.choices)):
        wrong = rng.sample([other for other in others if other != line], CHOICES - 1)
        right = rng.randrange(CHOICES)
        documents.append(
            {
                "prefix": _before(text, start, number),
                "lines": [*wrong[:right], line, *wrong[right:]],
                "right": right,
            }
        )
    return documents


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Where each line that has a longest prefix before it starts, and the line without its end."""
    start = 0
    for line in text.splitlines(keepends=True):
        if start >= max(PREFIX_CHARACTERS):
            yield start, line.rstrip()
        start += len(line)


def _has_last_word(line: str) -> bool:
    low, high = WORD_CHARACTERS
    return len(line.strip()) >= LINE_CHARACTERS and low <= len(line.rpartition(" ")[2]) <= high


def _spread(lines: list[tuple[int, str]], count: int) -> list[tuple[int, str]]:
    """`count` of them, evenly over the text."""
    return [lines[number * len(lines) // count] for number in range(count)]


def _before(text: str, end: int, number: int) -> str:
    return text[end - PREFIX_CHARACTERS[number % len(PREFIX_CHARACTERS)] : end]
