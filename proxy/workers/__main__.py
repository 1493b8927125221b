"""Entry point of the process that supervises the workers; `start.become_supervisor` starts it."""

import asyncio
import sys

from lockstep import logs
from proxy.workers.start import Orders
from proxy.workers.supervisor import Supervisor, Task


def main(argv: list[str]) -> int:
    """Return the exit status."""
    orders = Orders.parse(argv[0])
    logs.configure(orders.log_format, orders.log_level, "proxy")
    task = Task(orders.socket_fd, orders.num_workers, orders.patience_s)
    return asyncio.run(Supervisor(task, argv[1:]).run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
