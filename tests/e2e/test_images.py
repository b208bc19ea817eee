"""What the images of the two small processes hold, and how much there is to pull."""

import zlib
from pathlib import Path

import pytest

from tests.e2e.node import STUDIO, SYSTEM, image, shell
from tools.e2e import images
from tools.e2e.programs import Missing, succeeds

pytestmark = pytest.mark.timeout(600)
SMALL = ("residencyd", "operator")
# A bare Debian with Python is 86 MB of it.
MOST_BYTES = 150_000_000


@pytest.mark.parametrize("name", SMALL)
def test_as_much_as_a_registry_would_send_is_little(name: str, tmp_path: Path) -> None:
    try:
        builder = images.builder()
    except Missing as missing:
        pytest.skip(str(missing))
    if not succeeds([*builder.local, image(name)]):
        pytest.skip(f"{image(name)} is on the nodes and not here; run make images")
    builder.write(image(name), tmp_path / "image.tar")
    packed, size = zlib.compressobj(), 0
    with (tmp_path / "image.tar").open("rb") as archive:
        while block := archive.read(1 << 20):
            size += len(packed.compress(block))
    size += len(packed.flush())
    print(f"{name}: {size / 1e6:.0f} MB")
    assert size < MOST_BYTES


@pytest.mark.usefixtures("demo")
@pytest.mark.parametrize("name", SMALL)
def test_there_is_no_torch_in_it(name: str) -> None:
    namespace, workload = (SYSTEM, "deploy/sojourn-operator") if name == "operator" else (STUDIO, "deploy/dsvc-demo")
    code = "from importlib.util import find_spec; print(find_spec('torch'), find_spec('grpc') is not None)"
    assert shell(namespace, workload, name, "python3", "-c", code).split() == ["None", "True"]
