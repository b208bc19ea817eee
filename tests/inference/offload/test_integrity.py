"""A weight file that is cut while it is mapped is named, before its pages kill the process."""

import signal

import pytest
from sojourn.inference.errors import ModelError
from sojourn.inference.offload.assemble import own_mappings
from sojourn.inference.offload.integrity import MappedFiles
from sojourn.inference.offload.settings import Mode

from tests.inference.offload.capped import MIB, Child
from tests.inference.offload.test_cold_advice import PAGE, MappedFile


@pytest.fixture
def mapped(tmp_path):
    return MappedFile(tmp_path / "weights", MIB)


def test_a_whole_file_passes(mapped):
    files = MappedFiles([mapped.span], own_mappings())
    files.check()
    files.close()
    files.check()


@pytest.mark.parametrize("left", [MIB - 1, MIB - PAGE, MIB // 2, 0])
def test_a_file_that_is_cut_is_named_with_both_sizes(mapped, left):
    files = MappedFiles([mapped.span], own_mappings())
    with mapped.path.open("r+b") as file:
        file.truncate(left)
    with pytest.raises(ModelError, match=f"cut to {left} bytes while {MIB} bytes") as caught:
        files.check()
    assert caught.value.reason == "WeightsTruncated"
    assert caught.value.path == mapped.path


def test_a_cut_behind_the_weights_is_none_of_our_business(mapped):
    files = MappedFiles([mapped.span._replace(end=mapped.address + MIB // 2)], own_mappings())
    with mapped.path.open("r+b") as file:
        file.truncate(MIB // 2)
    files.check()


def test_a_file_put_in_its_place_does_not_matter_to_the_mapping(mapped, tmp_path):
    files = MappedFiles([mapped.span], own_mappings())
    other = tmp_path / "other"
    other.write_bytes(b"")
    other.replace(mapped.path)
    files.check()


CUT_WHILE_RUNNING = """
import json, mmap, sys, faulthandler, torch
from torch import nn
from sojourn.inference.errors import ModelError
from sojourn.inference.offload.assemble import paged
from sojourn.inference.offload.settings import OffloadSettings
f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); view = memoryview(m)
net = nn.Sequential(nn.ModuleList([nn.Linear(512, 512, bias=False) for _ in range(2)]))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
net = Net()
for i, layer in enumerate(net.layers):
    layer.weight = nn.Parameter(
        torch.frombuffer(view[i << 20 : i + 1 << 20], dtype=torch.float32).view(512, 512), False)
guarded = sys.argv[2] == 'guarded'
if guarded:
    paged('net', net, settings=OffloadSettings(), layerwise=True)
net(torch.ones(1, 512))
print('{}', flush=True)
sys.stdin.readline()
try:
    net(torch.ones(1, 512))
except ModelError as error:
    print(json.dumps(dict(reason=error.reason, path=str(error.path))), flush=True)
"""


def test_a_cut_between_two_passes_fails_the_request_by_name_instead_of_killing_the_process(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(2 * MIB))
    with Child(CUT_WHILE_RUNNING, None, str(path), "guarded") as child:
        child.hear()
        with path.open("r+b") as file:
            file.truncate(MIB)
        child.go_on()
        assert child.hear() == {"reason": "WeightsTruncated", "path": str(path)}
        assert child.process.wait() == 0


CUT_WITHIN_A_PASS = CUT_WHILE_RUNNING.replace(
    "net(torch.ones(1, 512))\nprint('{}'",
    "net(torch.ones(1, 512))\n"
    "net.layers[0].register_forward_hook(lambda *_: print('{}', flush=True) or sys.stdin.readline() and None)\n"
    "print('{}'",
)


def test_a_cut_within_a_pass_is_noticed_at_the_next_layer(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(2 * MIB))
    with Child(CUT_WITHIN_A_PASS, None, str(path), "guarded") as child:
        child.hear()
        child.go_on()
        child.hear()
        with path.open("r+b") as file:
            file.truncate(MIB)
        child.go_on()
        assert child.hear() == {"reason": "WeightsTruncated", "path": str(path)}
        assert child.process.wait() == 0


def test_without_the_guard_the_process_would_die_of_a_bus_error(tmp_path):
    """What the guard is for; what is left of it (a cut within a layer) ends so, as exit code 135 in a container."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(2 * MIB))
    with Child(CUT_WHILE_RUNNING, None, str(path), "plain") as child:
        child.hear()
        with path.open("r+b") as file:
            file.truncate(MIB)
        child.go_on()
        assert child.process.wait() == -signal.SIGBUS


CUT_PIPELINE = """
import json, os, shutil, sys, time, warnings
warnings.simplefilter('ignore')
from pathlib import Path
from sojourn.inference.errors import ModelError
from sojourn.inference.offload.options import OffloadOptions
from sojourn.inference.offload.settings import Mode, OffloadSettings, Selection
from sojourn.inference.pipeline import DeviceChoice, load_pipeline
from sojourn.inference.requests import GenerationRequest, Workflow
from sojourn.inference.watch import StageBegan, Stage, Watch

request = GenerationRequest(
    prompt='a', workflow=Workflow.T2VA, width=32, height=32, frames=124, steps=3, flow_shift=12.0,
    audio_flow_shift=3.0, seeds=(7,))
for mode in Mode:
    folder = Path(sys.argv[2]) / mode
    shutil.copytree(sys.argv[1], folder)
    options = OffloadOptions(settings=Selection(default=OffloadSettings(mode=mode)))
    pipeline = load_pipeline(folder, device=DeviceChoice.CPU, offload=options)
    weights = next((folder / 'transformer').glob('*.safetensors'))

    def cut(event):
        # While a stage before the transformer's runs, nothing is wrong with the request.
        if isinstance(event, StageBegan) and event.stage is Stage.TEXT_ENCODE:
            os.truncate(weights, weights.stat().st_size // 2)

    try:
        pipeline.run_clip(request, 0, Watch(clock=time.monotonic, listener=cut))
        said = {}
    except ModelError as error:
        said = dict(reason=error.reason, path=str(error.path))
    print(json.dumps(dict(mode=mode, file=str(weights)) | said), flush=True)
    pipeline.offload.close()
"""


def test_weights_cut_while_a_request_runs_fail_it_by_name_in_every_mode(tiny_folder, tmp_path):
    with Child(CUT_PIPELINE, None, str(tiny_folder), str(tmp_path)) as child:
        for mode in Mode:
            heard = child.hear()
            assert heard == {"mode": mode, "file": heard["file"], "reason": "WeightsTruncated", "path": heard["file"]}
        assert child.process.wait() == 0
