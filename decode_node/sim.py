"""`python -m decode_node.sim MODEL …`: run a decode node whose engines are simulated."""

import sys

from lockstep.node import cpu_environment

if __name__ == "__main__":
    cpu_environment.prepare()
    # vLLM picks its platform when it is first imported.
    from decode_node.service import ROLE
    from decode_node.sim_leg import read_leg
    from lockstep.sim.main import main

    sys.exit(main(ROLE, read_leg, sys.argv[1:]))
