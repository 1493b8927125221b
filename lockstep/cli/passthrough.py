"""The commands that become a service: all their arguments go on unchanged."""

import os
import sys
from typing import Any, NoReturn

from typer.core import TyperCommand

from lockstep.cli.plan import Role, service_argv


class PassThrough(TyperCommand):
    """Parses nothing, not even --help and --: everything is left in `ctx.args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the arguments as they are; called by the command line parser in place of its own work."""
        ctx.args = list(args)
        return list(args)


def become(role: Role, args: list[str]) -> NoReturn:
    """Replace this process by the service, so that signals and the exit code are the service's own."""
    replace_process([*service_argv(role), *args])


def replace_process(argv: list[str]) -> NoReturn:
    """`argv` begins with the path of the program."""
    sys.stdout.flush()
    os.execv(argv[0], argv)
