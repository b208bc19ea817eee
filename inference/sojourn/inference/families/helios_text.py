"""What Helios' transformer makes of a prompt, made once per request instead of at every step."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_helios import HeliosAttention, HeliosAttnProcessor

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


def _once(module: Any, text: torch.Tensor, make: Callable[[torch.Tensor], Any]) -> Any:
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
        attended = dispatch_attention_fn(
            query,
            keys,
            values,
            attn_mask=attention_mask,
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
            parallel_config=None,
        )
        attended = attended.flatten(2, 3).type_as(query)
        return attn.to_out[1](attn.to_out[0](attended))


def _keys_and_values(attn: HeliosAttention, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys = attn.norm_k(attn.to_k(text)).unflatten(2, (attn.heads, -1))
    return keys, attn.to_v(text).unflatten(2, (attn.heads, -1))


def keep_text(transformer: Any) -> None:
    """Lets a transformer make the embedding, keys and values of a prompt once per request."""
    embedder = transformer.condition_embedder.text_embedder
    embedder.forward = functools.partial(_once, embedder, make=type(embedder).forward.__get__(embedder))
    for block in transformer.blocks:
        block.attn2.set_processor(TextAttention())
