"""API keys: how they are written down, and how a shown one is looked up."""

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep.errors import ConfigError

MIN_KEY_CHARACTERS = 16
_DIGEST_PREFIX = "sha256:"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LABEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]+")
_NUMBER = re.compile(r"(max_requests|tokens_per_minute)=([1-9][0-9]{0,11})|(priority)=(-?[0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key by the name that logs have for it; the key itself is kept as a digest only.

    A limit of None leaves it to the proxy's flags. `admin`: also for what shows other clients' requests.
    `priority` is the best that its requests may ask for, so the lowest; None leaves them any.
    """

    label: str
    digest: bytes = field(repr=False)
    admin: bool = False
    max_requests: int | None = None
    tokens_per_minute: int | None = None
    priority: int | None = 0


class KeyRing:
    """All keys that are accepted; immutable."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        """Raises ConfigError for two keys of one label, or for one key twice."""
        self._keys = tuple(keys)
        for name, values in (
            ("label", [key.label for key in self._keys]),
            ("key of the label", [key.digest for key in self._keys]),
        ):
            for index, value in enumerate(values):
                if value in values[:index]:
                    raise ConfigError(f"API keys: the {name} {self._keys[index].label} is there twice")

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, shown: bytes) -> ApiKey | None:
        """The key that was shown; takes equally long whichever it is, and if it is none."""
        digest = hashlib.sha256(shown).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found


def parse(text: str, source: str) -> list[ApiKey]:
    """Read keys, one a line: `LABEL KEY [admin] [priority=N] [max_requests=N] [tokens_per_minute=N]`.

    A # begins a comment. KEY is the key itself, or `sha256:` and its digest in hex. Raises ConfigError that
    names `source` and the line, and never what stands in it.
    """
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if words:
            keys.append(_key(words, f"{source}: line {number}"))
    return keys


def _key(words: list[str], where: str) -> ApiKey:
    if len(words) < 2:
        raise ConfigError(f"{where}: give LABEL KEY")
    label, secret, *rest = words
    if not _LABEL.fullmatch(label):
        raise ConfigError(f"{where}: a label is up to 64 letters, digits and . _ -")
    numbers: dict[str, int] = {}
    admin = False
    for word in rest:
        number = _NUMBER.fullmatch(word)
        if word == "admin":
            admin = True
        elif number is not None:
            numbers[number[1] or number[3]] = int(number[2] or number[4])
        else:
            raise ConfigError(
                f"{where}: after label and key come admin, priority=N, max_requests=N or tokens_per_minute=N"
            )
    return ApiKey(label, digest_of(secret, where), admin, **numbers)


def digest_of(secret: str, where: str) -> bytes:
    """The digest of a key as it is written down. Raises ConfigError that names `where`."""
    if secret.startswith(_DIGEST_PREFIX):
        digest = secret.removeprefix(_DIGEST_PREFIX).lower()
        if not _DIGEST.fullmatch(digest):
            raise ConfigError(f"{where}: after sha256: come 64 hex digits")
        return bytes.fromhex(digest)
    if len(secret) < MIN_KEY_CHARACTERS or not _KEY.fullmatch(secret):
        raise ConfigError(
            f"{where}: a key is {MIN_KEY_CHARACTERS} or more printable ASCII characters without spaces"
        )
    return hashlib.sha256(secret.encode()).digest()
