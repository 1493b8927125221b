"""Entry point of one worker: a whole proxy, in the place that its supervisor gave it."""

import sys

from proxy.__main__ import main
from proxy.workers.place import Place

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], Place.parse(sys.argv[1])))
