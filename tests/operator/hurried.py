"""The operator as it is, by a clock that runs faster: python -m tests.operator.hurried SPEED run …"""

import sys

from sojourn.operator.cli import app
from sojourn.operator.clock import Clock

if __name__ == "__main__":
    app(sys.argv[2:], obj=Clock(float(sys.argv[1])))
