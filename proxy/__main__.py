"""Entry point of `lockstep proxy`: reads the command line and runs the service."""

import logging
import sys

import uvloop

from lockstep import logs
from lockstep.errors import ConfigError, UnavailableError
from proxy import arguments, server
from proxy.security import exposed, key_source

logger = logging.getLogger("proxy")


def main(argv: list[str]) -> int:
    """Return the exit status: 0 after an orderly stop, 1 without a start, 2 for a bad command line."""
    try:
        config, args = arguments.load(argv)
    except ConfigError as error:
        sys.stderr.write(f"lockstep proxy: {error}\n")
        return 2
    logs.configure(config.log_format, config.log_level, "proxy")
    logger.info("configuration: %s", config.masked())
    try:
        keys = key_source.take(config, args)
        exposed.check(config, args, keys)
    except ConfigError as error:
        sys.stderr.write(f"lockstep proxy: {error}\n")
        return 2
    try:
        uvloop.run(server.serve(config, args, keys))
    except (ConfigError, UnavailableError) as error:
        logger.error("cannot start: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
