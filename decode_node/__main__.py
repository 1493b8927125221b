"""`python -m decode_node MODEL …`: run a decode node."""

import sys

from lockstep.node import cpu_environment

if __name__ == "__main__":
    cpu_environment.prepare()
    # vLLM picks its platform when it is first imported.
    from decode_node.service import ROLE
    from lockstep.node.runtime import main

    sys.exit(main(ROLE, sys.argv[1:]))
