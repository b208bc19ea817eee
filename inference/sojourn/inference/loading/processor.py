"""A processor for Qwen-VL text encoders that needs no torchvision.

The stock class cannot be built without torchvision, because its video half cannot, although most of what the pipeline
asks of it is text and pictures. This one stands in where the stock one cannot be built: token types always, pictures
through transformers' own PIL image processor where the folder configures one, videos never.
"""

import json
from pathlib import Path
from typing import Any

from sojourn.inference.errors import ModelError
from sojourn.inference.loading import errors

_TEXT, _IMAGE, _VIDEO = 0, 1, 2


class TextOnlyProcessor:
    """What MiniMax-H3's blocks call of a Qwen-VL processor, without its video half.

    Attributes:
        tokenizer: The tokenizer that knows the ids of the padding tokens.
        image_processor: transformers' PIL image processor; None where the folder configures none.
        video_processor: None; there so that code can ask for it.
    """

    def __init__(self, tokenizer: Any, image_processor: Any = None) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.video_processor = None
        self._kinds = {
            tokenizer.convert_tokens_to_ids("<|image_pad|>"): _IMAGE,
            tokenizer.convert_tokens_to_ids("<|video_pad|>"): _VIDEO,
        }

    def create_mm_token_type_ids(self, input_ids: list[list[int]]) -> list[list[int]]:
        """Returns 0 for each text token, 1 for image and 2 for video padding, in the shape of `input_ids`."""
        return [[self._kinds.get(token, _TEXT) for token in tokens] for tokens in input_ids]


def build_processor(library: str, class_name: str, path: Path) -> Any:
    """Builds the processor of a folder: the stock one, or the stand-in where that cannot be.

    Raises:
        ModelError: The class is not one that can be stood in for.
    """
    import transformers

    stock = getattr(transformers, class_name, None) if library == "transformers" else None
    if stock is None and class_name != TextOnlyProcessor.__name__:
        raise ModelError(errors.CLASS_UNKNOWN, path, f"{library}.{class_name} is not installed")
    if stock is not None:
        try:
            return stock.from_pretrained(path, local_files_only=True)
        except ImportError:
            if not class_name.startswith("Qwen"):
                raise
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    return TextOnlyProcessor(tokenizer, _image_processor(path))


def _image_processor(path: Path) -> Any:
    if not _configures_images(path):
        return None
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(path, local_files_only=True)


def _configures_images(path: Path) -> bool:
    """Whether the folder says how pictures are prepared: in a file of its own, or, newer, in the processor's."""
    if (path / "preprocessor_config.json").exists():
        return True
    config = path / "processor_config.json"
    return config.exists() and "image_processor" in json.loads(config.read_text("utf-8"))
