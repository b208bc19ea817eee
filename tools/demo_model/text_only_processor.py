"""A text-only stand-in for Qwen3-VL's processor.

The stock `Qwen3VLProcessor` cannot be constructed without torchvision, and text-to-video asks it
for one thing only: which tokens are text. The checkpoint's index names this class.
"""

from __future__ import annotations

from typing import Any

from transformers import ProcessorMixin


class TextOnlyProcessor(ProcessorMixin):
    """Carries the tokenizer and calls every token text."""

    def __init__(self, tokenizer: Any = None, **_: Any) -> None:
        super().__init__(tokenizer)

    def create_mm_token_type_ids(self, input_ids: list[list[int]]) -> list[list[int]]:
        """Return type 0 (text) for every token of every sequence."""
        return [[0] * len(ids) for ids in input_ids]
