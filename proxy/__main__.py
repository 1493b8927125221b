"""Entry point of `lockstep proxy`: reads the command line and runs the service."""

import logging
import os
import sys

import uvloop

from lockstep import logs
from lockstep.errors import ConfigError, UnavailableError
from proxy import arguments, server
from proxy.security import exposed, key_source
from proxy.workers.place import Place
from proxy.workers.start import become_supervisor

logger = logging.getLogger("proxy")


def main(argv: list[str], place: Place | None = None) -> int:
    """Return the exit status: 0 after an orderly stop, 1 without a start, 2 for a bad command line.

    `place`: that of a worker. Without one, and with --workers, this process becomes their supervisor.
    """
    environment = dict(os.environ)  # vLLM's key is taken out of it
    try:
        config, args = arguments.load(argv)
    except ConfigError as error:
        sys.stderr.write(f"lockstep proxy: {error}\n")
        return 2
    logs.configure(config.log_format, config.log_level, f"proxy/{place.number}" if place else "proxy")
    if place is None or place.number == 1:
        logger.info("configuration: %s", config.masked())
    try:
        keys = key_source.take(config, args)
        exposed.check(config, args, keys)
    except ConfigError as error:
        sys.stderr.write(f"lockstep proxy: {error}\n")
        return 2
    try:
        if place is None and config.workers > 1:
            sock = server.bind(args)
            log = config.log_format, config.log_level
            become_supervisor(sock, config.workers, config.drain_timeout_s, log, argv, environment)
        uvloop.run(server.serve(config, args, keys, place))
    except (ConfigError, UnavailableError) as error:
        logger.error("cannot start: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
