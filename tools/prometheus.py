"""Finds prometheus and promtool, or unpacks Debian's package of them into .cache; nothing is installed.

python -m tools.prometheus   print the folder that holds both, unpacking the package where there is none
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache/prometheus"
MISSING = "no prometheus: run `make prometheus` on Debian, or put prometheus and promtool on PATH"


def program(name: str) -> Path | None:
    """Where `prometheus` or `promtool` is: on PATH, or unpacked; None where it is neither."""
    unpacked = CACHE / "usr/bin" / name
    if found := shutil.which(name):
        return Path(found)
    return unpacked if unpacked.exists() else None


def unpack() -> None:
    """Downloads the package and unpacks it into the cache.

    Raises:
        OSError: There is no apt-get or dpkg.
        subprocess.CalledProcessError: They failed; they have said why.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(["apt-get", "download", "-q", "prometheus"], cwd=folder, check=True)
        except subprocess.CalledProcessError:
            # The lists of a fresh machine are empty.
            subprocess.run(["apt-get", "update", "-q"], check=True)
            subprocess.run(["apt-get", "download", "-q", "prometheus"], cwd=folder, check=True)
        (package,) = Path(folder).glob("prometheus_*.deb")
        subprocess.run(["dpkg", "-x", package, CACHE], check=True)


def main() -> int:
    """Command line; returns the exit status."""
    if program("promtool") is None:
        try:
            unpack()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"prometheus cannot be had: {error}; {MISSING}", file=sys.stderr)
            return 1
    found = program("promtool")
    assert found is not None
    print(found.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
