"""`python -m sojourn.inference.cli` is `sojourn`."""

from sojourn.inference.cli import main

main()
