"""Regenerates lockstep/rpc/generated from lockstep.proto; run `python -m lockstep.rpc.generate`."""

import sys
from importlib import resources
from pathlib import Path


def generate(out: Path) -> None:
    """Write the message and service modules under `out`, with imports that work inside the package."""
    from grpc_tools import protoc  # a development dependency

    here = Path(__file__).parent
    well_known = resources.files("grpc_tools") / "_proto"
    args = ["protoc", f"-I{here}", f"-I{well_known}", f"--python_out={out}", f"--pyi_out={out}"]
    if protoc.main([*args, f"--grpc_python_out={out}", "lockstep.proto"]) != 0:
        raise SystemExit("protoc failed on lockstep.proto")
    stubs = out / "lockstep_pb2_grpc.py"
    text = stubs.read_text().replace(
        "import lockstep_pb2 as", "from lockstep.rpc.generated import lockstep_pb2 as"
    )
    stubs.write_text(text)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "generated")
