"""How many rows a fused operation on the CPU takes at a time."""

from collections.abc import Iterator

# Elements of one operand. Measured on two cores of an AMD EPYC with 1 MiB of L2 each, in rows of 5120 and 5376: a
# quarter of it loses to the cost of calls, and whole tensors lose to memory in float32.
BLOCK_ELEMENTS = 2**19


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices that cover `rows` rows of `width` elements in order."""
    step = max(1, BLOCK_ELEMENTS // max(1, width))
    return (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))
