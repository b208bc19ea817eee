"""Weights larger than the memory that may hold them: budgets, stores, windows, page advice, and the memory plan.

The repeated layers of a component stream through a window, the rest stays; what streams is bit-equal to what stays.
Two kinds of device need two kinds of window. Where device and host have memories of their own, bytes are copied
(`stores`, `window`, `courier`). On the CPU, and where the device shares host memory, the weights are read where the
checkpoint is mapped, and the window consists of advice to the kernel about pages (`pages`).

Read in this order: `settings`, `budget`, `hosting` (what goes where), `memory_plan` (the same before anything is
loaded), `strategies` (when), then the two windows.
"""
