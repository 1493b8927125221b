"""The hand-off in the connector's workers: what the runner gives on prefill, and what arrives on decode."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.logger import init_logger

from kv_transfer.device import copy_to_host, record_event
from kv_transfer.handoff import codec
from kv_transfer.writer import PushWriter

logger = init_logger(__name__)

BeginTelling = Callable[[list[str]], Callable[[list[int]], None]]
"""Called within the step, on the engine's thread, with the ids of requests whose first token was sampled.

What it returns takes these tokens, in the same order, on any thread.
"""


class HandOffWorker:
    """A base of `LockstepPushWorker`, whose writer and chunks it uses; called on the engine's thread."""

    device_type: str
    _writer: PushWriter
    _push_writer_wake: threading.Event

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first_tokens: dict[str, str] = {}  # request_id: token, of the step under way
        self._payloads: dict[str, bytes] = {}  # of receives that ended, for the scheduler
        self._begin_telling: BeginTelling | None = None

    def flush_chunks(self) -> None:
        """Hand the chunks of the last step over."""
        raise NotImplementedError

    def first_tokens_awaited(self) -> dict[str, str]:
        """The requests whose first token the step under way samples and that promise a hand-off."""
        return self._first_tokens

    def on_first_tokens(self, begin_telling: BeginTelling) -> None:
        """Have first tokens told as soon as the device has them, which is before their drafts are made."""
        self._begin_telling = begin_telling

    def sampled(self, request_ids: list[str], token_ids: torch.Tensor) -> None:
        """The first tokens of all that are awaited: [len(request_ids)], on the device."""
        if self._begin_telling is None:
            return
        tell, copied = self._begin_telling(request_ids), copy_to_host(token_ids)
        self.once_computed(lambda: tell(copied.tolist()))

    def once_computed(self, apply: Callable[[], None]) -> None:
        """Run it when the device has done what was launched so far; not on this thread, except on CPU."""
        with self._writer.lock:
            self._writer.steps.put(apply, record_event(self.device_type))
        self._push_writer_wake.set()

    def hand_over(self, request_ids: list[str], token_ids: torch.Tensor) -> None:
        """What was sampled and drafted for them: [len(request_ids), 1 + K], on the device.

        It is copied behind the work that makes it, and read by the writer thread once that is done. The last
        chunks follow, which waited for it: the notice of completion may follow them at once.
        """
        tokens, self._first_tokens = self._first_tokens, {}
        copied = copy_to_host(token_ids)
        rows = [(request_id, tokens[request_id]) for request_id in request_ids]
        self.once_computed(partial(self._note, rows, copied))
        self.flush_chunks()

    def take_payloads(self) -> dict[str, bytes]:
        """Decode: what came with the KV of receives that ended since the last call."""
        payloads, self._payloads = self._payloads, {}
        return payloads

    def _note(self, rows: list[tuple[str, str]], token_ids: torch.Tensor) -> None:
        now = time.monotonic()
        for (request_id, token), (first, *drafts) in zip(rows, token_ids.tolist(), strict=True):
            try:
                payload = codec.encode(first, drafts)
            except codec.HandOffError as error:
                # Decode fails the receive: it was promised one.
                logger.error("Request %s: %s", request_id, error)
                continue
            self._writer.do(self._writer.prefill.sampled(request_id, token, payload, now))
