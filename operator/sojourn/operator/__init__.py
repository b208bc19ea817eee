"""The operator: custom resources of group sojourn.dev to Helm releases, and the truth about them in their status.

From the outside in: `cli` starts `process`, which wires kopf as an informer (`informer`) to a keyed queue
(`queueing`) whose workers call `reconcile`. What is wanted is computed by `desired`, what is there is read through
`kube` and `records`, and `helm` is the only program that is ever run. `resources` holds the three kinds; their
schemas and their documentation are generated from it.
"""
