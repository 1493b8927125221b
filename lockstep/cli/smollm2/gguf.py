"""Reads a GGUF file: its metadata, and its tensors as float32.

The format is described in ggml's docs/gguf.md; little-endian throughout. Only the tensor types that SmolLM2's
file has are read: F32, Q8_0 and Q4_1.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"GGUF"
_VERSION = 3
_ALIGNMENT = 32
"""Of the tensors' data, where general.alignment does not say otherwise."""

_BLOCK = 32
"""Weights that share a scale in a quantized type."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32, _Q4_1, _Q8_0 = 0, 3, 8

_Q4_1_BLOCK = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", _BLOCK // 2)])
_Q8_0_BLOCK = np.dtype([("d", "<f2"), ("q", "i1", _BLOCK)])


class GGUFError(ValueError):
    """The file is not one that this module reads."""


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    shape: tuple[int, ...]
    """As in torch: the fastest dimension last."""
    kind: int
    offset: int
    """From the start of the data section, in bytes."""


class GGUFFile:
    """An open file; `metadata` by key, tensors one at a time. Raises GGUFError for what it cannot read."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._bytes[:4] != _MAGIC:
            raise GGUFError(f"{path} is no GGUF file")
        self._position = 4
        if (version := self._scalar("I")) != _VERSION:
            raise GGUFError(f"{path} has GGUF version {version}, not {_VERSION}")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = dict(self._key() for _ in range(num_keys))
        self._tensors = dict(self._tensor_info() for _ in range(num_tensors))
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        self._data = -(-self._position // alignment) * alignment

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bytes.close()

    def __len__(self) -> int:
        return len(self._tensors)

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Each tensor by name, in the file's order, in torch's shape."""
        for name, info in self._tensors.items():
            yield name, self._values(info).reshape(info.shape)

    def _values(self, info: _TensorInfo) -> NDArray[np.float32]:
        count, start = prod(info.shape), self._data + info.offset
        if info.kind == _F32:
            return self._array(np.dtype("<f4"), count, start)
        if info.kind == _Q4_1:
            return q4_1(self._array(_Q4_1_BLOCK, count // _BLOCK, start))
        if info.kind == _Q8_0:
            return q8_0(self._array(_Q8_0_BLOCK, count // _BLOCK, start))
        raise GGUFError(f"a tensor has ggml type {info.kind}, which is not read here")

    def _array(self, dtype: np.dtype[Any], count: int, start: int) -> NDArray[Any]:
        # A copy: the file may be closed before the tensor is used.
        return np.frombuffer(self._bytes, dtype, count, start).copy()

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._bytes, self._position)
        self._position += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        self._position += length
        return self._bytes[self._position - length : self._position].decode()

    def _key(self) -> tuple[str, Any]:
        name = self._string()
        return name, self._value(self._scalar("I"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            of, count = self._scalar("I"), self._scalar("Q")
            return [self._value(of) for _ in range(count)]
        if kind not in _SCALARS:
            raise GGUFError(f"a value has GGUF type {kind}, which is not read here")
        return self._scalar(_SCALARS[kind])

    def _tensor_info(self) -> tuple[str, _TensorInfo]:
        name = self._string()
        dimensions = [self._scalar("Q") for _ in range(self._scalar("I"))]
        return name, _TensorInfo(tuple(reversed(dimensions)), self._scalar("I"), self._scalar("Q"))


def q8_0(blocks: NDArray[Any]) -> NDArray[np.float32]:
    """Blocks of a scale `d` and 32 signed bytes `q`: d * q."""
    return np.asarray(blocks["d"].astype(np.float32)[:, None] * blocks["q"], np.float32).reshape(-1)


def q4_1(blocks: NDArray[Any]) -> NDArray[np.float32]:
    """Blocks of a scale `d`, a minimum `m` and 16 bytes `q`: d * nibble + m, the low nibbles first."""
    nibbles = np.concatenate([blocks["q"] & 0x0F, blocks["q"] >> 4], axis=1).astype(np.float32)
    scale, minimum = blocks["d"].astype(np.float32)[:, None], blocks["m"].astype(np.float32)[:, None]
    return np.asarray(scale * nibbles + minimum, np.float32).reshape(-1)
