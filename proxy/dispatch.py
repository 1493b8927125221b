"""Sends the two legs of an attempt to their ranks and takes them back: sessions, loads, live leg ids."""

from dataclasses import replace

from kv_transfer.params import PrefillPeer, new_token
from lockstep.errors import NoDecodeNodeError, UnavailableError
from lockstep.rpc import codec
from proxy import legs
from proxy.attempt import Attempt, Phase
from proxy.cluster import Cluster
from proxy.flight import Flight
from proxy.hand_off import held_back_because
from proxy.metrics import AttemptReason, ProxyMetrics
from proxy.nodes import CompatibilityKey, Node, Role
from proxy.retries.breaker import Breakers, Unit, unit_of
from proxy.retries.limits import RetryLimits
from proxy.routing import Asked, RankLoad, Ranks
from proxy.routing.prefix_hashes import PrefixHashes
from proxy.session import NodeSession

_FAILURES = frozenset(
    {
        AttemptReason.KV_LOAD_FAILED,
        AttemptReason.LOCAL_PREFILL,
        AttemptReason.REFUSED,
        AttemptReason.PREFILL_FAILED,
    }
)


class Dispatcher:
    """Knows which leg ids are live. What a node says of any other id is of an attempt that is over."""

    def __init__(
        self,
        cluster: Cluster,
        ranks: Ranks,
        metrics: ProxyMetrics,
        *,
        hand_off: bool,
        retry_limits: RetryLimits | None = None,
    ) -> None:
        self._cluster = cluster
        self._breakers = Breakers(retry_limits or RetryLimits(), metrics.breakers_open_now)
        self._ranks = ranks
        self._metrics = metrics
        self._hand_off = hand_off
        self._sessions: dict[str, NodeSession] = {}
        self._by_leg: dict[str, Flight] = {}

    def opened(self, session: NodeSession, node: Node) -> None:
        """A session takes legs from now on."""
        self._sessions[node.address] = session
        self._breakers.restarted(node)

    def closed(self, address: str) -> None:
        """The session ended; the node aborts by itself what came in by it."""
        self._sessions.pop(address, None)

    def forget(self, address: str) -> None:
        """Nothing is left of the address."""
        self._breakers.forget(address)

    def session(self, address: str) -> NodeSession | None:
        """The open session with a node, if there is one."""
        return self._sessions.get(address)

    def flight(self, leg_id: str) -> Flight | None:
        """The choice whose live attempt has this id."""
        return self._by_leg.get(leg_id)

    def send(self, flight: Flight) -> bool:
        """Start both legs of the next attempt, or return False while it has to wait for one of its ranks.

        Raises UnavailableError without a live rank on either side, InvalidRequestError for a decode rank that
        the client named and that does not exist.
        """
        asked = self._asked(flight)
        pair = self._pick(flight, asked)
        if pair is not None:
            self._start(flight, pair, asked)
        return pair is not None

    def hedge(self, flight: Flight, first: Attempt) -> bool:
        """Start both legs of a second attempt beside the first, if another prefill rank has room for it."""
        asked = self._asked(flight)
        avoid = {first.prefill.key: first.number, first.decode.key: first.number}
        asked = replace(asked, failed_at={**asked.failed_at, **avoid}, session=None)
        try:
            pair = self._pick(flight, asked)
        except UnavailableError:
            return False
        if pair is None or pair[0] is first.prefill:
            return False
        self._start(flight, pair, asked, is_hedge=True)
        return True

    def _start(
        self, flight: Flight, pair: tuple[RankLoad, RankLoad], asked: Asked, *, is_hedge: bool = False
    ) -> None:
        prefill, decode = pair
        uncached_tokens = asked.uncached_tokens(prefill)
        token = new_token()
        peer = PrefillPeer(
            engine_id=prefill.rank.engine_id,
            side_channel_host=prefill.rank.side_channel_host,
            side_channel_port=prefill.rank.side_channel_port,
            tp_size=prefill.rank.tensor_parallel_size,
        )
        carried = flight.output_token_ids
        held_back = held_back_because(
            flight.request.sampling_params,
            decode.node.description.engine.scheduler_cls,
            enabled=self._hand_off,
        )
        hand_off = held_back is None
        attempt = flight.begin(prefill, decode, hand_off=hand_off, is_hedge=is_hedge)
        attempt.uncached_tokens = uncached_tokens
        self._breakers.sent((prefill.node, decode.node), attempt.leg_id)
        self._metrics.routed(uncached_tokens, attempt.tokens - uncached_tokens)
        if held_back is not None:
            self._metrics.first_token_of(held_back)
        self._by_leg[attempt.leg_id] = flight
        self._metrics.attempted(attempt.reason)
        for load, tokens, leg in (
            (
                prefill,
                uncached_tokens,
                legs.prefill_leg(flight.request, attempt.leg_id, token, carried, hand_off=hand_off),
            ),
            (
                decode,
                attempt.tokens,
                legs.decode_leg(flight.request, attempt.leg_id, peer, token, carried, hand_off=hand_off),
            ),
        ):
            attempt.begun[load.node.role] = load.begin(tokens)
            if flight.spans is not None and not is_hedge:
                leg = flight.spans.leg(load.node.role, leg)
            self._sessions[load.node.address].add(
                attempt.leg_id, load.rank.local_rank, codec.encode_request(leg)
            )

    def came_further(self, attempt: Attempt) -> None:
        """Prefill has computed the prompt, or decode has its KV; called with each output from then on."""
        arrived = attempt.phase is Phase.STREAMING
        if arrived and (attempt.prefill_holds or not attempt.prefill_released):
            self._breakers.worked((attempt.prefill.node, attempt.decode.node))
        self.release_prefill(attempt)

    def release_prefill(self, attempt: Attempt) -> None:
        """The prompt is not outstanding any more; the prefill rank holds it until its KV has arrived."""
        if not attempt.prefill_released:
            attempt.prefill_released = attempt.prefill_holds = True
            attempt.prefill.end(attempt.uncached_tokens, attempt.begun["prefill"])
            attempt.prefill.hold(attempt.tokens)
        if attempt.phase is Phase.STREAMING:
            self._let_go(attempt)

    def _let_go(self, attempt: Attempt) -> None:
        if attempt.prefill_holds:
            attempt.prefill_holds = False
            attempt.prefill.let_go(attempt.tokens)

    def take_back(self, flight: Flight, abort: bool) -> None:
        """The live attempt, if there is one, is over; with `abort`, both nodes are told.

        Prefill is told even after its leg ended: it may still hold the blocks for a push.
        """
        if flight.hedge is not None:
            self._leave(flight, flight.hedge)
        attempt = flight.attempt
        if attempt is not None:
            flight.attempt_over()
            self._withdraw(attempt, abort)

    def decide(self, flight: Flight) -> None:
        """Of two live attempts one goes, once it has failed or the other one has computed the prompt."""
        first, hedge = flight.attempt, flight.hedge
        if first is None or hedge is None:
            return
        if hedge.end is not None or (first.end is None and first.phase is not Phase.DISPATCHED):
            self._metrics.hedged(won=False)
            self._leave(flight, hedge)
        elif first.end is not None or hedge.phase is not Phase.DISPATCHED:
            self._metrics.hedged(won=True)
            self._leave(flight, first)

    def _leave(self, flight: Flight, loser: Attempt) -> None:
        flight.leave(loser)
        self._withdraw(loser, abort=True)

    def _withdraw(self, attempt: Attempt, abort: bool) -> None:
        del self._by_leg[attempt.leg_id]
        self.release_prefill(attempt)
        self._let_go(attempt)
        attempt.decode.end(attempt.tokens, attempt.begun["decode"])
        self._judge(attempt)
        if abort:
            for load in (attempt.prefill, attempt.decode):
                session = self._sessions.get(load.node.address)
                if session is not None:
                    session.abort([attempt.leg_id])

    def _judge(self, attempt: Attempt) -> None:
        """Blame nodes for what failed there. One that is lost is away; what it asked for is no failure."""
        if attempt.end is not None and attempt.end.reason in _FAILURES:
            failed = [attempt.load(role).node for role in attempt.end.failed]
            for node in failed:
                partner = next((other for other in failed if other is not node), None)
                self._breakers.failed(node, partner)
        self._breakers.over((attempt.prefill.node, attempt.decode.node), attempt.leg_id)

    def _usable(self, role: Role, flight: Flight, key: CompatibilityKey | None = None) -> list[Node]:
        nodes = self._cluster.live(role, flight.outlet.served, key)
        addresses = {address for address, _ in flight.failed_at}
        failed: frozenset[Unit] = frozenset(unit_of(node) for node in nodes if node.address in addresses)
        return self._breakers.usable(nodes, failed)

    def _pick(self, flight: Flight, asked: Asked) -> tuple[RankLoad, RankLoad] | None:
        """Two ranks of nodes of one key; None while no prefill rank is below its window, or no decode rank
        takes more.
        """
        served, wanted = flight.outlet.served, flight.request.data_parallel_rank
        if wanted is not None:
            known, live = self._cluster.known("decode", served), self._cluster.live("decode", served)
            decode = self._ranks.decode_at(known, live, wanted)
            prefill = self._ranks.pick_prefill(self._usable("prefill", flight, decode.node.key), asked)
            return (prefill, decode) if prefill else None
        prefill = self._ranks.pick_prefill(self._usable("prefill", flight), asked)
        if prefill is None:
            if not self._cluster.live("decode", served):
                raise NoDecodeNodeError("No decode node is ready.")
            return None
        chosen = self._ranks.pick_decode(self._usable("decode", flight, prefill.node.key), asked)
        return (prefill, chosen) if chosen else None

    def _asked(self, flight: Flight) -> Asked:
        """The same one until the attempt is sent, so that blocks are hashed once however long it waits."""
        if flight.asked is None:
            prefix = None
            if self._ranks.reads_prefixes and flight.reads_prefix_cache:
                prompt = flight.request.prompt_token_ids or []
                prefix = PrefixHashes([*prompt, *flight.output_token_ids], flight.request.cache_salt)
            flight.asked = Asked(flight.tokens, prefix, flight.failed_at, flight.session)
        return flight.asked
