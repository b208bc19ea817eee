"""Decoded media → the reference types that the model's blocks take.

MiniMax-H3 is the one family with references. Imports diffusers, and torch with it: not before the model is there.
"""

from typing import Any

from PIL import Image
from sojourn.inference.server.media import Audio, Video


def as_reference(medium: Image.Image | Video | Audio) -> Any:
    """Wraps a decoded medium in diffusers' reference of its kind."""
    import torch
    from diffusers.modular_pipelines.minimax_h3 import references

    if isinstance(medium, Video):
        return references.MiniMaxH3VideoReference(
            frames=medium.frames,
            fps=medium.frames_per_second,
            audio=None if medium.audio is None else torch.from_numpy(medium.audio),
            sample_rate=medium.sample_rate,
        )
    if isinstance(medium, Audio):
        return references.MiniMaxH3AudioReference(
            audio=torch.from_numpy(medium.samples), sample_rate=medium.sample_rate
        )
    return references.MiniMaxH3ImageReference(image=medium)
