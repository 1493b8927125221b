"""`python -m prefill_node MODEL …`: run a prefill node."""

import sys

from lockstep.node import cpu_environment

if __name__ == "__main__":
    cpu_environment.prepare()
    # vLLM picks its platform when it is first imported.
    from lockstep.node.runtime import main
    from prefill_node.service import ROLE

    sys.exit(main(ROLE, sys.argv[1:]))
