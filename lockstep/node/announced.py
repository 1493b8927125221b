"""The decode engines that proxies have announced: prefill shakes hands with no other."""

from collections.abc import Iterable

from lockstep.node.engine_cores import EngineCores

MAX_ENGINES = 4096
"""Each start of a decode node brings new ones; the oldest are forgotten first."""


class AnnouncedEngines:
    """Those of all sessions of a prefill node.

    They outlive their session: decode asks for the blocks of a request back after its proxy has gone, too.
    """

    def __init__(self) -> None:
        self._engine_ids: dict[str, None] = {}

    async def limit(self, engine: EngineCores) -> None:
        """From now on the engine cores shake hands with announced engines only."""
        await engine.announce(list(self._engine_ids))

    async def add(self, engine: EngineCores, engine_ids: Iterable[str]) -> None:
        """Returns once the engine cores know of them, so that what a proxy sends next may need them.

        Raises EngineDeadError, TimeoutError.
        """
        new = [engine_id for engine_id in engine_ids if engine_id not in self._engine_ids]
        if not new:
            return
        known = [*self._engine_ids, *new][-MAX_ENGINES:]
        await engine.announce(known)
        self._engine_ids = dict.fromkeys(known)
