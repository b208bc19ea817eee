"""`python -m sojourn.operator`: the same as sojourn-operator."""

from sojourn.operator.cli import main

if __name__ == "__main__":
    main()
