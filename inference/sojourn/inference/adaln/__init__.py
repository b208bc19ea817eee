"""The AdaLN plan cache: modulation rows are projected once per schedule, so the projections need not be loaded.

A diffusion transformer modulates every block by rows that a linear layer projects from the timestep. These
projections are a large share of the weights and yet a pure function of a few numbers per step. Each step's numbers
are a `Plan`; the rows of a plan lie in a slot of the `Slab` on the device, in pages of the `HostTier`, and in files of
the `PlanStore` that the processes of a node share. `PlanCache.build` is the one way in.

    plans        what a step is conditioned on, and its key: exact bits
    table, slab  where a projection's rows lie; the buffers on the device
    slots        which plan holds which slot: free, reserved or published
    cache        the transaction over slab, host tier, store and projection
    projection   plans -> rows, streaming the weights once per build
    families     which modules, which inputs, which embedding
"""
