"""`lockstep up`: checks what can be checked beforehand, plans the stack, supervises it until told to stop."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from lockstep.cli import smollm2
from lockstep.cli.devices import place
from lockstep.cli.display import Display
from lockstep.cli.machine import Device, inspect_machine, require_vllm
from lockstep.cli.model import Model, resolve_model
from lockstep.cli.plan import StackPlan, StackPorts, UpOptions, plan_stack
from lockstep.cli.ports import PortPicker, require_free
from lockstep.cli.restart import RestartPolicy
from lockstep.cli.state import StateDirectory
from lockstep.cli.supervisor import StackFailedError, Supervisor

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
"""Stopped before it was ready."""


@dataclass(frozen=True, slots=True)
class UpCommand:
    """Everything that was asked for on the command line."""

    model: str | None
    served_model_name: str | None
    device: Device
    prefill_devices: str | None
    decode_devices: str | None
    decode_ranks: int | None
    num_speculative_tokens: int | None
    state_dir: Path
    startup_timeout_s: float
    options: UpOptions
    """Without what follows from the model and the machine: ranks, devices, draft tokens."""


def run_up(command: UpCommand, console: Console) -> int:
    """Run the stack in the foreground, return the exit code; raises ConfigError before it starts anything."""
    require_vllm()
    machine = inspect_machine(command.device)
    placement = place(command.prefill_devices, command.decode_devices, command.decode_ranks, machine)
    require_free(command.options.host, command.options.port)
    model = find_model(command.model, command.served_model_name, console)
    given = command.num_speculative_tokens
    options = replace(
        command.options,
        decode_ranks=placement.decode_ranks,
        prefill_devices=placement.prefill,
        decode_devices=placement.decode,
        num_speculative_tokens=model.default_draft_tokens() if given is None else given,
    )
    with StateDirectory.take(command.state_dir) as state:
        plan = plan_stack(model, options, choose_ports(options.decode_ranks), machine, os.environ)
        console.print(
            f"Starting {model.served_name} on {machine.device}: 1 prefill node, 1 decode node with "
            f"{options.decode_ranks} ranks, 1 proxy, {options.num_speculative_tokens} draft tokens. "
            f"Logs: {state.path / 'logs'}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return supervise(plan, state, console, command.startup_timeout_s)


def find_model(given: str | None, served_name: str | None, console: Console) -> Model:
    """As `resolve_model`; a name of ours that is no directory here is fetched first."""
    if given == smollm2.NAME and not Path(given).is_dir():
        given = str(smollm2.provide(console))
    return resolve_model(given, served_name)


def supervise(
    plan: StackPlan,
    state: StateDirectory,
    console: Console,
    startup_timeout_s: float,
    policy: RestartPolicy | None = None,
) -> int:
    """Keep a plan up until SIGINT, SIGTERM or SIGHUP, say in one line what failed, return the exit code."""
    try:
        with Display(console, plan) as display:
            supervisor_of = partial(
                Supervisor, plan, state, display, startup_timeout_s=startup_timeout_s, policy=policy
            )
            healthy = asyncio.run(_until_signal(supervisor_of, display))
    except StackFailedError as failure:
        console.print(
            f"lockstep up: {failure}", style="bold red", markup=False, highlight=False, soft_wrap=True
        )
        return EXIT_FAILED
    console.print("Stopped; no process is left.", highlight=False)
    return EXIT_STOPPED if healthy else EXIT_INTERRUPTED


def choose_ports(decode_ranks: int) -> StackPorts:
    """Free ports of this machine; nothing holds them until a node binds them, which says so if it cannot."""
    picker = PortPicker()
    return StackPorts(
        prefill_grpc=picker.take(),
        prefill_http=picker.take(),
        prefill_side_channel=picker.take(),
        decode_grpc=picker.take(),
        decode_http=picker.take(),
        decode_side_channel=picker.take_range(decode_ranks),
        proxy_admin=picker.take(),
    )


async def _until_signal(supervisor_of: Callable[[], Supervisor], display: Display) -> bool:
    """Run a supervisor, made inside the event loop, until a signal; whether its stack was ever ready."""
    supervisor = supervisor_of()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        display.note("Stopping; once more to kill at once.")
        supervisor.request_stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    await supervisor.run()
    return supervisor.was_ready
