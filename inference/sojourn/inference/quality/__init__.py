"""Quality tiers: what a request's tier puts on a transformer, and what it takes off again.

`settings` says what may be; `fusions/` are kernels beside their references; `sites` is the table of the modules that
they go to, `blocks/` the forwards of those; `speed` measures whether a fusion pays on a device; `step_cache` skips
evaluations within the error that `measured` knows; `mounts` changes a transformer from tier to tier; `turns` keeps
requests of different tiers apart; `quality` is what the pipeline holds.
"""
