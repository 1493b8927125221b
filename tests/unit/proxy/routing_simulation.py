"""A cluster without clocks, wires or engines, driven by events: the real ranks, queue and policies choose.

Prefill computes one prompt after another, at so many tokens a second, and keeps what it computed in a prefix
cache of which the oldest is evicted; decode groups step all their ranks together, in a time that goes with
the graph of the fullest one. What nodes report comes when a real one reports it: loads with steps, blocks
when they are stored.
"""

import heapq
import itertools
import random
import struct
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from unit.proxy.nodes_for_tests import node

from lockstep.rpc.generated import lockstep_pb2 as pb
from proxy.config import PolicyName
from proxy.nodes import Node
from proxy.routing import Asked, RankLoad, Ranks
from proxy.routing.policies import policy
from proxy.routing.prefix_hashes import PrefixHashes
from proxy.window_queue import WindowQueue

BLOCK_TOKENS = 64
K = 1
ROWS = 32
PREFILL_TOKENS_A_SECOND = 8000.0
CACHED_BLOCKS = 160
STEP_S, STEP_S_PER_TOKEN = 0.010, 0.0006
TOKENS_A_STEP = 1.6
HASHES = {"block_size": BLOCK_TOKENS, "hash_algorithm": "sha256", "hash_seed": "s"}


@dataclass(eq=False)
class Request:
    arrived_s: float
    prompt: list[int]
    answer_tokens: float
    asked: Asked = field(init=False)
    prefill: RankLoad | None = None
    decode: RankLoad | None = None
    uncached_tokens: int = 0
    begun: tuple[int, int] = (0, 0)
    ttft_s: float = 0.0

    def __post_init__(self) -> None:
        self.asked = Asked(len(self.prompt), PrefixHashes(self.prompt))


@dataclass
class Prefill:
    """One rank: what waits, what it has, and the number of its last event."""

    node: Node
    queue: deque[Request] = field(default_factory=deque)
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    number: int = 0


@dataclass
class Group:
    """One decode group, of one node."""

    node: Node
    running: list[list[Request]]
    waiting: list[deque[Request]]
    stepping: bool = False


@dataclass
class Outcome:
    """What a policy came to."""

    ttft_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    row_tokens: int = 0
    padded_tokens: int = 0

    @property
    def ttft_p99_s(self) -> float:
        return sorted(self.ttft_s)[int(0.99 * len(self.ttft_s))]

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def imbalance(self) -> float:
        """Tokens of graphs that no row filled, for each that one did."""
        return self.padded_tokens / self.row_tokens - 1


class Simulation:
    """Runs once, to the end of the last request."""

    def __init__(
        self, name: PolicyName, num_prefill: int = 4, num_groups: int = 2, num_ranks: int = 2
    ) -> None:
        self.outcome = Outcome()
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ranks = Ranks(4096, policy(name))
        self._queue: WindowQueue[Request] = WindowQueue(self._send, _never)
        self._prefill = {f"p{i}": Prefill(node("prefill", f"p{i}", **HASHES)) for i in range(num_prefill)}
        self._groups = {
            f"d{i}": Group(
                _decode_node(f"d{i}", num_ranks),
                [[] for _ in range(num_ranks)],
                [deque() for _ in range(num_ranks)],
            )
            for i in range(num_groups)
        }
        for each in (*self._prefill.values(), *self._groups.values()):
            self._ranks.add(each.node)

    def run(self, requests: list[Request]) -> Outcome:
        for request in requests:
            self._at(request.arrived_s, lambda request=request: self._queue.put(request))  # type: ignore[misc]
        while self._events:
            self._now_s, _, happen = heapq.heappop(self._events)
            happen()
            self._queue.pump()
        assert len(self.outcome.ttft_s) == len(requests)
        return self.outcome

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happen))

    def _send(self, request: Request) -> bool:
        """As the dispatcher does."""
        prefill = self._ranks.pick_prefill([p.node for p in self._prefill.values()], request.asked)
        if prefill is None:
            return False
        decode = self._ranks.pick_decode([g.node for g in self._groups.values()], request.asked)
        if decode is None:
            return False
        request.prefill, request.decode = prefill, decode
        request.uncached_tokens = request.asked.uncached_tokens(prefill)
        request.begun = prefill.begin(request.uncached_tokens), decode.begin(len(request.prompt))
        at = self._prefill[prefill.node.address]
        at.queue.append(request)
        if len(at.queue) == 1:
            self._compute(at)
        return True

    def _compute(self, at: Prefill) -> None:
        request = at.queue[0]
        keys = _keys(request.prompt)
        cached = next((i for i, key in enumerate(keys) if key not in at.cache), len(keys)) * BLOCK_TOKENS
        self.outcome.cached_tokens += cached
        self.outcome.prompt_tokens += len(request.prompt)
        took_s = (len(request.prompt) - cached) / PREFILL_TOKENS_A_SECOND
        self._store(at, keys)
        self._at(self._now_s + took_s, lambda: self._computed(at, request))

    def _store(self, at: Prefill, keys: list[int]) -> None:
        stored = [key for key in keys if key not in at.cache]
        for key in reversed(keys):  # what is at the end of a prompt goes first
            at.cache[key] = None
            at.cache.move_to_end(key)
        removed = [at.cache.popitem(last=False)[0] for _ in range(len(at.cache) - CACHED_BLOCKS)]
        at.number += 1
        blocks = pb.KVBlocks(
            number=at.number,
            snapshot=at.number == 1,
            stored=struct.pack(f">{len(stored)}Q", *stored),
            removed=struct.pack(f">{len(removed)}Q", *removed),
        )
        assert self._ranks.kv_blocks(at.node.address, blocks)

    def _computed(self, at: Prefill, request: Request) -> None:
        """The first token is handed over; what follows is decode's."""
        at.queue.popleft()
        assert request.prefill is not None
        assert request.decode is not None
        request.prefill.end(request.uncached_tokens, request.begun[0])
        self.outcome.ttft_s.append(self._now_s - request.arrived_s)
        group = self._groups[request.decode.node.address]
        group.waiting[request.decode.rank.local_rank].append(request)
        if not group.stepping:
            self._step(group)
        if at.queue:
            self._compute(at)

    def _step(self, group: Group) -> None:
        loads = self._ranks.of(group.node.address)
        for running, waiting in zip(group.running, group.waiting, strict=True):
            while waiting and len(running) < ROWS:
                running.append(waiting.popleft())
        group.stepping = any(group.running)
        if not group.stepping:
            return
        graph = max(loads[0].shape.padded_tokens(len(running)) for running in group.running)
        self.outcome.padded_tokens += graph * len(group.running)
        self.outcome.row_tokens += (1 + K) * sum(len(running) for running in group.running)
        self._at(self._now_s + STEP_S + STEP_S_PER_TOKEN * graph, lambda: self._stepped(group))

    def _stepped(self, group: Group) -> None:
        for local_rank, running in enumerate(group.running):
            for request in running:
                request.answer_tokens -= TOKENS_A_STEP
                if request.answer_tokens <= 0:
                    assert request.decode is not None
                    request.decode.end(len(request.prompt), request.begun[1])
            running[:] = [request for request in running if request.answer_tokens > 0]
            waiting = group.waiting[local_rank]
            # As a node's report: requests that wait for their KV are on the rank too.
            coming = self._ranks.of(group.node.address)[local_rank].in_flight - len(running)
            self._ranks.report(group.node.address, local_rank, len(running), max(coming, len(waiting)))
        self._step(group)


def workload(seed: int, num_requests: int = 500, requests_a_second: float = 40.0) -> list[Request]:
    """Conversations: each turn is the one before it and more; answers of very different lengths."""
    rng = random.Random(seed)
    conversations: list[list[int]] = []
    requests, now_s = [], 0.0
    for _ in range(num_requests):
        now_s += rng.expovariate(requests_a_second)
        if conversations and rng.random() < 0.8:
            turn = rng.choice(conversations[-24:])
        else:
            turn = []
            conversations.append(turn)
        turn += [rng.randrange(30_000) for _ in range(rng.randrange(128, 640))]
        requests.append(Request(now_s, list(turn), min(600.0, rng.lognormvariate(3.6, 1.0))))
    return requests


def _keys(prompt: list[int]) -> list[int]:
    chain = PrefixHashes(prompt)._chain(node("prefill", "p", **HASHES).key)
    return [chain.key(index) for index in range(chain.length)]


def _decode_node(address: str, num_ranks: int) -> Node:
    ranks = [
        pb.RankDescription(
            global_rank=rank, local_rank=rank, max_num_seqs=ROWS, max_num_batched_tokens=ROWS * (1 + K)
        )
        for rank in range(num_ranks)
    ]
    graphs = [(1 + K) * rows for rows in (1, 2, 4, 8, 16, ROWS)]
    return node(
        "decode",
        address,
        ranks=ranks,
        engine=pb.EngineSettings(full_graph_tokens=graphs),
        num_speculative_tokens=K,
        **HASHES,
    )


def _never(request: Request, error: Exception) -> None:
    raise AssertionError from error
