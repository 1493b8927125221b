"""The held-out text and what is asked of it: passages, and last words of lines, to give or to choose.

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
"""Fewest and most: of that word."""

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
    words = _spread(list(_last_words(text)), size.endings)
    return [
        {"prefix": _before(text, end, number), "ending": word} for number, (end, word) in enumerate(words)
    ]


def choices(text: str, size: Size) -> list[Document]:
    """The same with that word among other last words: {"prefix", "words", "right"}."""
    rng = random.Random(SEED)
    words = list(_last_words(text))
    others = sorted({word for _, word in words})
    documents = []
    for number, (end, word) in enumerate(_spread(words, size.choices)):
        wrong = rng.sample([other for other in others if other != word], CHOICES - 1)
        right = rng.randrange(CHOICES)
        documents.append(
            {
                "prefix": _before(text, end, number),
                "words": [*wrong[:right], word, *wrong[right:]],
                "right": right,
            }
        )
    return documents


def _last_words(text: str) -> Iterator[tuple[int, str]]:
    """Where the text before a last word ends, for the longest of the prefixes too, and the word.

    The space between them is in neither: pico's tokens begin with it, and lm-eval strips answers.
    """
    start = 0
    for line in text.splitlines(keepends=True):
        before, _, word = line.rstrip().rpartition(" ")
        if start >= max(PREFIX_CHARACTERS) and len(line.strip()) >= LINE_CHARACTERS and _fits(word):
            yield start + len(before), word
        start += len(line)


def _fits(word: str) -> bool:
    fewest, most = WORD_CHARACTERS
    return fewest <= len(word) <= most


def _spread(words: list[tuple[int, str]], count: int) -> list[tuple[int, str]]:
    """`count` of them, evenly over the text."""
    return [words[number * len(words) // count] for number in range(count)]


def _before(text: str, end: int, number: int) -> str:
    return text[end - PREFIX_CHARACTERS[number % len(PREFIX_CHARACTERS)] : end]
