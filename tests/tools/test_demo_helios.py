"""What the recipe of the tiny Helios promises before anything is trained; everything here runs in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.modular_pipelines.helios.denoise import HeliosChunkHistorySliceStep
from diffusers.modular_pipelines.modular_pipeline import BlockState

from tools.demo_model.helios import chunks, codec, components, evaluate, export, forward, train
from tools.demo_model.latents import Pool
from tools.demo_model.progress import Progress
from tools.demo_model.run import Run, Snapshots


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_training_forward_equals_the_stock_forward_over_512_text_tokens() -> None:
    model = components.build_transformer(seed=1)
    torch.nn.init.normal_(model.proj_out.weight, std=0.1)
    assert forward.check_equals_stock(model) < 1e-5


def test_weights_of_a_prompt_add_up_to_the_stock_tokens() -> None:
    text = forward.pack([torch.randn(tokens, 32, generator=generator()) for tokens in (1, 5, 9)])
    assert text.embeddings.shape == (3, 10, 32)
    assert torch.allclose(text.log_weights.exp().sum(-1).flatten(), torch.tensor(512.0))


@pytest.mark.parametrize("chunk", range(4))
def test_a_chunk_is_told_of_what_the_stock_history_step_slices(chunk: int) -> None:
    clip = torch.randn(1, 16, 36, 4, 4, generator=generator())
    before = clip[:, :, : chunk * 9]
    state = BlockState(
        keep_first_frame=True,
        history_sizes=[16, 2, 1],
        image_latents=None if chunk == 0 else clip[:, :, :1],
        latent_shape=(1, 16, 9, 4, 4),
        history_latents=torch.cat([torch.zeros(1, 16, 19, 4, 4), before], dim=2),
    )
    components_of_stock = type("Components", (), {"_execution_device": torch.device("cpu")})()
    _, state = HeliosChunkHistorySliceStep()(components_of_stock, state, k=chunk)
    ours = chunks.history(clip, torch.tensor([chunk]))
    for name in ("short", "mid", "long"):
        assert torch.equal(getattr(ours, name), state[f"latents_history_{name}"])
    assert torch.equal(chunks.current(clip, torch.tensor([chunk])), clip[:, :, chunk * 9 : chunk * 9 + 9])


def test_positions_are_those_of_the_stock_history_step() -> None:
    indices = {name: index[0].tolist() for name, index in forward.stock_indices().items()}
    assert indices == {
        "indices_hidden_states": list(range(20, 29)),
        "indices_latents_history_short": [0, 19],
        "indices_latents_history_mid": [17, 18],
        "indices_latents_history_long": list(range(1, 17)),
    }


def test_pixels_survive_normalisation() -> None:
    grey = torch.rand(1, 2, 4, 4, generator=generator())
    assert torch.allclose(codec.to_grey(codec.to_pixels(grey)), grey, atol=1e-6)


def test_a_chunk_is_nine_latent_frames_of_the_codec() -> None:
    vae = components.build_vae(0)
    latents = vae.encode(torch.zeros(1, 3, chunks.FRAMES, 64, 64)).latent_dist.mode()
    assert latents.shape == (1, 16, chunks.LATENT_FRAMES, chunks.LATENT_SIZE, chunks.LATENT_SIZE)
    assert vae.decode(latents).sample.shape == (1, 3, chunks.FRAMES, 64, 64)


class Stopped(Exception):
    pass


def test_a_stage_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    pool = Pool(torch.randn(8, 16, 36, 4, 4, generator=generator()).bfloat16(), torch.arange(8), *_unused())
    prompts = train.Prompts(forward.pack([torch.randn(3, 32, generator=generator())] * 41), templates=2)
    stage = train.Stage("s", 4, 2, 1e-3, 0.5)

    def run(name: str, *, stop_at: int | None = None) -> torch.Tensor:
        def write(line: str) -> None:
            if stop_at is not None and f" {stop_at}/4" in line:
                raise Stopped

        model = forward.prepare(components.build_transformer(0))
        snapshots = Snapshots(tmp_path / f"{name}.snapshot", every_s=0.0)
        progress = Progress("s", 1.0, 0.0, every_s=0.0, write=write)
        trained = train.run_stage(
            model, stage, steps=4, pool=pool, prompts=prompts, generator=generator(), progress=progress,
            snapshots=snapshots,
        )  # fmt: skip
        return trained.proj_out.weight

    expected = run("whole")
    with pytest.raises(Stopped):
        run("parts", stop_at=3)
    assert torch.equal(run("parts"), expected)


def _unused() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(16), torch.ones(16)


def test_a_finished_stage_is_not_computed_again_and_forgets_its_snapshot(tmp_path: Path) -> None:
    run = Run(tmp_path, 0, 1.0, True, {"s": 1.0})
    run.work.mkdir()
    snapshots = Snapshots(run.snapshots("s").path, every_s=0.0)
    snapshots.keep(lambda: {"step": 1})
    assert run.snapshots("s").load() == {"step": 1}
    assert run.stage("s", lambda: torch.ones(1)) == torch.ones(1)
    assert run.snapshots("s").load() is None
    assert run.stage("s", lambda: 1 / 0) == torch.ones(1)


def test_the_index_names_base_with_its_guider() -> None:
    index = export.index()
    assert (index["_class_name"], index["_blocks_class_name"]) == ("HeliosModularPipeline", "HeliosAutoBlocks")
    assert index["trained_sizes"] == [[64, 64]]
    assert index["guider"][1] == type(components.build_guider()).__name__


def test_seams_are_told_from_what_moves_within_chunks() -> None:
    frames = torch.arange(132.0)[:, None, None].expand(-1, 64, 64) / 1000
    jump = frames + (torch.arange(132) >= 33)[:, None, None] * 0.3
    seam, inner = evaluate.steps_between_frames([evaluate.Clip(0, jump.numpy())])
    assert (seam, inner) == (pytest.approx(0.101, abs=1e-4), pytest.approx(0.001, abs=1e-4))


def test_progress_of_a_resumed_stage_is_told_by_its_own_steps() -> None:
    now, lines = [0.0], []
    progress = Progress("s", 100.0, 0.0, every_s=0.0, now=lambda: now[0], write=lines.append)
    progress.resumed_at, now[0] = 90, 10.0
    progress.tick(94, 100)
    assert "95/100  2.000 s/it" in lines[0]
