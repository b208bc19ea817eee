"""Learning rates over a stage."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine_with_warmup(optimizer: Optimizer, steps: int, warmup: int, floor: float = 0.0) -> LambdaLR:
    """Rise linearly over `warmup` steps, then fall along a cosine to `floor` times the peak.

    The warm-up never takes more than a fifth of the stage, so that short smoke runs learn too.
    """
    warmup = max(1, min(warmup, steps // 5))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))

    return LambdaLR(optimizer, factor)
