"""Which modules stay in float32 when a model is loaded in bfloat16: each library's own rule."""

from typing import Any

# transformers has two lists: one that counts for float16 alone, and the strict one that counts for bfloat16 as well.
_ATTRIBUTES = {"diffusers": "_keep_in_fp32_modules", "transformers": "_keep_in_fp32_modules_strict"}


def kept_in_float32(library: str, model: Any) -> frozenset[str]:
    """Names of the modules that a model, or its class, keeps in float32 whatever it is loaded in.

    Args:
        library: "diffusers" or "transformers"; of others nothing is known.
        model: The model or its class.
    """
    return frozenset(getattr(model, _ATTRIBUTES.get(library, ""), None) or ())
