"""The three local tasks for lm-eval over the held-out text, as the files that it reads."""

import json
from pathlib import Path
from typing import Any

from bench.accuracy import held_out
from bench.accuracy.held_out import Document, Size

PERPLEXITY = "heldout_perplexity"
CONTINUATION = "heldout_continuation"
LAST_WORD = "heldout_last_word"
TASKS = (PERPLEXITY, CONTINUATION, LAST_WORD)

CONTINUATION_TOKENS = 32
"""Of every answer: the end of the line is judged, all of them are compared between the systems."""


def write(folder: Path, size: Size) -> None:
    """For each task its documents, and its definition for `--include_path`."""
    lines = held_out.package_text(held_out.LINES_FROM)
    passages = [held_out.package_text(package) for package in held_out.PASSAGES_FROM]
    documents: dict[str, list[Document]] = {
        PERPLEXITY: held_out.passages(passages, size),
        CONTINUATION: held_out.endings(lines, size),
        LAST_WORD: held_out.choices(lines, size),
    }
    for task in TASKS:
        data = folder / f"{task}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents[task]))
        # JSON is YAML, and needs no library to be written.
        (folder / f"{task}.yaml").write_text(json.dumps(definition(task, data), indent=1) + "\n")


def definition(task: str, data: Path) -> dict[str, Any]:
    """A task of lm-eval (its docs/task_guide.md). Each `doc_to_…` names a field: texts go out as they are."""
    common = {
        "task": task,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "metadata": {"version": 1},
    }
    return common | _OWN[task]


def _metric(name: str, aggregation: str, *, higher_is_better: bool) -> dict[str, Any]:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": higher_is_better}


_OWN: dict[str, dict[str, Any]] = {
    PERPLEXITY: {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [
            _metric("word_perplexity", "weighted_perplexity", higher_is_better=False),
            _metric("byte_perplexity", "weighted_perplexity", higher_is_better=False),
            _metric("bits_per_byte", "bits_per_byte", higher_is_better=False),
        ],
    },
    CONTINUATION: {
        "output_type": "generate_until",
        "doc_to_text": "prefix",
        "doc_to_target": "ending",
        # What lm-eval does not know it passes on: without `ignore_eos` some answers would be shorter.
        "generation_kwargs": {
            "until": [],
            "max_gen_toks": CONTINUATION_TOKENS,
            "temperature": 0,
            "do_sample": False,
            "ignore_eos": True,
        },
        "filter_list": [
            {
                "name": "line",
                "filter": [
                    {"function": "regex", "regex_pattern": r"\A[^\n]*"},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [_metric("exact_match", "mean", higher_is_better=True)],
    },
    LAST_WORD: {
        "output_type": "multiple_choice",
        "doc_to_text": "prefix",
        "doc_to_choice": "words",
        "doc_to_target": "right",
        "target_delimiter": " ",
        "metric_list": [
            _metric("acc", "mean", higher_is_better=True),
            _metric("acc_norm", "mean", higher_is_better=True),
        ],
    },
}
