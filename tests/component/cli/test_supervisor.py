"""The supervisor of `lockstep up` over real processes: start, restart, failure, stop, nothing left behind."""

import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from conftest import Stack


def answers(port: int) -> bool:
    """Whether a service is ready on this port."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, ConnectionError):
        return False


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie, which an init that reaps late may leave for a while."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ready_stack_says_where_it_is(stack: "Stack") -> None:
    """Once all are ready, a URL and a curl command are printed and state.json describes each process."""
    proxy_port = stack.add("proxy")
    node_port = stack.add("decode", "--ready-after-polls", "2")
    stack.start()
    stack.wait_ready()
    assert answers(proxy_port)
    assert answers(node_port)
    state = stack.service_state("decode")
    assert state["http_url"] == f"http://127.0.0.1:{node_port}"
    assert state["restarts"] == 0
    assert "fake_service.py" in " ".join(psutil.Process(state["pid"]).cmdline())
    assert state["log"] == str(stack.directory / "state" / "logs" / "decode.log")
    assert f"curl -N http://127.0.0.1:{proxy_port}/v1/chat/completions" in stack.output()


def test_reason_for_not_being_ready_is_shown(stack: "Stack") -> None:
    """What /readyz answers while a service starts is on the display."""
    stack.add("decode", "--ready-after-polls", "2")
    stack.start()
    stack.wait_ready()
    lines = [line.strip() for line in stack.output().splitlines()]
    assert "decode   starting: warming up" in lines


def test_failed_start_is_one_clear_line(stack: "Stack") -> None:
    """Exit code, cause and log of the process that failed; the others are stopped; the code is 1."""
    stack.add("proxy")
    stack.add("prefill", "--fail", "ValueError: no such model", "--child")
    stack.start()
    assert stack.wait_exit() == 1
    log = stack.directory / "state" / "logs" / "prefill.log"
    line = f"lockstep up: prefill exited with code 3: ValueError: no such model (log: {log})"
    assert stack.output().splitlines()[-1] == line
    assert stack.processes() == []
    assert stack.state() == {}


def test_start_that_takes_too_long_is_a_failure(stack: "Stack") -> None:
    """The line says how long was waited and what the service was waiting for."""
    stack.add("decode", "--ready-after-polls", "100000")
    stack.start(startup_timeout_s=8.0)
    assert stack.wait_exit() == 1
    assert "lockstep up: decode was not ready after 8 s (warming up)" in stack.output()
    assert stack.processes() == []


def test_dead_service_is_restarted_on_its_port(stack: "Stack", wait_for) -> None:  # type: ignore[no-untyped-def]
    """A service that is killed comes back at the same address with a new pid, and state.json follows."""
    stack.add("proxy")
    port = stack.add("decode", "--child")
    stack.start()
    stack.wait_ready()
    before = stack.service_state("decode")
    os.kill(before["pid"], signal.SIGKILL)
    after = wait_for(
        "a restart",
        lambda: stack.service_state("decode").get("restarts") == 1 and stack.service_state("decode"),
    )
    assert after["pid"] != before["pid"]
    assert answers(port)
    log = stack.directory / "state" / "logs" / "decode.log"
    assert f"decode was ended by SIGKILL (log: {log}); starting it again in 0.1 s" in stack.output()
    assert stack.service_state("proxy")["restarts"] == 0


def test_engines_of_a_dead_node_die_with_it(stack: "Stack", wait_for) -> None:  # type: ignore[no-untyped-def]
    """The child of a killed service is gone before the next start: it would hold its ports and cores."""
    stack.add("decode", "--child")
    stack.start()
    stack.wait_ready()
    child = int(stack.log("decode").split("child pid ")[1].split()[0])
    assert alive(child)
    os.kill(stack.service_state("decode")["pid"], signal.SIGKILL)
    wait_for("a restart", lambda: stack.log("decode").count("child pid") == 2)
    assert not alive(child)


def test_service_that_keeps_dying_ends_the_stack(stack: "Stack") -> None:
    """After a bounded number of quick deaths the supervisor gives up, says so, and ends all."""
    stack.add("proxy")
    stack.add("prefill", "--die-when-ready")
    stack.start()
    assert stack.wait_exit() == 1
    last = stack.output().splitlines()[-1]
    assert last.startswith("lockstep up: prefill exited with code 9")
    assert last.endswith("it died 3 times in a row soon after its start, giving up")
    assert stack.processes() == []


def test_sigterm_stops_everything_in_order(stack: "Stack", tmp_path: Path) -> None:
    """The proxy goes first, the nodes after it, and the exit code of a healthy stack is 0."""
    order = tmp_path / "order"
    nodes = {stack.add("prefill", "--stop-log", str(order), "--child", stop_wave=1) for _ in range(1)}
    nodes.add(stack.add("decode", "--stop-log", str(order), "--child", stop_wave=1))
    proxy = stack.add("proxy", "--stop-log", str(order), stop_wave=0)
    stack.start()
    stack.wait_ready()
    stack.signal(signal.SIGTERM)
    assert stack.wait_exit() == 0
    stopped = [int(line) for line in order.read_text().split()]
    assert stopped[0] == proxy
    assert set(stopped[1:]) == nodes
    assert stack.processes() == []
    assert stack.state() == {}


def test_ctrl_c_stops_everything(stack: "Stack") -> None:
    """SIGINT is the same as SIGTERM."""
    stack.add("proxy")
    stack.start()
    stack.wait_ready()
    stack.signal(signal.SIGINT)
    assert stack.wait_exit() == 0
    assert stack.processes() == []


def test_service_that_ignores_sigterm_is_killed(stack: "Stack") -> None:
    """After its time to stop a service and its children are killed; the exit code is still 0."""
    stack.add("decode", "--ignore-sigterm", "--child", stop_s=1.0)
    stack.start()
    stack.wait_ready()
    stack.signal(signal.SIGTERM)
    assert stack.wait_exit() == 0
    assert stack.processes() == []


def test_second_ctrl_c_kills_at_once(stack: "Stack", wait_for) -> None:  # type: ignore[no-untyped-def]
    """Somebody in a hurry does not wait for a service that takes its time to stop."""
    stack.add("decode", "--ignore-sigterm", "--child", stop_s=25.0)
    stack.start()
    stack.wait_ready()
    began_s = time.monotonic()
    stack.signal(signal.SIGINT)
    wait_for("the first Ctrl-C", lambda: "Stopping" in stack.output())
    stack.signal(signal.SIGINT)
    assert stack.wait_exit() == 0
    assert time.monotonic() - began_s < 10.0
    assert stack.processes() == []


def test_ctrl_c_during_the_start(stack: "Stack", wait_for) -> None:  # type: ignore[no-untyped-def]
    """A stack that was never ready is stopped as well, with a code that says it was interrupted."""
    stack.add("decode", "--ready-after-polls", "100000", "--child")
    stack.start()
    wait_for("the start", lambda: "warming up" in stack.output())
    stack.signal(signal.SIGINT)
    assert stack.wait_exit() == 130
    assert stack.processes() == []


def test_killed_supervisor_leaves_no_process(stack: "Stack", wait_for) -> None:  # type: ignore[no-untyped-def]
    """SIGKILL of the supervisor takes services and their children along, even those that ignore SIGTERM."""
    stack.add("proxy")
    stack.add("decode", "--ignore-sigterm", "--child", stop_s=1.0)
    stack.start()
    stack.wait_ready()
    assert len(stack.processes()) == 6  # supervisor, 2 guards, 2 services, a child
    stack.signal(signal.SIGKILL)
    wait_for("all processes gone", lambda: stack.processes() == [])


def test_killed_guard_leaves_no_process(stack: "Stack", wait_for) -> None:  # type: ignore[no-untyped-def]
    """When the guard itself is killed its service dies with it and a new pair is started."""
    port = stack.add("proxy")
    stack.start()
    stack.wait_ready()
    before = stack.service_state("proxy")["pid"]
    guard = psutil.Process(before).parent()
    assert guard is not None
    guard.kill()
    wait_for("a restart", lambda: stack.service_state("proxy").get("restarts") == 1)
    assert not alive(before)
    assert answers(port)
