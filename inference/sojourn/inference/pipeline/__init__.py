"""The stock diffusers modular pipeline of a model, with our blocks inserted, serving one request at a time or several.

`guards` are the inserted blocks, `workflow` inserts them, `pipeline` runs requests, `load` makes it all from a folder.
"""

from sojourn.inference.pipeline.load import DeviceChoice, Precision, load_pipeline
from sojourn.inference.pipeline.pipeline import ComponentSummary, Pipeline

__all__ = ["ComponentSummary", "DeviceChoice", "Pipeline", "Precision", "load_pipeline"]
