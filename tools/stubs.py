"""Generates the protobuf stubs beside their .proto files, or checks that they are up to date.

python -m tools.stubs           write them
python -m tools.stubs --check   exit 1 and name each stub that differs
"""

import argparse
import sys
import sysconfig
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTO_ROOT = Path(__file__).resolve().parent.parent / "proto"
STUB_PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(destination: Path) -> None:
    """Compiles every .proto under PROTO_ROOT into `destination`.

    Raises:
        SystemExit: protoc refused a file; its own message is on stderr.
    """
    scripts = Path(sysconfig.get_path("scripts"))
    protos = sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.rglob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTO_ROOT}",
            f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
            f"--python_out={destination}",
            f"--grpc_python_out={destination}",
            f"--mypy_out=quiet:{destination}",
            f"--mypy_grpc_out=quiet:{destination}",
            *protos,
        ]
    )
    if status:
        raise SystemExit(f"protoc failed with status {status}")


def stubs(root: Path) -> dict[Path, bytes]:
    """Content of each stub below `root`, by path relative to it."""
    return {
        path.relative_to(root): path.read_bytes() for pattern in STUB_PATTERNS for path in sorted(root.rglob(pattern))
    }


def stale() -> list[Path]:
    """Stubs that are missing, left over or different from what the .proto files say now."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        wanted, present = stubs(Path(folder)), stubs(PROTO_ROOT)
    return sorted(path for path in wanted.keys() | present.keys() if wanted.get(path) != present.get(path))


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a stub is out of date")
    if not parser.parse_args().check:
        generate(PROTO_ROOT)
        return 0
    outdated = stale()
    for path in outdated:
        print(f"{path}: out of date, run `make proto`", file=sys.stderr)
    return 1 if outdated else 0


if __name__ == "__main__":
    sys.exit(main())
