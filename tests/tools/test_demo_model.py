"""What the recipe promises before anything is trained; everything here runs in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tools.demo_model import components, data, dit, evaluate, export, train, vae
from tools.demo_model.progress import Progress, clock


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_split_is_1500_to_297_whatever_the_seed() -> None:
    train_glyphs, held_out = data.load_glyphs()
    assert (len(train_glyphs.digits), len(held_out.digits)) == (1500, 297)
    assert sorted(set(held_out.digits.tolist())) == list(range(10))


@pytest.mark.parametrize(("position", "folded"), [(0.0, 0.0), (10.0, 10.0), (32.0, 32.0), (33.0, 31.0), (-1.0, 1.0)])
def test_a_glyph_bounces_between_the_walls(position: float, folded: float) -> None:
    assert float(data.reflect(torch.tensor(position), 32.0)) == pytest.approx(folded)


def test_paths_stay_on_the_canvas() -> None:
    paths = data.random_paths(50, data.CLIP_FRAMES, generator())
    assert float(paths.min()) >= 0
    assert float(paths.max()) <= data.CANVAS_PX - data.GLYPH_PX


@pytest.mark.parametrize("shift", [0.0, 0.25, 0.5, 0.9])
def test_a_subpixel_shift_moves_the_ink_and_loses_none(shift: float) -> None:
    sprite = data.load_glyphs()[0].sprites[:1]
    at = torch.tensor([[[10.0, 10.0], [10.0, 10.0 + shift]]])
    still, moved = data.draw(sprite, at)[0]
    columns = torch.arange(data.CANVAS_PX)
    centre = [float((frame.sum(0) * columns).sum() / frame.sum()) for frame in (still, moved)]
    assert float(moved.sum()) == pytest.approx(float(still.sum()), rel=1e-5)
    assert centre[1] - centre[0] == pytest.approx(shift, abs=1e-4)


def test_pixels_survive_normalisation() -> None:
    grey = torch.rand(1, 2, 4, 4, generator=generator())
    assert torch.allclose(data.to_grey(data.to_pixels(grey)), grey, atol=1e-6)


@pytest.mark.parametrize("digit", range(10))
def test_every_digit_sounds_at_its_own_pitch(digit: int) -> None:
    wave = data.tones(torch.tensor([digit]), 40)[0, 0].numpy()
    heard = evaluate.spectral_peak_hz(wave, data.SAMPLE_RATE_HZ)
    assert heard == pytest.approx(data.tone_hz(digit), abs=1.0)
    matches = [evaluate.sounds_like(wave, data.SAMPLE_RATE_HZ, other) for other in range(10)]
    assert matches == [other == digit for other in range(10)]


def test_every_digit_name_is_one_token_so_that_a_template_has_one_length() -> None:
    tokenizer = components.build_tokenizer()
    for template in data.TEMPLATES:
        names = (*data.WORDS, *data.NUMERALS)
        tokens = [tokenizer(template.format(name))["input_ids"] for name in names]
        assert len({len(ids) for ids in tokens}) == 1
        assert len({tuple(ids) for ids in tokens}) == len(names)


def test_the_training_forward_equals_the_stock_forward() -> None:
    model = components.build_transformer(seed=1)
    for head in (model.proj_out, model.audio_proj_out):
        torch.nn.init.normal_(head.weight, std=0.1)
    assert dit.check_equals_stock(model) < 1e-5


def test_a_partial_layout_keeps_true_positions() -> None:
    full = dit.full_positions(3)
    rows = torch.tensor([5, 211])
    layout = dit.make_layout(3, rows, slice(6, 8))
    video = full[3 + dit.AUDIO_ROWS :][6 * 4 : 8 * 4]
    assert torch.equal(layout.position_ids, torch.cat([full[:3], full[3 + rows], video]))


def test_patches_are_in_the_order_of_the_pipeline() -> None:
    from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents

    latents = torch.randn(1, 16, 3, 4, 4, generator=generator())
    assert torch.equal(dit.patchify(latents)[0], patchify_video_latents(latents, (1, 2, 2)))


def test_chunked_encoding_equals_the_stock_encode() -> None:
    codec = components.build_vae(seed=0)
    grey, _ = data.draw_clips(data.load_glyphs()[0], 1, 39, generator())
    pixels = data.to_pixels(grey)
    with torch.no_grad():
        mean = vae.encode_moments(codec, pixels).chunk(2, dim=1)[0]
        assert torch.allclose(mean, codec.encode(pixels).latent_dist.mean, atol=1e-5)


def test_noise_levels_lie_on_the_samplers_curve() -> None:
    scheduler, audio_scheduler = components.build_schedulers()
    scheduler.set_timesteps(12)
    audio_scheduler.set_timesteps(12)
    video, audio = scheduler.sigmas, audio_scheduler.sigmas
    assert video is not None
    assert audio is not None
    u = train.unshifted(video, components.VIDEO_SHIFT)
    assert torch.allclose(train.shifted(u, components.AUDIO_SHIFT), audio, atol=1e-5)


def test_a_noisy_batch_leads_back_to_its_data() -> None:
    clean = torch.randn(4, 6, 8, generator=generator())
    sigma = torch.tensor([0.0, 0.3, 0.7, 1.0])
    noisy, velocity = train.add_noise(clean, sigma, generator(1))
    assert torch.allclose(noisy + sigma[:, None, None] * velocity, clean, atol=1e-5)


def test_the_judge_reads_digits_it_has_never_seen() -> None:
    judge = evaluate.train_judge()
    assert judge.held_out_accuracy > 0.97
    _, held_out = data.load_glyphs()
    paths = data.random_paths(1, data.CLIP_FRAMES, generator())
    clip = data.draw(held_out.sprites[:1], paths)[0].numpy()
    as_bytes = np.repeat((clip * 255).round().astype(np.uint8)[..., None], 3, axis=-1)
    digit = int(held_out.digits[0])
    assert judge.vote(clip).digit == judge.vote(as_bytes).digit == digit


def test_an_empty_frame_is_judged_without_an_error() -> None:
    assert not evaluate.crop(np.zeros((64, 64), np.float32)).any()


@pytest.mark.parametrize("folder", ["tokenizer", "vae", "processor"])
def test_the_index_names_no_place_outside_the_checkpoint(folder: str) -> None:
    entry = json.loads(json.dumps(export.index()))[folder][2]
    assert entry["pretrained_model_name_or_path"] == "."
    assert entry["subfolder"] == folder


def test_progress_estimates_this_stage_and_the_later_ones() -> None:
    seconds = iter([0.0, 30.0, 30.0, 30.0])
    lines: list[str] = []
    progress = Progress("s0", expected_s=60.0, later_s=60.0, now=lambda: next(seconds), write=lines.append)
    progress.tick(9, 40, video=0.5)
    assert clock(125) == "2:05"
    # Three seconds a step: thirty steps left are 90 s; twice as slow as expected, so 120 s later.
    assert "3.000 s/it" in lines[0]
    assert "stage 1:30 left, run 3:30 left" in lines[0]


def test_a_sheet_has_a_row_for_each_clip(tmp_path: Path) -> None:
    from PIL import Image

    frames = np.zeros((124, 64, 64), np.float32)
    clip = evaluate.Clip(7, 1000, frames, np.zeros((2, 32_000)), 32_000)
    evaluate.save_sheet([clip, clip], tmp_path / "sheet.png")
    assert Image.open(tmp_path / "sheet.png").size == (8 * 66, 2 * 66)
