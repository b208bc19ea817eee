"""What can be wrong with a model folder, by reason.

A reason is one CamelCase word: it becomes the state reason of the service, a label of metrics and a condition of the
operator, so it never changes its spelling.
"""

from pathlib import Path

from sojourn.inference.errors import ModelError


class WeightsError(ModelError):
    """A weight file, or a tensor in it, is not what it should be.

    Attributes:
        expected: What should be there.
        found: What is there.
    """

    def __init__(self, reason: str, path: Path, what: str, *, expected: str, found: str, remedy: str) -> None:
        super().__init__(reason, path, f"{what}: expected {expected}, found {found}; {remedy}")
        self.expected = expected
        self.found = found


WEIGHTS_TRUNCATED = "WeightsTruncated"
WEIGHTS_TRAILING_BYTES = "WeightsTrailingBytes"
WEIGHTS_HEADER_INVALID = "WeightsHeaderInvalid"
WEIGHTS_HEADER_TOO_LARGE = "WeightsHeaderTooLarge"
WEIGHTS_NOT_SAFETENSORS = "WeightsNotSafetensors"
WEIGHTS_LFS_POINTER = "WeightsLfsPointer"
WEIGHTS_HTML = "WeightsHtml"
WEIGHTS_MISSING = "WeightsMissing"
WEIGHTS_SHARD_MISSING = "WeightsShardMissing"
WEIGHTS_UNREADABLE = "WeightsUnreadable"
WEIGHTS_CHANGED = "WeightsChanged"
TENSOR_MISSING = "TensorMissing"
TENSOR_UNEXPECTED = "TensorUnexpected"
TENSOR_SHAPE_MISMATCH = "TensorShapeMismatch"
TENSOR_DTYPE_MISMATCH = "TensorDtypeMismatch"
TENSOR_DUPLICATE = "TensorDuplicate"
INDEX_MISSING = "IndexMissing"
INDEX_INVALID = "IndexInvalid"
CONFIG_MISSING = "ConfigMissing"
CONFIG_INVALID = "ConfigInvalid"
COMPONENT_MISSING = "ComponentMissing"
PATH_ESCAPES = "PathEscapes"
CLASS_UNKNOWN = "ClassUnknown"
FAMILY_UNKNOWN = "FamilyUnknown"
