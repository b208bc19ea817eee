"""Random tests say their seed."""

import random

import pytest
import torch


@pytest.fixture
def seed(request):
    value = random.SystemRandom().randrange(2**31)
    print(f"seed {value}")
    torch.manual_seed(value)
    return value
