"""Carries vLLM's request and output structs through the byte fields of the protocol."""

from collections.abc import Sequence

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

# vLLM's own codec between its front end and its engine cores (vllm/v1/engine/core_client.py:713): the first
# buffer is the message, the others are tensors and arrays that it refers to by index.
_encoder = MsgpackEncoder()
_request_decoder = MsgpackDecoder(EngineCoreRequest)
_outputs_decoder = MsgpackDecoder(EngineCoreOutputs)


def encode_request(request: EngineCoreRequest) -> list[bytes]:
    """Encode for `AddRequest.request`."""
    return [bytes(buffer) for buffer in _encoder.encode(request)]


def decode_request(buffers: Sequence[bytes]) -> EngineCoreRequest:
    """Decode `AddRequest.request`; raises msgspec.MsgspecError when it is not one."""
    return _request_decoder.decode(_writable(buffers))


def encode_outputs(outputs: EngineCoreOutputs) -> list[bytes]:
    """Encode for `StepOutputs.outputs`."""
    return [bytes(buffer) for buffer in _encoder.encode(outputs)]


def decode_outputs(buffers: Sequence[bytes]) -> EngineCoreOutputs:
    """Decode `StepOutputs.outputs`; raises msgspec.MsgspecError when it is not one."""
    return _outputs_decoder.decode(_writable(buffers))


def _writable(buffers: Sequence[bytes]) -> list[bytearray]:
    """torch warns of tensors over read-only memory, and vLLM makes some over the message itself."""
    return [bytearray(buffer) for buffer in buffers]
