"""The accuracy benchmark: what lm-eval is given, what is read back from it, and what counts as equal."""

import dataclasses
import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def load_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench is a folder of scripts, not an installed package."""
    monkeypatch.syspath_prepend(REPOSITORY)
    return lambda name: importlib.import_module(f"bench.accuracy.{name}")


@pytest.fixture
def held_out(load_module: Any) -> Any:
    return load_module("held_out")


@pytest.fixture
def result(load_module: Any) -> Any:
    """One sample of each kind, as plain vLLM might give them."""
    client = load_module("client")
    samples = {
        ("perplexity", 0): client.Sample("a", loglikelihoods=(-50_000.0,)),
        ("continuation", 0): client.Sample("b", text=" import json"),
        ("last_word", 0): client.Sample("c", loglikelihoods=(-3.0, -9.5), greedy=(True, False)),
    }
    return client.Result({("perplexity", "bits_per_byte"): 1.25, ("last_word", "acc"): 0.5}, samples)


def changed(result: Any, key: tuple[str, int], **values: Any) -> Any:
    sample = dataclasses.replace(result.samples[key], **values)
    return dataclasses.replace(result, samples=result.samples | {key: sample})


def test_an_ending_is_the_last_word_after_its_prefix(held_out: Any) -> None:
    """Prefix and ending are text as it stands there, so that a model that knows it answers exactly that."""
    text = held_out.package_text("kv_transfer")
    documents = held_out.endings(text, held_out.QUICK)
    assert len(documents) == held_out.QUICK.endings
    for document in documents:
        assert f"{document['prefix']} {document['ending']}\n" in text
        assert " " not in document["ending"]


def test_prefixes_have_all_lengths(held_out: Any) -> None:
    """From a few tokens to several blocks."""
    documents = held_out.endings(held_out.package_text("kv_transfer"), held_out.QUICK)
    assert {len(document["prefix"]) for document in documents} == set(held_out.PREFIX_CHARACTERS)


def test_the_right_word_follows_its_prefix(held_out: Any) -> None:
    """And it is among the others once only, at the place that is said."""
    text = held_out.package_text("kv_transfer")
    documents = held_out.choices(text, held_out.QUICK)
    assert len(documents) == held_out.QUICK.choices
    for document in documents:
        word = document["words"][document["right"]]
        assert f"{document['prefix']} {word}\n" in text
        assert len(set(document["words"])) == held_out.CHOICES
    assert len({document["right"] for document in documents}) > 1


def test_there_is_enough_for_every_request_at_once(load_module: Any, held_out: Any) -> None:
    """64 at a time, with --quick as well."""
    client = load_module("client")
    for size in (held_out.QUICK, held_out.FULL):
        assert size.endings >= client.CONCURRENCY
        assert size.choices * held_out.CHOICES >= client.CONCURRENCY
    assert all(
        len(held_out.package_text(package)) >= held_out.FULL.passage_characters
        for package in held_out.PASSAGES_FROM[: held_out.FULL.passages]
    )


def test_both_systems_are_given_the_same_tasks(load_module: Any, held_out: Any, tmp_path: Path) -> None:
    """The files are the same each time, and a task's fields are in its documents."""
    tasks = load_module("tasks")
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
        tasks.write(folder, held_out.QUICK)
    for task in tasks.TASKS:
        one, other = ((folder / f"{task}.jsonl").read_text() for folder in folders)
        assert one == other
        definition = json.loads((folders[0] / f"{task}.yaml").read_text())
        assert definition["dataset_kwargs"]["data_files"]["test"] == str(folders[0] / f"{task}.jsonl")
        fields = {name for key, name in definition.items() if key.startswith("doc_to_") and name}
        assert fields <= set(json.loads(one.splitlines()[0]))


def test_lm_eval_asks_without_a_second_attempt(load_module: Any, tmp_path: Path) -> None:
    """64 requests at once, of token ids, with pico's own tokenizer; an error ends the run."""
    client = load_module("client")
    argv = client.arguments("http://host:1", tmp_path / "tasks", tmp_path / "results")
    values = dict(argument.split("=", 1) for argument in argv if "=" in argument)
    assert values["base_url"] == "http://host:1/v1/completions"
    assert values["num_concurrent"] == "64"
    assert values["max_retries"] == "1"
    assert values["tokenized_requests"] == "True"
    assert Path(values["tokenizer"]) == REPOSITORY / "models" / "pico"


def test_lm_eval_keeps_to_its_folder(load_module: Any, tmp_path: Path) -> None:
    """Its caches are there, and it may not go to the network."""
    environment = load_module("client").environment(tmp_path)
    assert environment["HF_HOME"].startswith(str(tmp_path))
    assert environment["HF_HUB_OFFLINE"] == environment["HF_DATASETS_OFFLINE"] == "1"


def test_samples_of_each_kind_are_read(load_module: Any) -> None:
    """lm-eval 0.4.13 writes every answer as a string, in one list for each request."""
    client = load_module("client")
    rolling = {"prompt_hash": "a", "resps": [["-54321.125"]], "word_perplexity": [-54321.125, 9]}
    assert client.parsed(rolling) == client.Sample("a", loglikelihoods=(-54321.125,))
    text = {"prompt_hash": "b", "resps": [[" foo\nbar"]], "filtered_resps": ["foo"], "exact_match": 0.0}
    assert client.parsed(text) == client.Sample("b", text=" foo\nbar")
    choice = {"prompt_hash": "c", "resps": [[["-1.5", "True"]], [["-2.5", "False"]]], "acc": 1.0}
    assert client.parsed(choice) == client.Sample("c", loglikelihoods=(-1.5, -2.5), greedy=(True, False))


def test_results_are_read_from_the_files(load_module: Any, tmp_path: Path) -> None:
    """Figures without standard errors; a task without samples is an error."""
    client = load_module("client")
    results = {
        task: {"alias": task, "acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 1}
        for task in client.TASKS
    }
    (tmp_path / "results_now.json").write_text(json.dumps({"results": results}))
    with pytest.raises(client.ClientError):
        client.read(tmp_path)
    for task in client.TASKS:
        entry = {"doc_id": 3, "prompt_hash": "a", "resps": [["-1.0"]]}
        (tmp_path / f"samples_{task}_now.jsonl").write_text(json.dumps(entry) + "\n")
    read = client.read(tmp_path)
    assert read.figures == {(task, "acc"): 0.5 for task in client.TASKS}
    assert set(read.samples) == {(task, 3) for task in client.TASKS}


def test_the_same_twice_is_equal(load_module: Any, result: Any) -> None:
    """All samples and figures are counted."""
    found = load_module("comparison").compare(result, result)
    assert found.differences == []
    assert (found.loglikelihoods, found.texts, found.furthest) == (3, 1, 0.0)


def test_another_text_is_a_difference(load_module: Any, result: Any) -> None:
    """However small; there is no tolerance for what greedy sampling gives."""
    other = changed(result, ("continuation", 0), text=" import  json")
    (line,) = load_module("comparison").compare(result, other).differences
    assert line.startswith("continuation 0: ")


def test_rounding_is_no_difference(load_module: Any, result: Any) -> None:
    """A relative distance below the tolerance; the distance is reported all the same."""
    comparison = load_module("comparison")
    moved = -50_000.0 * (1 + 0.5 * comparison.LOGLIKELIHOOD_TOLERANCE)
    found = comparison.compare(result, changed(result, ("perplexity", 0), loglikelihoods=(moved,)))
    assert found.differences == []
    assert found.furthest == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        (("last_word", 0), {"loglikelihoods": (-3.0, -9.501)}),
        (("last_word", 0), {"loglikelihoods": (-3.0,)}),
        (("last_word", 0), {"loglikelihoods": (-3.0, math.nan)}),
        (("last_word", 0), {"greedy": (False, False)}),
        (("perplexity", 0), {"loglikelihoods": (-50_000.1,)}),
        (("perplexity", 0), {"prompt": "z"}),
    ],
)
def test_a_sample_that_differs_is_named(
    load_module: Any, result: Any, key: tuple[str, int], values: dict[str, Any]
) -> None:
    """Log-likelihoods, greedy's choice, their number, and the prompt itself."""
    (line,) = load_module("comparison").compare(result, changed(result, key, **values)).differences
    assert line.startswith(f"{key[0]} {key[1]}: ")


def test_a_sample_of_one_system_only_is_a_difference(load_module: Any, result: Any) -> None:
    """Whichever of the two lacks it."""
    comparison = load_module("comparison")
    fewer = dataclasses.replace(
        result, samples={key: sample for key, sample in result.samples.items() if key[0] != "continuation"}
    )
    assert len(comparison.compare(result, fewer).differences) == 1
    assert len(comparison.compare(fewer, result).differences) == 1


def test_figures_have_to_be_equal_too(load_module: Any, result: Any) -> None:
    """And a figure that only one system has is not."""
    comparison = load_module("comparison")
    key = ("last_word", "acc")
    other = dataclasses.replace(result, figures=result.figures | {key: 0.51})
    missing = dataclasses.replace(result, figures={k: v for k, v in result.figures.items() if k != key})
    for found in (comparison.compare(result, other), comparison.compare(result, missing)):
        (line,) = found.differences
        assert line.startswith("last_word acc: ")
        assert "**not equal**" in comparison.markdown(found)
