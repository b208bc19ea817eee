"""What holds for every test."""

import os
import signal
from pathlib import Path

# Read when triton is imported, which torch does where it is installed: so before any test brings torch in.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell without job control has its background jobs ignore SIGINT, and processes inherit that: without this line those
# that tests start could not be interrupted there.
signal.signal(signal.SIGINT, signal.default_int_handler)
