"""The seeded recipe behind the demo checkpoint: a tiny, real-architecture MiniMax-H3.

One command trains every component on a CPU and writes a diffusers modular folder:

    python -m tools.demo_model -o DIR

Parts, each one concept: `data` (what is shown), `components` (what is trained), `audio`, `vae`,
`latents`, `dit` (how a batch runs through the transformer), `train` (the transformer's stages),
`export`, `evaluate`, and `__main__`, which strings them together and resumes.
"""
