"""The training text: the machine's own Python standard library, and chat pairs made from its docstrings."""

import ast
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

SKIPPED = {
    "test",
    "tests",
    "encodings",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
HELD_OUT_EVERY = 20
MAX_CHAT_CHARACTERS = 800


@dataclass(frozen=True, slots=True)
class Text:
    """Documents, each ended by <|eos|>; no document of a held-out file is among the training ones."""

    train: list[str]
    held_out: list[str]


def read_standard_library() -> Text:
    """Every file and every chat pair of it; each 20th file is held out. The order is the same on each run."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts))
    text = Text([], [])
    for number, path in enumerate(files, start=1):
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a file in another encoding
        kept = text.held_out if number % HELD_OUT_EVERY == 0 else text.train
        kept.append(f"{source}<|eos|>")
        kept.extend(chat_pairs(source))
    if not text.held_out:
        raise FileNotFoundError(f"no standard library source under {root}")
    return text


def chat_pairs(source: str) -> Iterator[str]:
    """Questions and answers in the chat template's form, from each documented function and class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        about = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
        if not about:
            continue
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        if len(about) <= MAX_CHAT_CHARACTERS:
            yield _pair(f"What does the {kind} {node.name} do?", about)
        code = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip()
        if kind == "function" and len(code) <= MAX_CHAT_CHARACTERS:
            yield _pair(f"Write a Python function {node.name}: {about}", code)


def _pair(question: str, answer: str) -> str:
    return f"<|user|>{question}<|assistant|>{answer}<|eos|>"


def tokens(documents: Iterable[str], tokenizer: Tokenizer, at_most: int) -> Tensor:
    """One stream of token ids, cut at `at_most`; documents beyond that are not tokenized at all."""
    ids: list[int] = []
    for document in documents:
        if len(ids) >= at_most:
            break
        ids += tokenizer.encode(document, add_special_tokens=False).ids
    return torch.tensor(ids[:at_most])


def shuffled(documents: list[str], seed: int) -> list[str]:
    order = list(documents)
    random.Random(seed).shuffle(order)
    return order


def batch(stream: Tensor, window: int, batch_tokens: int, generator: torch.Generator) -> Tensor:
    """Random windows, [batch_tokens / window, window + 1]: each row's inputs and the next tokens."""
    starts = torch.randint(len(stream) - window, (batch_tokens // window,), generator=generator)
    return stream[starts[:, None] + torch.arange(window + 1)]
