"""The clock by which the operator waits: the queue and its pauses, resyncs, looks at pods, coalescing, health.

It tells seconds since some moment, never the time of day, which may jump. What is written into objects is the time of
day; what is compared with others' stamps (the age of a helm record) is too, and how long others may take (helm, the API
server, a pod) is counted in seconds of the machine.
"""

import asyncio
import time


class Clock:
    """Seconds that pass `speed` times as fast as the machine's.

    At speed 1 they are the machine's. At another every interval keeps the length that it says, and its ratio to every
    other one: what an operator does in a quarter of an hour can be seen in half a minute.
    """

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.monotonic() * self.speed

    def on_the_machine(self, seconds: float) -> float:
        """How many of the machine's seconds so many take."""
        return seconds / self.speed

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        await asyncio.sleep(self.on_the_machine(seconds))

    async def wait(self, event: asyncio.Event, seconds: float | None) -> None:
        """Waits for an event, but no longer than so many seconds; None for as long as it takes."""
        limit = None if seconds is None else self.on_the_machine(seconds)
        try:
            await asyncio.wait_for(event.wait(), limit)
        except TimeoutError:
            return
