"""One command from nothing to an evaluated checkpoint.

    python -m tools.demo_model -o DIR [--seed 0] [--scale 1.0] [--resume]

Each stage leaves a file in DIR/work, and `--resume` goes on after the last one that is complete. A
stage's random numbers depend on the seed and the stage's name alone, so resuming changes nothing.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch

from tools.demo_model import audio, components, data, dit, evaluate, export, latents, train, vae
from tools.demo_model.progress import clock
from tools.demo_model.run import Run

CHECKPOINT = "h3-digits"
AUDIO_STEPS = 350
VAE_STEPS = 1220
VAE_DECODER_STEPS = 155
POOL_CLIPS = 2400
CLIPS_PER_DIGIT = 3

# Seconds each part takes at scale 1 on the reference machine (2 cores, bfloat16 without AMX).
# Only the estimate of the time left depends on them.
REFERENCE_S = {
    "audio": 105.0,
    "vae": 520.0,
    "decoder": 120.0,
    "pool": 180.0,
    "s0": 480.0,
    "s1a": 550.0,
    "s1b": 540.0,
    "s2": 620.0,
    "s3": 330.0,
}


def train_audio(run: Run, codes: torch.Tensor) -> Any:
    """The audio VAE, trained."""
    model = components.build_audio_vae(run.stage_seed("audio"))

    def compute() -> dict[str, torch.Tensor]:
        steps = run.sized(AUDIO_STEPS)
        audio.train(model, codes, steps, run.generator("audio"), run.progress("audio"))
        return model.state_dict()

    model.load_state_dict(run.stage("audio", compute))
    return model


def train_vae(run: Run) -> Any:
    """The video VAE, trained and rounded to its stored precision."""
    model = components.build_vae(run.stage_seed("vae"))

    def compute() -> dict[str, torch.Tensor]:
        generator = run.generator("vae")
        steps, decoder_steps = run.sized(VAE_STEPS), run.sized(VAE_DECODER_STEPS)
        vae.train_jointly(model, steps, generator, run.progress("vae"))
        vae.train_decoder(model, decoder_steps, generator, run.progress("decoder"))
        components.round_to_bf16(model)
        psnr = vae.psnr_db(model, 2, run.seed)
        print(f"vae      held-out PSNR {float(psnr.mean()):.1f} dB", flush=True)
        return model.state_dict()

    model.load_state_dict(run.stage("vae", compute))
    return model.eval().requires_grad_(False)


def encode_pool(run: Run, codec: Any) -> latents.Pool:
    """The latent pool; its statistics go into the codec's config."""

    def compute() -> dict[str, torch.Tensor]:
        clips = run.sized(POOL_CLIPS)
        pool = latents.encode_pool(codec, clips, run.generator("pool"), run.progress("pool"))
        return vars(pool)

    pool = latents.Pool(**run.stage("pool", compute))
    codec.register_to_config(latents_mean=pool.mean.tolist(), latents_std=pool.std.tolist())
    return pool


def embed_prompts(text_encoder: Any, tokenizer: Any) -> tuple[torch.Tensor, ...]:
    """The conditioning of every prompt: per template `(2, 10, tokens, 32)`."""

    def embed(template: str, names: tuple[str, ...]) -> torch.Tensor:
        prompts = [template.format(name) for name in names]
        return torch.stack([components.embed_prompt(text_encoder, tokenizer, prompt) for prompt in prompts])

    return tuple(
        torch.stack([embed(template, data.WORDS), embed(template, data.NUMERALS)]) for template in data.TEMPLATES
    )


def train_transformer(run: Run, pool: latents.Pool, conditioning: train.Conditioning) -> Any:
    """The transformer, through all of its stages."""
    model = components.build_transformer(run.stage_seed("transformer"))
    print(f"training forward equals stock within {dit.check_equals_stock(model):.1e}", flush=True)
    for stage in train.STAGES:

        def compute(stage: train.Stage = stage) -> dict[str, torch.Tensor]:
            return train.run_stage(
                model,
                stage,
                steps=run.sized(stage.steps),
                pool=pool,
                conditioning=conditioning,
                generator=run.generator(stage.name),
                progress=run.progress(stage.name),
            ).state_dict()

        weights = run.stage(stage.name, compute)
        model.load_state_dict(weights)
    difference = dit.check_equals_stock(model, tolerance=1e-3)
    print(f"trained forward equals stock within {difference:.1e}", flush=True)
    return model


def build(run: Run) -> Path:
    """Train whatever is missing and write the checkpoint; return its folder."""
    codes = audio.draw_codes(run.stage_seed("codes"))
    audio_vae = train_audio(run, codes)
    codec = train_vae(run)
    pool = encode_pool(run, codec)
    tokenizer = components.build_tokenizer()
    text_encoder = components.build_text_encoder(run.stage_seed("text"))
    conditioning = train.Conditioning(codes, embed_prompts(text_encoder, tokenizer))
    transformer = train_transformer(run, pool, conditioning)
    folder = run.folder / CHECKPOINT
    export.save(export.Parts(transformer, codec, audio_vae, text_encoder, tokenizer), folder)
    return folder


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="share of steps and clips; 0.01 is a smoke run")
    parser.add_argument("--resume", action="store_true", help="keep the stages already finished")
    return parser.parse_args()


def main() -> None:
    """Run the command."""
    arguments = parse_arguments()
    run = Run(arguments.output, arguments.seed, arguments.scale, arguments.resume, REFERENCE_S)
    if run.work.exists() and not run.resume:
        shutil.rmtree(run.work)
    run.work.mkdir(parents=True, exist_ok=True)
    folder = build(run)
    for name, seconds in run.seconds.items():
        print(f"{name:8} {clock(seconds)}")
    print(f"total    {clock(sum(run.seconds.values()))}, checkpoint in {folder}", flush=True)
    report = evaluate.evaluate(folder, run.folder, run.sized(CLIPS_PER_DIGIT, least=1))
    print(report, flush=True)


if __name__ == "__main__":
    main()
