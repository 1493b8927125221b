"""The `lockstep` command line: what it can do, its options and their help."""

import importlib.metadata
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lockstep.cli.batch import BatchCommand, run_batch
from lockstep.cli.devices import DECODE_RANKS
from lockstep.cli.machine import Device
from lockstep.cli.passthrough import PassThrough, become
from lockstep.cli.plan import Role, UpOptions
from lockstep.cli.sim import sim_app
from lockstep.cli.status import console, fetch, show
from lockstep.cli.up import UpCommand, run_up
from lockstep.errors import ConfigError, LockstepError

PROXY_URL = "http://127.0.0.1:8000"

KeyFile = Annotated[
    Path | None,
    typer.Option(
        envvar="LOCKSTEP_KEY_FILE", help="File with the API key of an admin, where the proxy asks for keys."
    ),
]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Serve a language model with prefill and decode on separate workers.\n\n"
    "[bold]lockstep up[/bold] runs a whole stack on this machine, for a first look and for development; "
    "[bold]prefill[/bold], [bold]decode[/bold] and [bold]proxy[/bold] each run one process of a deployment.",
    epilog="Examples:\n\n"
    "  lockstep up                       the pico model, no GPU needed\n\n"
    "  lockstep up MODEL --port 9000     a model of yours, on another port\n\n"
    "  lockstep prefill --help           all flags of a prefill node",
)


@app.command(
    epilog="Examples:\n\n"
    "  lockstep up\n\n"
    "  lockstep up smollm2               sensible English; fetched at first use, 93 MB\n\n"
    "  lockstep up /models/glm --served-model-name glm --decode-ranks 4\n\n"
    "  lockstep up /models/glm --prefill-devices 0 --decode-devices 1,2\n\n"
    "  lockstep up --decode-arg=--max-num-seqs=16 --prefill-arg=--max-num-batched-tokens=1024"
)
def up(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model directory or hub id, or smollm2; models/pico of the checkout if not given."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the OpenAI endpoint.")] = 8000,
    host: Annotated[
        str,
        typer.Option(
            help="Address the OpenAI endpoint listens on; others than 127.0.0.1 want API keys "
            "(LOCKSTEP_API_KEY_FILE) or --proxy-arg=--insecure-bind."
        ),
    ] = "127.0.0.1",
    served_model_name: Annotated[
        str | None, typer.Option(help="Name clients ask for; the directory's name if not given.")
    ] = None,
    decode_ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Data-parallel ranks of the decode node; one for each decode GPU, else 2, if not given.",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Draft tokens a step, from the model's MTP layer; if not given, 2 for a directory with one, "
            "else 0.",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="vLLM's --dtype; float32 on a CPU, vLLM's choice elsewhere.")
    ] = None,
    device: Annotated[Device, typer.Option(help="What the engines run on.")] = Device.AUTO,
    prefill_devices: Annotated[
        str | None,
        typer.Option(
            metavar="GPU[,GPU...]",
            help="GPUs of the prefill node, tensor parallel over them; one if not given.",
        ),
    ] = None,
    decode_devices: Annotated[
        str | None,
        typer.Option(
            metavar="GPU[,GPU...]",
            help="GPUs of the decode node, shared out among its ranks; one a rank if not given.",
        ),
    ] = None,
    state_dir: Annotated[
        Path, typer.Option(envvar="LOCKSTEP_STATE_DIR", help="Where logs and state.json go.")
    ] = Path(".lockstep"),
    startup_timeout_s: Annotated[
        float, typer.Option(min=1.0, help="Seconds each process has to become ready.")
    ] = 300.0,
    prefill_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="ARG", help="One more argument for the prefill node. Repeatable."),
    ] = None,
    decode_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="ARG", help="One more argument for the decode node. Repeatable."),
    ] = None,
    proxy_arg: Annotated[
        list[str] | None, typer.Option(metavar="ARG", help="One more argument for the proxy. Repeatable.")
    ] = None,
) -> None:
    """Run one prefill node, one decode node and the proxy on this machine, until Ctrl-C.

    A process that dies is started again. What they print is in STATE_DIR/logs, one file each.
    """
    options = UpOptions(
        host=host,
        port=port,
        decode_ranks=DECODE_RANKS,
        num_speculative_tokens=0,
        dtype=dtype,
        prefill_args=tuple(prefill_arg or ()),
        decode_args=tuple(decode_arg or ()),
        proxy_args=tuple(proxy_arg or ()),
    )
    command = UpCommand(
        model=model,
        served_model_name=served_model_name,
        device=device,
        prefill_devices=prefill_devices,
        decode_devices=decode_devices,
        decode_ranks=decode_ranks,
        num_speculative_tokens=num_speculative_tokens,
        state_dir=state_dir,
        startup_timeout_s=startup_timeout_s,
        options=options,
    )
    try:
        code = run_up(command, Console())
    except ConfigError as error:
        Console(stderr=True).print(
            f"lockstep up: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True
        )
        code = 2
    raise typer.Exit(code)


@app.command(cls=PassThrough, add_help_option=False)
def prefill(ctx: typer.Context) -> None:
    """Run a prefill node: lockstep prefill MODEL, our flags and vLLM's engine flags."""
    become(Role.PREFILL, ctx.args)


@app.command(cls=PassThrough, add_help_option=False)
def decode(ctx: typer.Context) -> None:
    """Run a decode node: lockstep decode MODEL, our flags and vLLM's engine flags."""
    become(Role.DECODE, ctx.args)


@app.command(cls=PassThrough, add_help_option=False)
def proxy(ctx: typer.Context) -> None:
    """Run the proxy: the OpenAI endpoint in front of prefill and decode nodes."""
    become(Role.PROXY, ctx.args)


app.add_typer(sim_app, name="sim")


@app.command(
    epilog="Examples:\n\n  lockstep status\n\n  lockstep status --url http://proxy:8000 --json | jq .nodes"
)
def status(
    url: Annotated[str, typer.Option(help="Where the proxy listens.")] = PROXY_URL,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the proxy's answer as it is; docs/metrics.md describes it.")
    ] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds the proxy has to answer.")] = 10.0,
    key_file: KeyFile = None,
) -> None:
    """Show a running proxy and its nodes: ranks, load, steps by graph mode and cause, KV moved."""
    try:
        body = fetch(url, timeout_s, key_file)
        if as_json:
            typer.echo(body)
        else:
            show(body, url, console())
    except LockstepError as error:
        typer.echo(f"lockstep status: {error}", err=True)
        raise typer.Exit(1) from None


@app.command(
    epilog="Examples:\n\n  lockstep doctor\n\n"
    "  lockstep doctor --node 10.0.0.1:50051 --node 10.0.0.2:50051    without a proxy\n\n"
    "  lockstep doctor --json | jq '.findings[] | select(.level != \"ok\")'"
)
def doctor(
    url: Annotated[
        str | None, typer.Option(help=f"Where the proxy listens; {PROXY_URL} unless --node is given.")
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="gRPC address of a node, when no proxy is up. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds each of them has to answer.")] = 10.0,
    key_file: KeyFile = None,
) -> None:
    """Check a running cluster: can its decode ranks stay in one full graph, do its nodes fit each other.

    Every finding that is not well names the flag and a value that works. Exit code 1 if one is an error.
    """
    # gRPC is slow to import, and no other command needs it here.
    from lockstep.cli.doctor import examine_cluster
    from lockstep.doctor.report import as_document, is_healthy, tables

    try:
        findings = examine_cluster(url or ("" if node else PROXY_URL), node or [], timeout_s, key_file)
    except LockstepError as error:
        typer.echo(f"lockstep doctor: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(as_document(findings), indent=2))
    else:
        for part in tables(findings):
            console().print(part, highlight=False)
    raise typer.Exit(0 if is_healthy(findings) else 1)


@app.command(
    epilog="Examples:\n\n  lockstep drain 10.0.0.1:50051\n\n"
    "  lockstep drain 10.0.0.1:50051 10.0.0.2:50051 --timeout-s 300    both hosts of a group"
)
def drain(
    node: Annotated[list[str], typer.Argument(metavar="NODE...", help="gRPC address of a node, HOST:PORT.")],
    timeout_s: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds running requests get; the node's --drain-timeout-s if not given."),
    ] = None,
    move: Annotated[
        bool, typer.Option("--move", help="Have running requests go on on other nodes at once.")
    ] = False,
) -> None:
    """Drain nodes: they take nothing new, let running requests end, and exit.

    What has not ended in time goes on on other nodes. Exit code 1 if a node did not drain.
    """
    # gRPC is slow to import.
    from lockstep.cli.drain import drain_nodes

    try:
        drained = drain_nodes(node, timeout_s, typer.echo, move=move)
    except LockstepError as error:
        typer.echo(f"lockstep drain: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(0 if drained else 1)


@app.command(
    epilog="Examples:\n\n  lockstep batch requests.jsonl\n\n"
    "  lockstep batch requests.jsonl -o answers.jsonl --url http://proxy:8000 --concurrency 128\n\n"
    "  lockstep batch requests.jsonl --retry-failed      once more for those in the error file"
)
def batch(
    requests: Annotated[
        Path,
        typer.Argument(help="OpenAI's batch input: JSONL of custom_id, method, url and body."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Answers; REQUESTS.output.jsonl if not given.")
    ] = None,
    errors: Annotated[
        Path | None,
        typer.Option("--errors", "-e", help="Requests that failed; REQUESTS.errors.jsonl if not given."),
    ] = None,
    url: Annotated[str, typer.Option(help="Where the proxy listens.")] = PROXY_URL,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests that run at once.")] = 32,
    max_tries: Annotated[
        int, typer.Option(min=1, help="How often a request is sent that may work later (429, 503, ...).")
    ] = 8,
    timeout_s: Annotated[float, typer.Option(min=1.0, help="Seconds an answer may take.")] = 660.0,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Empty the error file and ask its requests again.")
    ] = False,
    key_file: Annotated[
        Path | None,
        typer.Option(
            envvar="LOCKSTEP_KEY_FILE", help="File with an API key; OPENAI_API_KEY is read if not given."
        ),
    ] = None,
) -> None:
    """Run an OpenAI batch file against the endpoint, and go on where an earlier run ended.

    Exit code 1 if a request failed, 2 for a wrong file or key, 130 if it was stopped.
    """
    command = BatchCommand(
        requests=requests,
        output=output or requests.with_suffix(".output.jsonl"),
        errors=errors or requests.with_suffix(".errors.jsonl"),
        url=url,
        concurrency=concurrency,
        max_tries=max_tries,
        timeout_s=timeout_s,
        again_failed=retry_failed,
        key_file=key_file,
    )
    try:
        code = run_batch(command, Console(stderr=True))
    except LockstepError as error:
        typer.echo(f"lockstep batch: {error}", err=True)
        code = 2 if isinstance(error, ConfigError) else 1
    raise typer.Exit(code)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"lockstep {importlib.metadata.version('lockstep')}")


def main() -> None:
    """Entry point of the `lockstep` command."""
    app(prog_name="lockstep")
