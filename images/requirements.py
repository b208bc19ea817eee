"""Prints the requirements of parts of the distribution, so that an image can install them before our own code.

python requirements.py pyproject.toml PART…   PART: an extra, or build-system
"""

import sys
import tomllib
from pathlib import Path

text, parts = Path(sys.argv[1]).read_text(), sys.argv[2:]
project = tomllib.loads(text)
for part in parts:
    if part == "build-system":
        print(*project["build-system"]["requires"], sep="\n")
    else:
        print(*project["project"]["dependencies"], *project["project"]["optional-dependencies"][part], sep="\n")
