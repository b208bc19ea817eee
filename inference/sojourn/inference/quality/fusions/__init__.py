"""Fused kernels: each beside the reference that it stands for, with an implementation for each kind of device."""
