"""What a stage takes besides weights: activations, and the reserve that allocators keep.

An estimate from one measurement. MiniMax-H3 grows by 9.4 GiB on a device at 1344×768×124 frames in bf16 (measured
upstream, between two stages, allocator reserve included); its rows are proportional to pixels × frames and its width
is 5376. Other sizes and widths scale. It is a floor for planning, not a promise: the report at run time has the truth.
"""

from dataclasses import dataclass

MEASURED_BYTES = int(9.4 * (1 << 30))
MEASURED_UNITS = 1344 * 768 * 124
MEASURED_WIDTH = 5376

# Headroom that a device sharing host memory is to have between two stages of H3 at that size: the growth above and
# a margin.
MEASURED_HEADROOM_BYTES = 12 << 30

# Interpreter, torch, diffusers and transformers, once imported: 320 MiB of anonymous memory on the CPU build, and
# about as much again of code that is in use.
RUNTIME_BYTES = 640 << 20


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The largest request that is planned for.

    Attributes:
        pixels: Width × height.
        frames: Frames that a step works on.
        density: Rows for each pixel and frame, in units of MiniMax-H3's.
    """

    pixels: int = 1344 * 768
    frames: int = 124
    density: int = 1

    @property
    def units(self) -> int:
        """What rows are proportional to."""
        return self.pixels * self.frames * self.density


def activation_bytes(workload: Workload, *, hidden_size: int) -> int:
    """What a stage of this width takes; a model that tells no width at all (0) is taken for the measured one."""
    return MEASURED_BYTES * workload.units * (hidden_size or MEASURED_WIDTH) // (MEASURED_UNITS * MEASURED_WIDTH)


def headroom_bytes(workload: Workload, *, hidden_size: int) -> int:
    """What must be free for the next stage when a component's use ends."""
    return MEASURED_HEADROOM_BYTES * activation_bytes(workload, hidden_size=hidden_size) // MEASURED_BYTES
