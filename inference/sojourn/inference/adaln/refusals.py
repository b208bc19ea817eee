"""What the plan cache refuses, by name."""

from enum import StrEnum

from sojourn.inference.errors import SojournError, Unsupported


class RequestReason(StrEnum):
    """Why a request is refused; the values of the metric label `reason`."""

    TOO_MANY_PLANS = "too_many_plans"
    TOO_WIDE = "too_wide"
    NONFINITE = "nonfinite"
    ROWS_DIFFER = "rows_differ"


class PlansRefused(Unsupported):
    """The plans of a request cannot be held; nothing was touched.

    Attributes:
        reason: Label of the counter of refused requests.
    """

    def __init__(self, reason: RequestReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ModelReason(StrEnum):
    """Why a model is served without the cache; the values of the label `off_reason`."""

    NO_PROJECTION = "no_projection"
    QUANTISED = "quantised"
    FP8_CAST = "fp8_cast"
    ADAPTER = "adapter"
    PER_TOKEN_TIMESTEPS = "per_token_timesteps"
    COMPILED = "compiled"
    COSTS_MORE = "costs_more"
    ROWS_NOT_REUSED = "rows_not_reused"
    VARIANT = "variant"
    NO_BLOCKS = "no_blocks"
    OTHER_FAMILY = "other_family"
    SETTING = "setting"


class ModelRefused(Unsupported):
    """The model, as it is loaded, cannot be served from the cache.

    Attributes:
        reason: Label of the info metric; with the setting `auto` the cache is off for this reason.
    """

    def __init__(self, reason: ModelReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class SettingRefused(SojournError):
    """A setting of the cache is wrong; the message names it, its value and what is valid."""

    def __init__(self, setting: str, value: object, valid: str) -> None:
        super().__init__(f"{setting} is {value!r}: {valid}")
        self.setting = setting


class PlanMissing(SojournError):
    """A forward runs on conditioning inputs whose plan no request has prepared."""


class BuildFailedElsewhere(SojournError):
    """Another rank failed in this build, so it failed on all of them; the next request may retry."""


class WeightsChanged(SojournError):
    """A checkpoint file is no longer the one that was opened; `PlanCache.invalidate` binds the cache to the new one."""
