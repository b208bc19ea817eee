"""One command from nothing to an evaluated checkpoint of Helios.

    python -m tools.demo_model.helios -o DIR [--seed 0] [--scale 1.0] [--resume] [--ship]

Each stage leaves a file in DIR/work and a snapshot every two minutes, and `--resume` goes on after the last of them.
`--ship` trains no further and exports the best that is there: the last finished stage, or the running average of the
one under way.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tools.demo_model import data
from tools.demo_model.components import round_to_bf16
from tools.demo_model.helios import codec, components, evaluate, export, forward, latents, train
from tools.demo_model.latents import Pool
from tools.demo_model.progress import clock
from tools.demo_model.run import Run

CHECKPOINT = "helios-digits"
VAE_STEPS = 600
DECODER_STEPS = 500
POOL_CLIPS = 500
CLIPS_PER_DIGIT = 3

# Seconds of each part on one core of the reference machine; only the estimate of the time left depends on them.
REFERENCE_S = {"vae": 300.0, "pool": 65.0, "s0": 270.0, "s1": 540.0, "s2": 320.0, "decoder": 200.0}


def train_vae(run: Run) -> Any:
    """The video VAE, trained and rounded to its stored precision."""
    model = components.build_vae(run.stage_seed("vae"))

    def compute() -> dict[str, torch.Tensor]:
        steps = run.sized(VAE_STEPS)
        codec.train(model, steps, run.generator("vae"), run.progress("vae"), run.snapshots("vae"))
        round_to_bf16(model)
        psnr = codec.psnr_db(model, 2, run.seed)
        print(f"vae      held-out PSNR {float(psnr.mean()):.1f} dB", flush=True)
        return model.state_dict()

    model.load_state_dict(run.stage("vae", compute))
    return model.eval().requires_grad_(False)


def polish_decoder(run: Run, vae: Any, *, ship: bool) -> None:
    """Train the decoder further, last of all: the latents that the transformer has learnt stay what they are."""
    vae.requires_grad_(True)

    def compute() -> dict[str, torch.Tensor]:
        steps = run.sized(DECODER_STEPS)
        codec.train(
            vae, steps, run.generator("decoder"), run.progress("decoder"), run.snapshots("decoder"), freeze_encoder=True
        )
        round_to_bf16(vae)
        return vae.state_dict()

    if not ship or (run.work / "decoder.pt").exists():
        vae.load_state_dict(run.stage("decoder", compute))
    elif (kept := run.snapshots("decoder").load()) is not None:
        vae.load_state_dict(kept["model"])
    vae.eval().requires_grad_(False)


def encode_pool(run: Run, vae: Any) -> Pool:
    """The latent pool; its statistics go into the codec's config."""

    def compute() -> dict[str, torch.Tensor]:
        clips = run.sized(POOL_CLIPS)
        return vars(latents.encode_pool(vae, clips, run.generator("pool"), run.progress("pool")))

    pool = Pool(**run.stage("pool", compute))
    vae.register_to_config(latents_mean=pool.mean.tolist(), latents_std=pool.std.tolist())
    return pool


def embed_prompts(text_encoder: Any, tokenizer: Any) -> train.Prompts:
    """The conditioning of every prompt, the empty one last."""
    texts = [*data.prompts(), ""]
    embedded = [components.embed_prompt(text_encoder, tokenizer, text) for text in texts]
    return train.Prompts(forward.pack(embedded), len(data.TEMPLATES))


def train_transformer(run: Run, pool: Pool, prompts: train.Prompts, *, ship: bool) -> Any:
    """The transformer, through all of its stages, or as far as they got."""
    model = components.build_transformer(run.stage_seed("transformer"))
    print(f"training forward equals stock within {forward.check_equals_stock(model):.1e}", flush=True)
    for stage in train.STAGES:
        if ship and not (run.work / f"{stage.name}.pt").exists():
            if (kept := run.snapshots(stage.name).load()) is not None:
                model.load_state_dict(kept["average"])
                print(f"{stage.name:8} shipped at step {kept['step']}", flush=True)
            break

        def compute(stage: train.Stage = stage) -> dict[str, torch.Tensor]:
            return train.run_stage(
                model,
                stage,
                steps=run.sized(stage.steps),
                pool=pool,
                prompts=prompts,
                generator=run.generator(stage.name),
                progress=run.progress(stage.name),
                snapshots=run.snapshots(stage.name),
            ).state_dict()

        model.load_state_dict(run.stage(stage.name, compute))
    difference = forward.check_equals_stock(model, tolerance=1e-2)
    print(f"trained forward equals stock within {difference:.1e}", flush=True)
    return forward.restore(model)


def build(run: Run, *, ship: bool) -> Path:
    """Train whatever is missing and write the checkpoint; return its folder."""
    vae = train_vae(run)
    pool = encode_pool(run, vae)
    tokenizer = components.build_tokenizer()
    text_encoder = components.build_text_encoder(run.stage_seed("text"))
    transformer = train_transformer(run, pool, embed_prompts(text_encoder, tokenizer), ship=ship)
    polish_decoder(run, vae, ship=ship)
    folder = run.folder / CHECKPOINT
    export.save(export.Parts(transformer, vae, text_encoder, tokenizer), folder)
    return folder


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.helios", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="share of steps and clips; 0.01 is a smoke run")
    parser.add_argument("--resume", action="store_true", help="keep what is finished, and the last snapshot")
    parser.add_argument("--ship", action="store_true", help="train no further, export what is there; implies --resume")
    return parser.parse_args()


def main() -> None:
    """Run the command."""
    arguments = parse_arguments()
    resume = arguments.resume or arguments.ship
    run = Run(arguments.output, arguments.seed, arguments.scale, resume, REFERENCE_S)
    if run.work.exists() and not resume:
        shutil.rmtree(run.work)
    run.work.mkdir(parents=True, exist_ok=True)
    folder = build(run, ship=arguments.ship)
    for name, seconds in run.seconds.items():
        print(f"{name:8} {clock(seconds)}")
    print(f"total    {clock(sum(run.seconds.values()))}, checkpoint in {folder}", flush=True)
    report = evaluate.evaluate(folder, run.folder, run.sized(CLIPS_PER_DIGIT, least=1))
    print(asdict(report), flush=True)


if __name__ == "__main__":
    main()
