"""What is checked of a node by itself: whether it keeps its steps uniform, and whether that can be shown."""

from collections.abc import Callable, Iterator

from lockstep.doctor.described import DECODE, PREFILL, Described
from lockstep.doctor.findings import Finding, Verdict, error, ok, warning
from lockstep.graphs import uncovered_batch
from lockstep.rpc.channel import PROTOCOL_VERSION

_VLLMS_OWN = "kv_transfer.carried.vllm_schedulers."
_SCHEDULERS = {PREFILL: _VLLMS_OWN, DECODE: "decode_node.scheduler."}

NodeCheck = Callable[[Described], Verdict]


def check_node(node: Described) -> Iterator[Finding]:
    """All findings of one node, one for each check of its role."""
    if node.description.protocol_version != PROTOCOL_VERSION or not node.description.HasField("engine"):
        yield Finding.of(node.where, "version", _other_version(node))
        return
    for name, check in (BOTH | OF_ROLE.get(node.role, {})).items():
        yield Finding.of(node.where, name, check(node))


def _other_version(node: Described) -> Verdict:
    described = node.description
    return error(
        f"speaks protocol {described.protocol_version} of Lockstep {described.lockstep_version}; this "
        f"command knows {PROTOCOL_VERSION}",
        "the same Lockstep version everywhere",
    )


def _ready(node: Described) -> Verdict:
    if node.description.ready:
        return ok("ready")
    return warning("takes no requests: it warms up, or it drains", "/readyz of its --http-port says which")


def _runner(node: Described) -> Verdict:
    runner = node.description.runner
    if runner == "V1":
        return ok("model runner V1")
    return error(f"model runner {runner}, on which nothing was run", "VLLM_USE_V2_MODEL_RUNNER=0")


def _drafts(node: Described) -> Verdict:
    tokens = node.description.num_speculative_tokens
    if not tokens:
        return ok("no speculation: rows of 1 token")
    return ok(f"{node.description.speculative_method}, K = {tokens}: rows of {node.width} tokens")


def _lease(node: Described) -> Verdict:
    engine = node.description.engine
    if node.role == DECODE:
        return ok(
            f"gives a push up after {engine.registration_deadline_s:g} s, renews prefill's lease each "
            f"{engine.kv_lease_renewal_s:g} s"
        )
    return ok(f"keeps finished blocks for {engine.kv_lease_s:g} s without a word from decode")


def _scheduler(node: Described) -> Verdict:
    name = node.description.engine.scheduler_cls
    if name.startswith(_SCHEDULERS[node.role]):
        return ok(name)
    if node.role == DECODE and name.startswith(_VLLMS_OWN):
        return warning(f"{name}, for comparison only: steps are not kept uniform", "no --scheduler stock")
    return error(f"{name} is not Lockstep's", "no scheduler of your own")


def _asynchronous(node: Described) -> Verdict:
    if node.description.engine.async_scheduling:
        return ok("asynchronous")
    return warning("each step waits for the one before", "no --no-async-scheduling")


def _arrival_padding(node: Described) -> Verdict:
    if node.description.engine.arrival_padding:
        return ok("on")
    return warning("off, for comparison only: arrivals break the full graph", "no --arrival-padding off")


def _strict(node: Described) -> Verdict:
    if node.description.engine.strict:
        return warning("a step that is not uniform ends the engine; for tests", "no --strict")
    return ok("a step that is not uniform is counted")


def _graph_mode(node: Described) -> Verdict:
    engine = node.description.engine
    if engine.full_graph_tokens:
        return ok(engine.cudagraph_mode)
    return error(
        f"{engine.cudagraph_mode or 'unknown'}: no step runs in a full graph",
        '--compilation-config \'{"cudagraph_mode": "FULL_DECODE_ONLY"}\', no --enforce-eager',
    )


def _capture_sizes(node: Described) -> Verdict:
    sizes, rows = list(node.description.engine.full_graph_tokens), _max_num_seqs(node)
    uncovered = uncovered_batch(sizes, node.width, rows)
    if not uncovered:
        return ok(f"cover every batch of 1 to {rows} requests")
    return error(
        f"the largest full graph has {max(sizes, default=0)} tokens; {uncovered} requests have "
        f"{uncovered * node.width}",
        f"a size of {rows * node.width} in cudagraph_capture_sizes, or none given",
    )


def _token_budget(node: Described) -> Verdict:
    rows, description = _max_num_seqs(node), node.description
    needed = rows * node.width
    batched = min((rank.max_num_batched_tokens for rank in description.ranks), default=0)
    if batched < needed:
        return error(
            f"{batched} tokens a step, {rows} rows need {needed}", f"--max-num-batched-tokens {needed}"
        )
    scheduled = description.engine.max_num_scheduled_tokens
    if scheduled < needed:
        return error(
            f"{scheduled} scheduled tokens, {rows} rows need {needed}", "no --max-num-scheduled-tokens"
        )
    return ok(f"{batched} tokens a step, {rows} rows need {needed}")


def _long_prefills(node: Described) -> Verdict:
    threshold = node.description.engine.long_prefill_token_threshold
    if 0 < threshold < node.width:
        return error(f"rows are clipped to {threshold} tokens", "--long-prefill-token-threshold 0")
    return ok("clips no row")


def _context_limit(node: Described) -> Verdict:
    description = node.description
    batches = 2 if description.engine.async_scheduling else 1
    margin = description.num_speculative_tokens * batches + 1
    served, own = description.served_context_limit, description.max_model_len
    if served + margin > own:
        return error(
            f"serves {served} of {own} tokens, less than {margin} below", "the same Lockstep everywhere"
        )
    return ok(f"serves {served} tokens, {own - served} below the engine's own limit")


def _kv_pool(node: Described) -> Verdict:
    description = node.description
    blocks = min((rank.num_kv_blocks for rank in description.ranks), default=0)
    # vLLM keeps one block for itself.
    tokens = max(blocks - 1, 0) * description.block_size
    if tokens < description.served_context_limit:
        return error(
            f"{tokens} tokens fit, requests may have {description.served_context_limit}",
            f"--max-model-len {tokens}, or more memory for the KV cache",
        )
    fits = tokens // max(description.served_context_limit, 1)
    return ok(f"{tokens} tokens a rank, {fits} request(s) of the full length")


def _load_failures(node: Described) -> Verdict:
    policy = node.description.engine.kv_load_failure_policy
    if policy == "fail":
        return ok("go back to prefill")
    return error(f"policy {policy}: decode would run a prefill", "no --kv-transfer-config")


def _pipeline(node: Described) -> Verdict:
    stages = node.description.engine.pipeline_parallel_size
    return ok("none") if stages == 1 else error(f"{stages} stages", "--pipeline-parallel-size 1")


def _step_records(node: Described) -> Verdict:
    if node.description.engine.records_steps:
        return ok("kept")
    return warning("none: whether steps are full graphs cannot be seen", "no --worker-cls")


def _max_num_seqs(node: Described) -> int:
    return max((int(rank.max_num_seqs) for rank in node.description.ranks), default=0)


BOTH: dict[str, NodeCheck] = {"ready": _ready, "runner": _runner, "drafts": _drafts, "lease": _lease}

OF_PREFILL: dict[str, NodeCheck] = {"scheduler": _scheduler}

OF_DECODE: dict[str, NodeCheck] = {
    "scheduler": _scheduler,
    "async scheduling": _asynchronous,
    "arrival padding": _arrival_padding,
    "strict": _strict,
    "graph mode": _graph_mode,
    "capture sizes": _capture_sizes,
    "token budget": _token_budget,
    "long prefills": _long_prefills,
    "context limit": _context_limit,
    "KV pool": _kv_pool,
    "failed loads": _load_failures,
    "pipeline": _pipeline,
    "step records": _step_records,
}

OF_ROLE = {PREFILL: OF_PREFILL, DECODE: OF_DECODE}
