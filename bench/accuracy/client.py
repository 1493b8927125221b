"""lm-eval in an environment of its own: installed, run against one endpoint, and what it writes read back."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.accuracy.tasks import TASKS
from bench.load import PICO
from bench.proxy_peers import cached, install_once

VERSION = "0.4.13"
CONCURRENCY = 64
MAX_LENGTH = 512
"""Tokens of a request. A passage becomes windows of 510 tokens, sent at once, passage by passage."""

DEADLINE_S = 300.0
REQUEST_TIMEOUT_S = 120


class ClientError(Exception):
    """lm-eval did not come to its end; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What came back for one document: log-likelihoods in nats, whether each is greedy's choice, or a text.

    `prompt` is lm-eval's own hash of what it sent.
    """

    prompt: str
    loglikelihoods: tuple[float, ...] = ()
    greedy: tuple[bool, ...] = ()
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """Figures by task and metric, without their standard errors; samples by task and document."""

    figures: dict[tuple[str, str], float]
    samples: dict[tuple[str, int], Sample]


def installed() -> Path:
    """The command, kept from run to run. Raises StartError where it cannot be installed.

    With the transformers that our vLLM has, so that both tokenize alike, and without torch.
    """
    home = cached(f"lm-eval-{VERSION}")
    pip = [str(home / "bin" / "pip"), "install", "-q"]
    install_once(
        home,
        [sys.executable, "-m", "venv", "--clear", str(home)],
        [*pip, f"transformers=={version('transformers')}"],
        [*pip, f"lm-eval[api]=={VERSION}"],
    )
    return home / "bin" / "lm_eval"


def run(command: Path, url: str, tasks: Path, folder: Path) -> Result:
    """All tasks against one endpoint; log, results and caches go to `folder`. Raises ClientError."""
    log = folder / "lm_eval.log"
    argv = [str(command), *arguments(url, tasks, folder / "results")]
    with log.open("wb") as out:
        try:
            code = subprocess.run(
                argv,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(folder),
                cwd=folder,
                timeout=DEADLINE_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise ClientError(f"not through after {DEADLINE_S:g} s: {_tail(log)}") from error
    if code:
        raise ClientError(f"ended with {code}: {_tail(log)}")
    return read(folder / "results")


def arguments(url: str, tasks: Path, results: Path) -> list[str]:
    """One attempt a request, so that no error is tried away; the tokenizer is named, not asked for."""
    model = {
        "model": "pico",
        "base_url": f"{url}/v1/completions",
        "num_concurrent": CONCURRENCY,
        "max_retries": 1,
        "timeout": REQUEST_TIMEOUT_S,
        "tokenizer": PICO,
        "tokenizer_backend": "huggingface",
        "tokenized_requests": True,
        "max_length": MAX_LENGTH,
    }
    argv = ["run", "--model", "local-completions", "--model_args"]
    argv += [f"{name}={value}" for name, value in model.items()]
    argv += ["--tasks", *TASKS, "--include_path", str(tasks), "--batch_size", "1"]
    return [*argv, "--output_path", str(results), "--log_samples"]


def environment(folder: Path) -> dict[str, str]:
    """Nothing from the network, and nothing kept outside the folder."""
    return os.environ | {
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_EVALUATE_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def read(results: Path) -> Result:
    """What `--output_path` and `--log_samples` wrote. Raises ClientError where something is missing."""
    files = list(results.rglob("results_*.json"))
    if len(files) != 1:
        raise ClientError(f"{len(files)} files of results instead of one")
    figures = {
        (task, metric.split(",")[0]): float(value)
        for task, metrics in json.loads(files[0].read_text())["results"].items()
        for metric, value in metrics.items()
        if "," in metric and not metric.split(",")[0].endswith("_stderr")
    }
    samples = {(task, number): sample for task in TASKS for number, sample in _samples(results, task)}
    if {task for task, _ in figures} != set(TASKS) or {task for task, _ in samples} != set(TASKS):
        raise ClientError("a task has no figures or no samples")
    return Result(figures, samples)


def _samples(results: Path, task: str) -> Iterator[tuple[int, Sample]]:
    for path in results.rglob(f"samples_{task}_*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            yield entry["doc_id"], parsed(entry)


def parsed(entry: dict[str, Any]) -> Sample:
    """One line of a samples file; it has a list of answers for each request of the document, as strings."""
    answers = [answers[0] for answers in entry["resps"]]
    prompt = entry["prompt_hash"]
    if "exact_match" in entry:
        return Sample(prompt, text=answers[0])
    pairs = [answer if isinstance(answer, list) else [answer] for answer in answers]
    return Sample(
        prompt,
        loglikelihoods=tuple(float(pair[0]) for pair in pairs),
        greedy=tuple(pair[1] == "True" for pair in pairs if len(pair) > 1),
    )


def _tail(log: Path) -> str:
    return log.read_bytes()[-3000:].decode(errors="replace")
