"""`lockstep sim`: a prefill or decode node with simulated engines, for a look at the proxy without any."""

import sys
from typing import NoReturn

import typer

from lockstep.cli.model import resolve_model
from lockstep.cli.passthrough import PassThrough, replace_process
from lockstep.cli.plan import MODULES, Role
from lockstep.errors import ConfigError

sim_app = typer.Typer(
    no_args_is_help=True,
    help="Run a node that computes nothing: the real node process over simulated engines.\n\n"
    "It takes the flags of a real node, and --sim-... flags for the time that its steps take.",
    epilog="Examples:\n\n"
    "  lockstep sim prefill --port 51051 --http-port 51080\n\n"
    "  lockstep sim decode --port 52051 --http-port 52080 --data-parallel-size 2\n\n"
    "  lockstep proxy --prefill 127.0.0.1:51051 --decode 127.0.0.1:52051 --host 127.0.0.1",
)


@sim_app.command(cls=PassThrough, add_help_option=False)
def prefill(ctx: typer.Context) -> None:
    """Run a simulated prefill node: lockstep sim prefill [MODEL], the flags of `lockstep prefill`."""
    _become(Role.PREFILL, ctx.args)


@sim_app.command(cls=PassThrough, add_help_option=False)
def decode(ctx: typer.Context) -> None:
    """Run a simulated decode node: lockstep sim decode [MODEL], the flags of `lockstep decode`."""
    _become(Role.DECODE, ctx.args)


def _become(role: Role, args: list[str]) -> NoReturn:
    """With models/pico of the checkout where no model is named: only its tokenizer and shape are used."""
    try:
        named = bool(args) and not args[0].startswith("-")
        model = [] if named or {"-h", "--help"} & set(args) else [resolve_model(None, None).path]
    except ConfigError as error:
        typer.echo(f"lockstep sim {role}: {error}", err=True)
        raise typer.Exit(2) from None
    replace_process([sys.executable, "-P", "-m", f"{MODULES[role]}.sim", *model, *args])
