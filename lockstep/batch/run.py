"""A batch from its first request to its last: so many at once, each written down as soon as it has ended."""

import asyncio
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.batch.asking import Asker
from lockstep.batch.requests_file import BatchRequest
from lockstep.batch.results import Results
from lockstep.errors import LockstepError


@dataclass(slots=True, eq=False)
class Stop:
    """Asked for by the user: nothing new begins, and what has begun ends and is written down."""

    asked: bool = False


async def run(
    requests: Iterator[BatchRequest],
    asker: Asker,
    results: Results,
    concurrency: int,
    stop: Stop,
    progressed: Callable[[], None],
) -> None:
    """Ask whatever is not done yet, `concurrency` at once.

    `progressed` is called after each. Raises the LockstepError of the first request that says that no other
    will do better; those that run are then given up, and nothing is written of them. When this is cancelled,
    the same holds.
    """
    # One iterator for all: each worker takes the next line when it is free, so few lines are in memory.
    todo = (request for request in requests if not results.has(request.custom_id))

    async def work() -> None:
        for request in todo:
            if stop.asked:
                return
            results.add(await asker.ask(request, f"batch_req_{uuid.uuid4().hex}"))
            progressed()

    try:
        async with asyncio.TaskGroup() as workers:
            for number in range(concurrency):
                workers.create_task(work(), name=f"batch worker {number}")
    except* LockstepError as errors:
        raise errors.exceptions[0] from None
