"""Images: which builder, from which base, with which of pip's settings; then archives that a node can load.

`make images` does the building. Here is only what it is told: a builder that is here, and images to build from where no
registry can be reached.
"""

import os
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.kubernetes import ROOT, program
from tools import prometheus
from tools.e2e.programs import Missing, have, run, step, succeeds

NAMES = (
    "sojourn-inference",
    "sojourn-residencyd",
    "sojourn-operator",
    "sojourn-e2e-prometheus",
    "sojourn-e2e-model",
)
# What the Containerfiles start from, and what stands in where nothing can be pulled.
PUBLIC_BASE, PUBLIC_HELM = "docker.io/library/python:3.11-slim-bookworm", "docker.io/alpine/helm:4.3.1"
LOCAL_BASE, LOCAL_HELM = "localhost/sojourn-e2e-base:bookworm", "localhost/sojourn-e2e-helm:local"
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
# Settings of pip that a build needs as this machine does; the paths are of files or folders.
PIP_PATHS, PIP_WORDS = ("PIP_CERT", "PIP_FIND_LINKS"), ("PIP_INDEX_URL",)


@dataclass(frozen=True)
class Builder:
    """A program that builds images.

    Attributes:
        build: words before the options of a build.
        pull: words before the name of an image that is to be had.
        local: words before the name of an image, to ask whether it is here.
        archive: words that write an image into an archive, with {image} and {file} to be replaced.
        mounts: whether a build can see folders of this machine.
    """

    build: tuple[str, ...]
    pull: tuple[str, ...]
    local: tuple[str, ...]
    archive: tuple[str, ...]
    mounts: bool

    def write(self, image: str, file: Path) -> None:
        """Writes an image into a docker archive, uncompressed: the node unpacks it at once."""
        file.unlink(missing_ok=True)
        run([word.format(image=image, file=file) for word in self.archive])


BUILDAH = Builder(
    build=("buildah", "bud", "--layers", "--isolation", "chroot", "--network", "host"),
    pull=("buildah", "pull", "--quiet"),
    local=("buildah", "inspect", "--type", "image"),
    archive=("buildah", "push", "--quiet", "{image}", "docker-archive:{file}:{image}"),
    mounts=True,
)
DOCKER = Builder(
    build=("docker", "build", "--network", "host"),
    pull=("docker", "pull", "--quiet"),
    local=("docker", "image", "inspect"),
    archive=("docker", "save", "--output", "{file}", "{image}"),
    mounts=False,
)


def builder() -> Builder:
    """Docker where its daemon answers, else buildah.

    Raises:
        Missing: neither is here.
    """
    if have("docker") and succeeds(["docker", "info"]):
        return DOCKER
    if have("buildah"):
        os.environ.setdefault("STORAGE_DRIVER", "overlay")
        return BUILDAH
    raise Missing("nothing builds images here: apt-get install buildah, or start docker")


def build(found: Builder, *, tag: str, folder: Path) -> None:
    """All images of the end-to-end tests, called localhost/NAME:tag."""
    with step("images to build from"):
        base, helm = _base(found, folder), _helm(found, folder)
    arguments = [*_arguments("BASE", base), *_arguments("HELM_IMAGE", helm), *_pip(found)]
    settings = (f"IMAGE_TAG={tag}", f"BUILDER={shlex.join(found.build)}", f"IMAGE_ARGS={shlex.join(arguments)}")
    with step("images"):
        run(["make", "-C", ROOT, "-j2", "images", *settings])
        _prometheus(found, folder, base, f"localhost/sojourn-e2e-prometheus:{tag}")
        _model(found, folder, f"localhost/sojourn-e2e-model:{tag}")


def archives(found: Builder, *, tag: str, folder: Path) -> list[Path]:
    """One archive for each image."""
    files = {f"localhost/{name}:{tag}": folder / f"{name}.tar" for name in NAMES}
    with step("archives"), ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: found.write(*pair), files.items()))
    return list(files.values())


def _base(found: Builder, folder: Path) -> str:
    """SOJOURN_E2E_BASE, else the public image, else a Debian made here."""
    if given := os.environ.get("SOJOURN_E2E_BASE"):
        return given
    if succeeds([*found.pull, PUBLIC_BASE]):
        return PUBLIC_BASE
    if succeeds([*found.local, LOCAL_BASE]):
        return LOCAL_BASE
    if not have("mmdebstrap"):
        raise Missing(
            f"no base image: {PUBLIC_BASE} cannot be pulled; set SOJOURN_E2E_BASE to a Debian with Python that can, or "
            "apt-get install mmdebstrap to have one made"
        )
    context = folder / "base"
    context.mkdir(parents=True, exist_ok=True)
    run(["mmdebstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", context / "rootfs.tar"])
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    text = f"FROM scratch\nADD rootfs.tar /\nENV PATH={path} LANG=C.UTF-8\n"
    return _image(found, context, LOCAL_BASE, text)


def _helm(found: Builder, folder: Path) -> str:
    """SOJOURN_E2E_HELM_IMAGE, else the public image, else one of the helm of this machine, which is one static file."""
    if given := os.environ.get("SOJOURN_E2E_HELM_IMAGE"):
        return given
    if succeeds([*found.pull, PUBLIC_HELM]):
        return PUBLIC_HELM
    binary = program("helm")
    if binary is None:
        raise Missing(f"no helm: {PUBLIC_HELM} cannot be pulled; set SOJOURN_E2E_HELM_IMAGE, or install helm")
    context = folder / "helm"
    context.mkdir(parents=True, exist_ok=True)
    shutil.copy(binary, context / "helm")
    return _image(found, context, LOCAL_HELM, "FROM scratch\nCOPY helm /usr/bin/helm\n")


def _prometheus(found: Builder, folder: Path, base: str, name: str) -> None:
    """Debian's Prometheus, so that the shipped dashboards and rules are asked of the real one."""
    if prometheus.program("prometheus") is None:
        prometheus.unpack()
    binary = prometheus.program("prometheus")
    assert binary is not None
    context = folder / "prometheus"
    context.mkdir(parents=True, exist_ok=True)
    shutil.copy(binary, context / "prometheus")
    text = f'FROM {base}\nCOPY prometheus /usr/bin/prometheus\nUSER 10001:10001\nENTRYPOINT ["prometheus"]\n'
    _image(found, context, name, text)


def _model(found: Builder, folder: Path, name: str) -> None:
    """The demo model and nothing else, for an image volume."""
    context = folder / "model"
    shutil.copytree(ROOT / "models/h3-digits", context / "h3-digits", dirs_exist_ok=True)
    _image(found, context, name, "FROM scratch\nCOPY --chown=10001:10001 h3-digits /h3-digits\n")


def _image(found: Builder, context: Path, name: str, containerfile: str) -> str:
    (context / "Containerfile").write_text(containerfile)
    run([*found.build, "-f", context / "Containerfile", "-t", name, context])
    shutil.rmtree(context)
    return name


def _arguments(name: str, value: str) -> list[str]:
    return ["--build-arg", f"{name}={value}"]


def _pip(found: Builder) -> list[str]:
    """Pip's settings of this machine, for the build stages; what they name is mounted where that can be."""
    given = {name: os.environ[name] for name in (*PIP_PATHS, *PIP_WORDS) if os.environ.get(name)}
    words = [word for name, value in given.items() for word in _arguments(name, value)]
    paths = [given[name] for name in PIP_PATHS if name in given and Path(given[name]).exists()]
    return [*words, *(word for path in paths for word in ("--volume", f"{path}:{path}:ro") if found.mounts)]
