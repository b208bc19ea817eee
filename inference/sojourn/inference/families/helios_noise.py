"""The block noise of Helios' pyramid, also where the stock function has no factor for it."""

from typing import Any

import torch
from diffusers.modular_pipelines.helios import denoise

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
