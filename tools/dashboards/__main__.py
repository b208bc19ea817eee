"""Writes the dashboards into the chart, or checks that they are up to date.

python -m tools.dashboards           write them
python -m tools.dashboards --check   exit 1 and name each file that differs
"""

import argparse
import sys
from pathlib import Path

from tools.dashboards import cache_and_offload, operator, residency, service

FOLDER = Path(__file__).resolve().parents[2] / "charts/sojourn/dashboards"
BOARDS = {
    "residency": residency.build,
    "cache-and-offload": cache_and_offload.build,
    "service": service.build,
    "operator": operator.build,
}


def wanted() -> dict[Path, str]:
    """Every file and its content."""
    return {FOLDER / f"{name}.json": build() for name, build in BOARDS.items()}


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    check = parser.parse_args().check
    files = wanted()
    outdated = {path for path, text in files.items() if not path.exists() or path.read_text() != text}
    outdated |= set(FOLDER.glob("*.json")) - set(files)
    for path in sorted(outdated):
        if check:
            print(f"{path.name}: out of date, run `make dashboards`", file=sys.stderr)
        elif path in files:
            path.write_text(files[path])
        else:
            path.unlink()
    return 1 if check and outdated else 0


if __name__ == "__main__":
    sys.exit(main())
