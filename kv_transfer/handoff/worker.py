"""The hand-off in the connector's workers: what the runner gives on prefill, and what arrives on decode."""

import threading
import time
from functools import partial
from typing import Any

import torch
from vllm.logger import init_logger

from kv_transfer.device import copy_to_host, record_event
from kv_transfer.handoff import codec
from kv_transfer.writer import PushWriter

logger = init_logger(__name__)


class HandOffWorker:
    """A base of `LockstepPushWorker`, whose writer and chunks it uses; called on the engine's thread."""

    device_type: str
    _writer: PushWriter
    _push_writer_wake: threading.Event

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first_tokens: dict[str, str] = {}  # request_id: token, of the step under way
        self._payloads: dict[str, bytes] = {}  # of receives that ended, for the scheduler

    def flush_chunks(self) -> None:
        """Hand the chunks of the last step over."""
        raise NotImplementedError

    def first_tokens_awaited(self) -> dict[str, str]:
        """The requests whose first token the step under way samples and that promise a hand-off."""
        return self._first_tokens

    def hand_over(self, request_ids: list[str], token_ids: torch.Tensor) -> None:
        """What was sampled and drafted for them: [len(request_ids), 1 + K], on the device.

        It is copied behind the work that makes it, and read by the writer thread once that is done. The last
        chunks follow, which waited for it: the notice of completion may follow them at once.
        """
        tokens, self._first_tokens = self._first_tokens, {}
        copied = copy_to_host(token_ids)
        rows = [(request_id, tokens[request_id]) for request_id in request_ids]
        with self._writer.lock:
            self._writer.steps.put(partial(self._sampled, rows, copied), record_event(self.device_type))
        self.flush_chunks()
        self._push_writer_wake.set()

    def take_payloads(self) -> dict[str, bytes]:
        """Decode: what came with the KV of receives that ended since the last call."""
        payloads, self._payloads = self._payloads, {}
        return payloads

    def _sampled(self, rows: list[tuple[str, str]], token_ids: torch.Tensor) -> None:
        now = time.monotonic()
        for (request_id, token), (first, *drafts) in zip(rows, token_ids.tolist(), strict=True):
            try:
                payload = codec.encode(first, drafts)
            except codec.HandOffError as error:
                # Decode fails the receive: it was promised one.
                logger.error("Request %s: %s", request_id, error)
                continue
            self._writer.do(self._writer.prefill.sampled(request_id, token, payload, now))
