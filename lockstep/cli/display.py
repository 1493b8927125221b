"""Shows on the terminal, or line by line where there is none, how a stack starts and what happens to it."""

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from lockstep.cli.plan import StackPlan
from lockstep.cli.reporter import Phase

_STYLES = {Phase.STARTING: "yellow", Phase.READY: "green", Phase.DOWN: "red", Phase.STOPPING: "yellow"}


@dataclass(slots=True)
class _Row:
    phase: Phase = Phase.STARTING
    detail: str = ""
    since_s: float = field(default_factory=time.monotonic)
    took_s: float | None = None

    def seconds(self) -> float:
        """In this phase so far, or what the start took once it is over."""
        return self.took_s if self.took_s is not None else time.monotonic() - self.since_s


class Display:
    """A Reporter; a context manager, since a live table has to be taken off the terminal again."""

    def __init__(self, console: Console, plan: StackPlan) -> None:
        self._console = console
        self._rows = {spec.role: _Row() for spec in plan.processes}
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=8)
        self._is_live = False

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
            self._is_live = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_live()

    def phase(self, role: str, phase: Phase, detail: str = "") -> None:
        """Show where a process is; a repeated phase only changes its detail."""
        row = self._rows[role]
        if phase is not row.phase:
            took_s = row.seconds() if phase is Phase.READY else None
            row = self._rows[role] = _Row(phase, detail, took_s=took_s)
        row.detail = detail
        if not self._is_live and phase is not Phase.DOWN:
            self.note(_line(role, row))

    def stack_ready(self, plan: StackPlan) -> None:
        """Say where to connect, with a command to paste."""
        self._end_live()
        url = plan.proxy_url
        self.note(f"\nLockstep is ready: {url}/v1 serves the model {plan.served_model_name}. Try:\n")
        self.note(
            f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
            f'    -d \'{{"model": "{plan.served_model_name}", "stream": true, "max_tokens": 64,'
            ' "messages": [{"role": "user", "content": "Write a function that adds two numbers."}]}\'\n'
        )
        if plan.live_url:
            self.note(f"The ranks, live, in a browser on this machine: {plan.live_url}\n")
        self.note("Ctrl-C stops everything.")

    def note(self, line: str) -> None:
        """Print a line as it is: no markup, no wrapping, so that commands can be pasted."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _end_live(self) -> None:
        if self._is_live:
            self._is_live = False
            self._live.stop()

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for role, row in self._rows.items():
            mark = self._spinner if row.phase is Phase.STARTING else Text("●", style=_STYLES[row.phase])
            phase = Text(str(row.phase), style=_STYLES[row.phase])
            seconds = Text(f"{row.seconds():4.0f} s", style="dim")
            table.add_row(mark, Text(role, style="bold"), phase, seconds, Text(row.detail, style="dim"))
        return table


def _line(role: str, row: _Row) -> str:
    took = f" after {row.took_s:.0f} s" if row.took_s is not None else ""
    return f"{role:<8} {row.phase}{took}{': ' + row.detail if row.detail else ''}"
