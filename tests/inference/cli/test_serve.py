import importlib
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from sojourn.inference.adaln.settings import PlanCacheSettings
from sojourn.inference.offload.options import OffloadOptions
from sojourn.inference.quality.settings import Fusions, QualitySettings
from sojourn.inference.server.config import Address, ServerConfig

from tests.inference.cli.conftest import Run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """The configurations with which servers would have been started; logging is put back afterwards."""
    configs: list[ServerConfig] = []
    root, package = logging.getLogger(), logging.getLogger("sojourn")
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(package, "level", package.level)

    def run(config: ServerConfig, load: object, **rest: object) -> int:
        configs.append(config)
        return 0

    # The package exports the command under the name of its module.
    monkeypatch.setattr(importlib.import_module("sojourn.inference.cli.serve"), "run", run)
    return configs


@pytest.mark.parametrize(
    ("arguments", "setting", "value"),
    [
        (["--listen", "127.0.0.1:0"], "listen", Address(host="127.0.0.1", port=0)),
        (["--metrics-listen", "off"], "metrics_listen", None),
        (["--metrics-listen", "127.0.0.1:1"], "metrics_listen", Address(host="127.0.0.1", port=1)),
        (["--model-name", "digits"], "model_name", "digits"),
        (["--max-waiting", 3], "max_waiting", 3),
        (["--max-message-bytes", 10], "max_message_bytes", 10),
        (["--stall-seconds", 2.5], "stall_seconds", 2.5),
        (["--grace-seconds", 1], "grace_seconds", 1.0),
        (["--failed-grace-seconds", 2], "failed_grace_seconds", 2.0),
        (["--tls-cert", "c", "--tls-key", "k"], "tls_cert", Path("c")),
        (["--tls-cert", "c", "--tls-key", "k"], "tls_key", Path("k")),
        (["--tls-cert", "c", "--tls-key", "k", "--client-ca", "a"], "client_ca", Path("a")),
        (["--token-file", "t"], "token_file", Path("t")),
        (["--listen", "0.0.0.0:1", "--allow-insecure"], "allow_insecure", True),
    ],
)
def test_each_option_reaches_the_server(
    sojourn: Callable[..., Run], started: list[ServerConfig], tmp_path: Path,
    arguments: list[object], setting: str, value: object,
) -> None:  # fmt: skip
    assert sojourn("serve", "--model", tmp_path, *arguments)[0] == 0
    assert getattr(started[0], setting) == value


def test_the_model_is_named_after_its_folder(
    sojourn: Callable[..., Run], started: list[ServerConfig], tmp_path: Path
) -> None:
    sojourn("serve", "--model", tmp_path)
    assert started[0].model_name == tmp_path.name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "0.0.0.0:50051"], "allow_insecure"),
        (["--listen", "nowhere"], "host:port"),
        (["--tls-cert", "c"], "go together"),
        (["--device", "tpu"], "auto, cpu, cuda"),
        (["--dtype", "int4"], "bfloat16, float32"),
        (["--max-waiting", -1], "max_waiting"),
        (["--offload", "vae=slow"], "--offload: 'slow' is no offload setting"),
        (["--offload", "component,resident=2"], "auto or layerwise only"),
        (["--pinning", "on"], "--pinning: 'on' is neither of auto, off"),
        (["--cold-page-advice", "yes"], "--cold-page-advice: 'yes' is neither of auto, off"),
        (["--next-stage-headroom", "12GB"], "--next-stage-headroom: '12GB' is no size"),
        (["--device-memory", "lots"], "--device-memory: 'lots' is no size"),
        (["--host-memory", ""], "--host-memory: '' is no size"),
        (["--fusions", "fast"], "--fusions is 'fast': must be one of auto, on, off"),
        (["--step-cache-table", "absent.json"], "--step-cache-table is 'absent.json': there is no such file"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(
    sojourn: Callable[..., Run], started: list[ServerConfig], tmp_path: Path, arguments: list[object], said: str
) -> None:
    status, _, err = sojourn("serve", "--model", tmp_path, *arguments)
    assert status == 2
    assert said in err
    assert started == []


def test_a_missing_folder_is_refused(sojourn: Callable[..., Run], started: list[ServerConfig], tmp_path: Path) -> None:
    status, _, err = sojourn("serve", "--model", tmp_path / "absent")
    assert (status, started) == (2, [])
    assert "no such folder" in err


@pytest.fixture
def placed(started: list[ServerConfig], monkeypatch: pytest.MonkeyPatch) -> list[OffloadOptions]:
    """The offload options with which models would have been loaded."""
    options: list[OffloadOptions] = []

    def lazily_loaded(*arguments: object, offload: OffloadOptions, **rest: object) -> object:
        options.append(offload)
        return lambda: None

    monkeypatch.setattr(importlib.import_module("sojourn.inference.cli.serve"), "lazily_loaded", lazily_loaded)
    return options


@pytest.mark.parametrize(
    ("arguments", "option", "value"),
    [
        (["--device-memory", "24Gi"], "device_memory_bytes", 24 * 2**30),
        (["--host-memory", "1.5Gi"], "host_memory_bytes", 3 * 2**29),
        (["--component-map", "maps/a.pb"], "component_map", "maps/a.pb"),
        ([], "component_map", None),
        (["--pinning", "off"], "pinning", False),
        (["--pinning", "auto"], "pinning", True),
        (["--cold-page-advice", "off"], "cold_advice", False),
        ([], "cold_advice", True),
        (["--next-stage-headroom", "12Gi"], "next_stage_headroom_bytes", 12 * 2**30),
        (["--next-stage-headroom", "0"], "next_stage_headroom_bytes", 0),
        ([], "next_stage_headroom_bytes", None),
    ],
)
def test_each_offload_option_reaches_the_loading(
    sojourn: Callable[..., Run], placed: list[OffloadOptions], tmp_path: Path,
    arguments: list[object], option: str, value: object,
) -> None:  # fmt: skip
    assert sojourn("serve", "--model", tmp_path, *arguments)[0] == 0
    assert getattr(placed[0], option) == value


def test_each_quality_option_reaches_the_loading(
    sojourn: Callable[..., Run], started: list[ServerConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[QualitySettings] = []

    def lazily_loaded(*arguments: object, quality_settings: QualitySettings, **rest: object) -> object:
        found.append(quality_settings)
        return lambda: None

    monkeypatch.setattr(importlib.import_module("sojourn.inference.cli.serve"), "lazily_loaded", lazily_loaded)
    table = tmp_path / "table.json"
    table.write_text("[]")
    assert sojourn("serve", "--model", tmp_path)[0] == 0
    assert sojourn("serve", "--model", tmp_path, "--fusions", "on", "--step-cache-table", table)[0] == 0
    assert found == [QualitySettings(), QualitySettings(fusions=Fusions.ON, table=table)]


def test_the_family_of_each_component_reaches_the_loading(
    sojourn: Callable[..., Run], started: list[ServerConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[PlanCacheSettings] = []

    def lazily_loaded(*arguments: object, plan_settings: PlanCacheSettings, **rest: object) -> object:
        found.append(plan_settings)
        return lambda: None

    monkeypatch.setattr(importlib.import_module("sojourn.inference.cli.serve"), "lazily_loaded", lazily_loaded)
    given = ("--adaln-family", "transformer=minimax-h3", "--adaln-family", "transformer_ref=flux")
    assert sojourn("serve", "--model", tmp_path, *given)[0] == 0
    assert found[0].families == {"transformer": "minimax-h3", "transformer_ref": "flux"}


def test_the_mode_of_each_component_reaches_the_loading(
    sojourn: Callable[..., Run], placed: list[OffloadOptions], tmp_path: Path
) -> None:
    given = ("--offload", "vae=resident", "--offload", "layerwise,prefetch=2", "--offload", "transformer=component")
    assert sojourn("serve", "--model", tmp_path, *given)[0] == 0
    settings = placed[0].settings
    assert {name: setting.mode.value for name, setting in settings.named.items()} == {
        "vae": "resident", "transformer": "component"
    }  # fmt: skip
    assert (settings.default.mode.value, settings.default.prefetch) == ("layerwise", 2)


def test_a_pod_names_the_component_map_by_its_environment(
    sojourn: Callable[..., Run], placed: list[OffloadOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOJOURN_COMPONENT_MAP", "/run/sojourn/a.pb")
    assert sojourn("serve", "--model", tmp_path)[0] == 0
    assert placed[0].component_map == "/run/sojourn/a.pb"
