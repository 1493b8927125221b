"""Writes small GGUF files, after ggml's docs/gguf.md."""

import struct
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

F32, Q4_1, Q8_0 = 0, 3, 8
ALIGNMENT = 32

Tensor = tuple[int, tuple[int, ...], bytes]
"""ggml type, shape as in torch, data."""


def f32(values: NDArray[Any]) -> Tensor:
    return F32, values.shape, values.astype("<f4").tobytes()


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(content: Any) -> bytes:
    """A value with its type before it."""
    match content:
        case bool():
            return struct.pack("<I?", 7, content)
        case int():
            return struct.pack("<II", 4, content)
        case float():
            return struct.pack("<If", 6, content)
        case str():
            return struct.pack("<I", 8) + string(content)
        case [first, *_]:
            kind = value(first)[:4]
            return (
                struct.pack("<I", 9)
                + kind
                + struct.pack("<Q", len(content))
                + b"".join(value(c)[4:] for c in content)
            )
    raise TypeError(content)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(string(key) + value(content) for key, content in metadata.items())
    data = b""
    for name, (kind, shape, content) in tensors.items():
        head += string(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(shape)) + struct.pack(
            "<IQ", kind, len(data)
        )
        data += content + bytes(-len(content) % ALIGNMENT)
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)
