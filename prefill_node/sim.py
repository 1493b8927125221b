"""`python -m prefill_node.sim MODEL …`: run a prefill node whose engines are simulated."""

import sys

from lockstep.node import cpu_environment

if __name__ == "__main__":
    cpu_environment.prepare()
    # vLLM picks its platform when it is first imported.
    from lockstep.sim.main import main
    from prefill_node.service import ROLE
    from prefill_node.sim_leg import read_leg

    sys.exit(main(ROLE, read_leg, sys.argv[1:]))
