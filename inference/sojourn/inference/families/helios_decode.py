"""Helios' decode step, with exactly the frames that were asked for."""

from typing import Any

import torch
from diffusers.modular_pipelines.helios.decoders import HeliosDecodeStep
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam
from sojourn.inference.watch import WATCH_INPUT, Watch


class DecodeExactly(HeliosDecodeStep):
    """Decodes chunk by chunk as the stock step does, and gives exactly the frames that were asked for.

    The stock step cuts what the chunks give to a multiple of four plus one, whatever was asked for (34 frames give 65,
    99 give 97). Frames that both give are equal bit for bit.
    """

    @property
    def inputs(self) -> list[InputParam]:
        """Those of the stock step, and the watch, which is asked between two chunks."""
        watch = InputParam(name=WATCH_INPUT, type_hint=Watch, required=True, description="Who watches the request.")
        return [*super().inputs, watch]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        """Leaves `videos`: [1, F, H, W, 3] float32 in 0..1, F as asked for."""
        block_state = self.get_block_state(state)
        frames = _decoded(components, block_state.latent_chunks, block_state.num_frames, block_state[WATCH_INPUT])
        block_state.videos = components.video_processor.postprocess_video(frames, output_type=block_state.output_type)
        self.set_block_state(state, block_state)
        return components, state


def _decoded(components: Any, chunks: list[torch.Tensor], frames: int, watch: Watch) -> torch.Tensor:
    """[1, 3, frames, H, W] of the latents [1, C, 9, h, w] of each chunk, by the arithmetic of the stock step."""
    vae, device = components.vae, components._execution_device
    shape, place = (1, vae.config.z_dim, 1, 1, 1), (device, vae.dtype)
    mean = torch.tensor(vae.config.latents_mean).view(*shape).to(*place)
    scale = 1.0 / torch.tensor(vae.config.latents_std).view(*shape).to(*place)
    decoded = []
    for latents in chunks:
        decoded.append(vae.decode(latents.to(device=device, dtype=vae.dtype) / scale + mean, return_dict=False)[0])
        watch.check()
    return torch.cat(decoded, dim=2)[:, :, :frames]
