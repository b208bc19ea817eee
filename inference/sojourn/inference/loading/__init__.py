"""A model folder on disk → components whose weights are read-only mappings of their safetensors files.

`safetensors_file` checks one file by its header, `folder` the whole folder (both without torch, so that the folder can
be inspected by headers alone), `mapping` maps a checked file, `components` builds what the pipeline runs.
"""
