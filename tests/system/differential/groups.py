"""All cases, in groups that are answered and compared together."""

from system.differential import chat, completions, other_routes, pairs, refused
from system.differential.case import Case

GROUPS: dict[str, list[Case]] = {
    "completions": completions.CASES,
    "chat": chat.CASES,
    "other routes": other_routes.CASES,
    "pairs": pairs.CASES,
    "refused": refused.CASES,
}

ALL = [case for cases in GROUPS.values() for case in cases]
CONCURRENCY = 8

FRONT_END_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-scale-out")
"""Given to plain vLLM and to the proxy: tools other than "none" need a parser, and render routes the last."""
