"""What a check finds, and about whom."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is: an error keeps the cluster from serving in lockstep, a warning is to be known."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one check: what is the case and, if that is not well, the flag and value that work."""

    level: Level
    text: str
    instead: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict with its place: `where` is "decode HOST:PORT", "proxy URL" or "cluster"."""

    where: str
    check: str
    level: Level
    text: str
    instead: str

    @classmethod
    def of(cls, where: str, check: str, verdict: Verdict) -> "Finding":
        return cls(where, check, verdict.level, verdict.text, verdict.instead)


def ok(text: str) -> Verdict:
    return Verdict(Level.OK, text)


def warning(text: str, instead: str) -> Verdict:
    return Verdict(Level.WARNING, text, instead)


def error(text: str, instead: str) -> Verdict:
    return Verdict(Level.ERROR, text, instead)
