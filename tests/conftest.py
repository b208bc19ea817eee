"""What holds for every test."""

import signal

# A shell without job control has its background jobs ignore SIGINT, and processes inherit that: without this line those
# that tests start could not be interrupted there.
signal.signal(signal.SIGINT, signal.default_int_handler)
