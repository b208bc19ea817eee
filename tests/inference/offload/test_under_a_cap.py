"""Real memory pressure: a model larger than its control group, and a cap that is halved while it runs."""

import os

import pytest

from tests.inference.offload.capped import MIB, Child, capped

LAYERS = 70
LAYER_BYTES = 8 * MIB

SOURCE = """
import hashlib, json, mmap, sys, warnings
warnings.simplefilter('ignore')
import torch
from torch import nn
from sojourn.inference.offload.assemble import paged
from sojourn.inference.offload.observer import Silent
from sojourn.inference.offload.settings import OffloadSettings, ResidentPolicy
from sojourn.residencyd.kernel.process_io import read_io

LAYERS, WIDTH = int(sys.argv[2]), 2048
file = open(sys.argv[1], 'rb')
view = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

with torch.device('meta'):
    net = Net()
size = 2 * WIDTH * WIDTH
for i, layer in enumerate(net.layers):
    data = torch.frombuffer(view[i * size : (i + 1) * size], dtype=torch.bfloat16).view(WIDTH, WIDTH)
    layer.weight = nn.Parameter(data, False)

class Told(Silent):
    requested = verified = direct = 0
    def paged_out(self, *, component, requested_bytes, verified_bytes):
        self.requested += requested_bytes
        self.verified += verified_bytes
    def read_directly(self, *, component, size_bytes):
        self.direct += size_bytes

told, window = Told(), None
x = torch.linspace(-1, 1, WIDTH, dtype=torch.bfloat16)[None]

def run():
    before = read_io().read_bytes
    with torch.inference_mode():
        y = net(x)
    print(json.dumps({
        'sha': hashlib.sha256(y.float().numpy().tobytes()).hexdigest(),
        'read': read_io().read_bytes - before,
        'kept': window.plan.kept_bytes if window else 0,
        'requested': told.requested, 'verified': told.verified, 'direct': told.direct,
    }), flush=True)

run()
strategy = paged('net', net, settings=OffloadSettings(policy=ResidentPolicy(sys.argv[3])), layerwise=True,
                 observer=told, warn=lambda text: print(text, file=sys.stderr))
window = strategy.window
if sys.argv[4] == 'cache':
    window._open_direct = None
while sys.stdin.readline():
    run()
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    # On a disk: what a tmpfs holds cannot be dropped.
    path = tmp_path_factory.mktemp("weights") / "weights"
    with path.open("wb") as file:
        for _ in range(LAYERS):
            # Positive exponents below 1 in every second byte: numbers that no layer blows up.
            file.write(bytes(b % 0x3D if i % 2 else b for i, b in enumerate(os.urandom(4096))) * (LAYER_BYTES // 4096))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


@pytest.mark.parametrize(("policy", "way"), [("strided", "direct"), ("leading", "cache")])
def test_a_halved_cap_neither_kills_nor_changes_a_bit_and_what_is_kept_adapts_within_a_pass(weights, policy, way):
    total = LAYERS * LAYER_BYTES
    with capped(660 * MIB) as cap, Child(SOURCE, cap, str(weights), str(LAYERS), policy, way) as child:
        plain = child.hear()

        def step():
            child.go_on("step")
            return child.hear()

        before = [step() for _ in range(4)]
        cap.limit(330 * MIB)
        after = [step() for _ in range(4)]
        assert {result["sha"] for result in [*before, *after]} == {plain["sha"]}
        assert cap.oom_kills() == 0
        assert 0 < after[0]["kept"] < before[-1]["kept"] - 200 * MIB, "within the first pass after it"
        # What is read again is what is not kept; a little of it may still be there from before.
        for result in (before[-1], after[-1]):
            assert result["read"] <= 1.05 * (total - result["kept"]) + 2 * MIB
            assert (result["direct"] > 0) is (way == "direct")
        assert after[-1]["requested"] > 0
        assert after[-1]["verified"] >= 0.95 * after[-1]["requested"]
