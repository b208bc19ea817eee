"""What of Helios' pipeline is ours: the decode of exactly the frames asked for, text kept per request, block noise."""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from diffusers.models.transformers.transformer_helios import HeliosAttention, HeliosAttnProcessor
from diffusers.modular_pipelines.helios import denoise
from diffusers.modular_pipelines.helios.decoders import HeliosDecodeStep
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam
from sojourn.inference.watch import WATCH_INPUT, Watch

_stock_noise = denoise.sample_block_noise


def block_noise(
    batch: int, channels: int, frames: int, height: int, width: int, gamma: float, *rest: Any, **options: Any
) -> torch.Tensor:
    """The stock noise of a pyramid's levels; with a factor from float64 where the stock one does not exist.

    The covariance of a patch of four has the eigenvalues 1 + gamma and 1 - 3 gamma. At the released gamma of 1/3 the
    latter is 0, and the 1e-8 that the stock function adds is less than float32 holds beside 1: its Cholesky
    factorisation then fails, or not, by the last bit of a library. In float64 the same sum has a factor.
    """
    try:
        return _stock_noise(batch, channels, frames, height, width, gamma, *rest, **options)
    except torch.linalg.LinAlgError:
        return _noise_of(_factor(gamma), (batch, channels, frames, height, width), *rest, **options)


def _factor(gamma: float) -> torch.Tensor:
    """[4, 4] float32, lower triangular: the factor of the covariance of a patch of 2 × 2."""
    eye = torch.eye(4, dtype=torch.float64)
    covariance = eye * (1 + gamma + 1e-8) - torch.ones(4, 4, dtype=torch.float64) * gamma
    return torch.linalg.cholesky(covariance).float()


def _noise_of(
    factor: torch.Tensor,
    shape: tuple[int, int, int, int, int],
    patch_size: tuple[int, int, int] = (1, 2, 2),
    device: Any = None,
    generator: Any = None,
) -> torch.Tensor:
    """[B, C, F, H, W] float32, drawn in the order of the stock function."""
    batch, channels, frames, height, width = shape
    _, ph, pw = patch_size
    blocks = batch * channels * frames * (height // ph) * (width // pw)
    drawn = torch.randn(blocks, ph * pw, device=generator.device, generator=generator).to(device)
    noise = (drawn @ factor.to(device).T).view(batch, channels, frames, height // ph, width // pw, ph, pw)
    return noise.permute(0, 1, 2, 3, 5, 4, 6).reshape(shape)


# Names that the stock loops look up: the noise above, and a bar on stderr that nothing else turns off.
denoise.sample_block_noise = block_noise
denoise.tqdm = functools.partial(denoise.tqdm, disable=True)


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


Kept = dict[tuple[int, int], tuple[torch.Tensor, Any]]
_kept: ContextVar[Kept | None] = ContextVar("text_of_the_request", default=None)


@contextlib.contextmanager
def keeping_text() -> Iterator[None]:
    """While it is open, what a module makes of a prompt is made once."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def _once(module: Any, text: torch.Tensor, make: Any) -> Any:
    """What `make` gives for this very tensor, made once per request. The tensor is held, so its id stays its own."""
    kept = _kept.get()
    if kept is None:
        return make(text)
    key = (id(module), id(text))
    if key not in kept:
        kept[key] = (text, make(text))
    return kept[key][1]


class TextAttention(HeliosAttnProcessor):
    """The stock cross-attention, with keys and values of the text made once per request.

    Equal bit for bit: the same products on the same tensors, done once instead of at every step.
    """

    def __call__(
        self,
        attn: HeliosAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
        original_context_length: int | None = None,
    ) -> torch.Tensor:
        """Attends from `hidden_states` [B, S, D] to `encoder_hidden_states` [B, T, D]."""
        keys, values = _once(attn, encoder_hidden_states, functools.partial(_keys_and_values, attn))
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        attended = denoise_attention(
            query, keys, values, attn_mask=attention_mask, backend=self._attention_backend,
        )  # fmt: skip
        attended = attended.flatten(2, 3).type_as(query)
        return attn.to_out[1](attn.to_out[0](attended))


def denoise_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any) -> torch.Tensor:
    """The stock dispatch, with the arguments of the stock processor."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    return dispatch_attention_fn(query, keys, values, dropout_p=0.0, is_causal=False, parallel_config=None, **options)


def _keys_and_values(attn: HeliosAttention, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys = attn.norm_k(attn.to_k(text)).unflatten(2, (attn.heads, -1))
    return keys, attn.to_v(text).unflatten(2, (attn.heads, -1))


def keep_text(transformer: Any) -> None:
    """Lets a transformer make the embedding, keys and values of a prompt once per request."""
    embedder = transformer.condition_embedder.text_embedder
    embedder.forward = functools.partial(_once, embedder, make=type(embedder).forward.__get__(embedder))
    for block in transformer.blocks:
        block.attn2.set_processor(TextAttention())
