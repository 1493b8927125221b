"""Supervises fake services as `lockstep up` supervises real ones; the plan comes as JSON.

run_stack.py STATE_DIR STARTUP_TIMEOUT_S '[{"role": …, "port": …, "args": […], "stop_s": …, "stop_wave": …}]'
"""

import json
import os
import sys
from pathlib import Path

from rich.console import Console

from lockstep.cli.plan import ProcessSpec, StackPlan
from lockstep.cli.restart import RestartPolicy
from lockstep.cli.state import StateDirectory
from lockstep.cli.up import supervise

SERVICE = Path(__file__).with_name("fake_service.py")


def spec(item: dict[str, object]) -> ProcessSpec:
    """One fake service as a process of a plan."""
    args = item.get("args", [])
    assert isinstance(args, list)
    return ProcessSpec(
        role=str(item["role"]),
        argv=(sys.executable, str(SERVICE), str(item["port"]), *args),
        env=os.environ,
        http_url=f"http://127.0.0.1:{item['port']}",
        grpc_address="",
        stop_s=float(str(item.get("stop_s", 10.0))),
        stop_wave=int(str(item.get("stop_wave", 0))),
    )


def main() -> int:
    """Run the plan to its end."""
    state_dir, timeout_s, plan = sys.argv[1:]
    specs = tuple(spec(item) for item in json.loads(plan))
    with StateDirectory.take(Path(state_dir)) as state:
        stack = StackPlan(specs, specs[0].http_url, "tiny")
        policy = RestartPolicy(max_quick_deaths=3, first_delay_s=0.1)
        return supervise(stack, state, Console(), float(timeout_s), policy)


if __name__ == "__main__":
    sys.exit(main())
