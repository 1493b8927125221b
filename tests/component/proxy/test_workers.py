"""The supervisor of workers, over fake ones: start, a worker's death, stop."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from component.proxy.stack import until

from proxy.workers.supervisor import Supervisor, Task

FAKE = Path(__file__).with_name("fake_worker.py")


@dataclass
class Answer:
    """What a fake worker says of itself."""

    number: int
    health: bool
    pid: int


@dataclass
class Running:
    """A supervisor on this loop, and the port of its workers."""

    supervisor: Supervisor
    task: "asyncio.Task[int]"
    port: int

    async def ask(self) -> Answer:
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            text = (await reader.read()).decode()
            writer.close()
        number, _, _, how, pid = text.split()
        return Answer(int(number), how == "health", int(pid))

    async def all_of(self, count: int) -> dict[int, Answer]:
        """One answer of each worker."""
        seen: dict[int, Answer] = {}
        async with asyncio.timeout(20):
            while len(seen) < count:
                answer = await self.ask()
                seen[answer.number] = answer
        return seen


@contextlib.asynccontextmanager
async def supervised(count: int, *how: str, patience_s: float = 5.0) -> AsyncIterator[Running]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        command = (sys.executable, "-P", str(FAKE))
        supervisor = Supervisor(Task(sock.fileno(), count, patience_s), how, command)
        running = Running(supervisor, asyncio.create_task(supervisor.run()), sock.getsockname()[1])
        try:
            yield running
        finally:
            if not running.task.done():
                os.kill(os.getpid(), signal.SIGTERM)  # its handler is in place, as in its own process
            await asyncio.wait_for(running.task, 20)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().remove_signal_handler(number)


async def test_all_take_the_one_port_and_only_the_first_answers_for_health() -> None:
    """While none serves, one is started, which says so on the port; the others come when it is ready."""
    async with supervised(3) as running:
        answers = await running.all_of(3)
    assert [number for number, answer in answers.items() if answer.health] == [1]
    assert len({answer.pid for answer in answers.values()}) == 3
    assert running.task.result() == 0


async def test_a_killed_worker_is_replaced_while_the_others_serve() -> None:
    """No connection is refused meanwhile, and the new one keeps off the port until it can serve."""
    async with supervised(2) as running:
        before = await running.all_of(2)
        os.kill(before[1].pid, signal.SIGKILL)
        for _ in range(20):
            await running.ask()
        async with asyncio.timeout(20):
            while (answer := await running.ask()).pid in (before[1].pid, before[2].pid):
                pass
    assert answer.number == 1
    assert not answer.health


async def test_a_lone_worker_that_is_replaced_answers_for_health_again() -> None:
    """With nobody else there, a probe would hear nothing; connections wait for the new one."""
    async with supervised(1) as running:
        before = await running.ask()
        os.kill(before.pid, signal.SIGKILL)
        after = await running.ask()
        while after.pid == before.pid:
            after = await running.ask()
        assert after.health


async def test_a_first_worker_that_cannot_start_ends_it_all_with_its_code() -> None:
    """A flag or a node is wrong, for the others too: the supervisor's own supervisor is to see it."""
    async with supervised(2, "fail") as running:
        assert await asyncio.wait_for(running.task, 20) == 3


async def test_a_worker_that_does_not_stop_is_killed() -> None:
    """After its drain and some seconds more."""
    async with supervised(1, "deaf", patience_s=0.3) as running:
        await running.ask()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running.task, 20) == 0


async def test_workers_end_with_their_supervisor() -> None:
    """Its end of the lifeline closes however it goes; the place then says so."""
    from proxy.workers.place import Place

    read_fd, write_fd = os.pipe()
    orphaned = asyncio.Event()
    with Place(1, 1, -1, -1, read_fd, answers_health=True).supervised(orphaned.set):
        assert not orphaned.is_set()
        os.close(write_fd)
        await until(orphaned.is_set, "it is told")
    os.close(read_fd)
