"""Where API keys come from, and the file that is read again when it changes."""

import hashlib
import logging
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.rpc.credentials import read
from proxy.admission.config import AdmissionConfig
from proxy.security.keys import ApiKey, KeyRing, parse

logger = logging.getLogger(__name__)

VLLM_VARIABLE = "VLLM_API_KEY"
_LOOK_INTERVAL_S = 1.0


class KeySource:
    """The keys that hold now; used from the event loop only.

    A file that cannot be read any more, or has a mistake in it, leaves the keys as they were: a slip of an
    editor must not lock everybody out, nor let everybody in.
    """

    def __init__(self, fixed: Sequence[ApiKey], file: str | None) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self._fixed = tuple(fixed)
        self._file = file
        self._seen = self._stamp()
        self._ring = self._read()
        self._look_s = time.monotonic() + _LOOK_INTERVAL_S

    @property
    def configured(self) -> bool:
        """Whether clients have to show a key at all; a file counts even if no key is left in it."""
        return bool(self._fixed) or self._file is not None

    def ring(self) -> KeyRing:
        """The keys; looks at the file at most once a second."""
        now = time.monotonic()
        if self._file is not None and now >= self._look_s:
            self._look_s = now + _LOOK_INTERVAL_S
            stamp = self._stamp()
            if stamp != self._seen:
                self._seen = stamp
                self._read_again()
        return self._ring

    def _read_again(self) -> None:
        try:
            self._ring = self._read()
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("the API keys were read again")

    def _read(self) -> KeyRing:
        keys = list(self._fixed)
        if self._file is not None:
            text = read(self._file, "--api-key-file").decode(errors="replace")
            keys += parse(text, "--api-key-file")
        return KeyRing(keys)

    def _stamp(self) -> tuple[int, int, int] | None:
        """Changes with the content: an orchestrator replaces the file under its link, an editor writes it."""
        if self._file is None:
            return None
        try:
            stat = Path(self._file).stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size


def take(config: AdmissionConfig, args: Namespace) -> KeySource:
    """Keys of the file, the environment, and vLLM's own flag and variable; raises ConfigError.

    As with vLLM, one of its keys opens everything. They are taken from it: its own check knows no others.
    """
    vllm_keys, args.api_key = args.api_key, None
    vllm_variable = os.environ.pop(VLLM_VARIABLE, "")
    fixed: list[ApiKey] = []
    if config.api_keys is not None:
        fixed += parse(config.api_keys.get_secret_value().replace(";", "\n"), "LOCKSTEP_API_KEYS")
    given = list(vllm_keys or ())
    if given:
        logger.warning("--api-key: all users of this machine can read command lines; use --api-key-file")
    elif vllm_variable:
        given = [vllm_variable]
    # Whatever their length: they are vLLM's, and a server that took them must not refuse them here.
    fixed += [
        ApiKey(f"vllm-{number}", hashlib.sha256(key.encode()).digest(), admin=True, priority=None)
        for number, key in enumerate(given, 1)
    ]
    return KeySource(fixed, config.api_key_file)
