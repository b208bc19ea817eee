"""In which order layers run, learnt by watching. Pure state.

Registration order is a guess: diffusers models call blocks in other orders, skip them, and call some twice. So the
first pass only records, and every later one is predicted from the pass before it.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from itertools import islice


@dataclass(frozen=True)
class CallOrder:
    """The calls of the last whole pass, and those of the running one.

    Attributes:
        known: Layer indices in the order in which the last pass called them; at first the registration order.
        running: Layer indices that this pass has called so far.
        position: Where in `known` the running pass is; -1 before its first call.
    """

    known: tuple[int, ...]
    running: tuple[int, ...] = ()
    position: int = -1

    @classmethod
    def of(cls, layers: int) -> "CallOrder":
        """The guess before the first pass."""
        return cls(known=tuple(range(layers)))

    def begun(self) -> "CallOrder":
        """A pass begins. One that was broken off before teaches nothing."""
        return CallOrder(known=self.known)

    def ended(self) -> "CallOrder":
        """The pass is whole: its calls are what the next one is expected to do."""
        return CallOrder(known=self.running or self.known)

    def called(self, layer: int) -> "CallOrder":
        """A layer runs."""
        return replace(self, running=(*self.running, layer), position=self._found(layer))

    def _found(self, layer: int) -> int:
        """Where the layer stands in `known`: the next such place, else the first, else where we are."""
        ahead = range(self.position + 1, len(self.known))
        found = next((i for i in (*ahead, *range(self.position + 1)) if self.known[i] == layer), None)
        return self.position if found is None else found

    def ahead(self) -> Iterator[int]:
        """The layers after the running one as they are expected, each once, into the head of the next pass."""
        seen: set[int] = set()
        for i in range(1, len(self.known) + 1):
            layer = self.known[(self.position + i) % len(self.known)]
            if layer not in seen:
                seen.add(layer)
                yield layer

    def upcoming(self, count: int, *, among: Container[int]) -> tuple[int, ...]:
        """The next distinct layers of a set.

        Args:
            count: How many at most.
            among: Only these layers.
        """
        return tuple(islice((layer for layer in self.ahead() if layer in among), count))

    def upcoming_head(self, count: int, *, among: Container[int]) -> tuple[int, ...]:
        """The first distinct layers of a pass that has not begun."""
        return replace(self, position=-1).upcoming(count, among=among)
