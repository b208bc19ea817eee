"""What each forward of a request will receive, known before the denoising loop: by family, from its modular blocks.

These are the expressions of the loops' denoisers (diffusers 0.42.1). Guiders run a forward for each side of the
guidance, in batches of their own; where no text enters, both sides are one plan.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from sojourn.inference.adaln.family import Inputs

Value = Callable[[str], Any]
Config = Mapping[str, Any]


def minimax_h3(value: Value, config: Config) -> list[Inputs]:
    """The distinct timesteps of each step, the very tensors that the loop hands to the transformer."""
    return [{"timestep": timestep} for timestep, _ in value("row_timestep_plan")]


def qwen_image(value: Value, config: Config) -> list[Inputs]:
    """Timesteps in the latents' dtype, divided in it; layered pipelines add an id."""
    extra = {"additional_t_cond": value("additional_t_cond")} if config.get("use_additional_t_cond") else {}
    return [{"timestep": timestep / 1000, **extra} for timestep in _as_latents(value)]


def flux(value: Value, config: Config) -> list[Inputs]:
    """Timesteps of extent 1 in the scheduler's dtype, with the pooled text of the batch; Kontext hands over others."""
    rest = {"pooled_projections": value("pooled_prompt_embeds"), "guidance": value("guidance")}
    return [{"timestep": timestep.flatten() / 1000, **rest} for timestep in value("timesteps")]


def sd3(value: Value, config: Config) -> list[Inputs]:
    """Timesteps in the scheduler's dtype, each with the pooled text of either side of the guidance."""
    names = ["pooled_prompt_embeds"]
    if value("negative_prompt_embeds") is not None:
        names.append("negative_pooled_prompt_embeds")
    batch = value("latents").shape[0]
    return [
        {"timestep": timestep.expand(batch), "pooled_projections": value(name)}
        for timestep in value("timesteps")
        for name in names
    ]


def hunyuan_video_15(value: Value, config: Config) -> list[Inputs]:
    """Timesteps in the latents' dtype; from an image with mean flow, also the next one, at last 0."""
    timesteps = list(_as_latents(value))
    if not config.get("use_meanflow") or value("image_latents") is None:
        return [{"timestep": timestep} for timestep in timesteps]
    following = [*timesteps[1:], torch.zeros_like(timesteps[-1])]
    return [{"timestep": now, "timestep_r": after} for now, after in zip(timesteps, following, strict=True)]


def _as_latents(value: Value) -> Iterator[torch.Tensor]:
    """The timesteps, each for all of the batch, [batch] in the latents' dtype."""
    latents = value("latents")
    return (timestep.expand(latents.shape[0]).to(latents.dtype) for timestep in value("timesteps"))
