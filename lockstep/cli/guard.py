"""Runs one service so that nothing of it outlives its parent: `lockstep up` starts each service through this.

vLLM's engine cores are children of a node and do not end when it is killed. The guard adopts orphans of its
service (Linux child subreaper), asks the kernel for SIGTERM when its own parent dies, and kills what is left
before it exits.

    SIGTERM, SIGINT, SIGHUP   SIGTERM to the service, SIGKILL to everything below after `--stop-s`
    SIGQUIT                   SIGKILL to everything below, at once

The signal goes to the service alone, not to its engines: it has requests to drain through them first. Exits
with the service's code, or 128 + n when signal n ended it. Imports little: it has to start in a moment.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_STOP = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_WATCHED = _STOP | {signal.SIGQUIT, signal.SIGCHLD}

ORPHANS_S = 2.0
"""Python's resource tracker gets this long after its service to remove what shared memory was left."""


def guard_argv(argv: Sequence[str], parent_pid: int, pid_fd: int, stop_s: float) -> list[str]:
    """The command that runs `argv` guarded; the pid of the service is written to `pid_fd`."""
    own = [sys.executable, "-P", "-m", "lockstep.cli.guard"]
    flags = [f"--parent-pid={parent_pid}", f"--pid-fd={pid_fd}", f"--stop-s={stop_s}"]
    return [*own, *flags, "--", *argv]


def main() -> int:
    """Start the service and stay until nothing of it is left."""
    parser = argparse.ArgumentParser(prog="lockstep.cli.guard", description=__doc__)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--pid-fd", type=int, required=True)
    parser.add_argument("--stop-s", type=float, required=True)
    parser.add_argument("argv", nargs="+")
    args = parser.parse_args()

    original = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != args.parent_pid:
        return 1  # the parent died before the kernel knew whom to tell

    def in_child() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, original)

    # This process has one thread, so preexec_fn is safe. A session of its own: Ctrl-C in the terminal reaches
    # `lockstep up` only, which stops things in order.
    service = subprocess.Popen(
        args.argv, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=in_child
    )
    os.write(args.pid_fd, f"{service.pid}\n".encode())
    os.close(args.pid_fd)
    at_once = _until_it_ends(service, args.stop_s)
    service.kill()  # does nothing to one that has ended
    code = service.wait()
    _kill_rest(0.0 if at_once else ORPHANS_S)
    return code if code >= 0 else 128 - code


def _until_it_ends(service: subprocess.Popen[bytes], stop_s: float) -> bool:
    """Wait for the end of the service or of its time to stop; True if told to end all at once."""
    deadline_s: float | None = None
    while service.poll() is None:
        if deadline_s is None:
            received: signal.struct_siginfo | None = signal.sigwaitinfo(_WATCHED)
        else:
            received = signal.sigtimedwait(_WATCHED, max(deadline_s - time.monotonic(), 0.0))
        if received is None:
            return False
        if received.si_signo == signal.SIGQUIT:
            return True
        if received.si_signo in _STOP:
            deadline_s = deadline_s or time.monotonic() + stop_s
            service.terminate()
    return False


def _kill_rest(patience_s: float) -> None:
    """SIGKILL every process below this one until there is none, resource trackers after `patience_s`."""
    me = psutil.Process()
    deadline_s = time.monotonic() + patience_s
    while rest := me.children(recursive=True):
        late = time.monotonic() >= deadline_s
        for process in rest:
            if late or not _is_resource_tracker(process):
                _kill(process)
        psutil.wait_procs(rest, timeout=0.1)


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False  # it ended meanwhile


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


if __name__ == "__main__":
    sys.exit(main())
