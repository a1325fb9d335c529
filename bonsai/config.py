"""Reading untrusted JSON objects strictly, and the config types that architectures share.

Knows how to take typed values out of a mapping and to refuse what nobody took. Does not know any
architecture: each file in `models/` reads its own `Config` from `Fields`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from bonsai.errors import UnsupportedModel

__all__ = ["DeltaSpec", "Fields", "RopeSpec", "StateSpec", "Yarn", "read_rope"]

T = TypeVar("T", int, float, str, bool)
_MISSING: Any = object()


class Fields:
    """The keys of one JSON object, each taken at most once; `finish` refuses leftovers.

    `where` names the object in errors, e.g. "config.json: rope".
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        if not isinstance(values, Mapping):
            raise UnsupportedModel(f"{where}: expected an object, found {_shown(values)}")
        self._values = dict(values)
        self.where = where

    def take(self, kind: type[T], key: str, default: T | None = _MISSING) -> T:
        """The value of `key` as `kind`; an int is taken for a float, a bool never for a number."""
        value = self._values.pop(key, _MISSING)
        if value is _MISSING:
            if default is _MISSING:
                raise UnsupportedModel(f"{self.where}: '{key}' is missing")
            return default  # type: ignore[return-value]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 2**1023 else math.inf
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UnsupportedModel(
                f"{self.where}: '{key}' is {_shown(value)}, expected {kind.__name__}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise UnsupportedModel(f"{self.where}: '{key}' is {value}, expected a finite number")
        return value

    def take_size(self, key: str, limit: int = 2**31) -> int:
        """A positive int below `limit`: a width, a count, a number of rows."""
        value = self.take(int, key)
        if not 0 < value < limit:
            raise UnsupportedModel(f"{self.where}: '{key}' is {value}, expected 1 to {limit - 1}")
        return value

    def take_object(self, key: str) -> Fields | None:
        """A nested object, or None when it is absent or null."""
        value = self._values.pop(key, None)
        return None if value is None else Fields(value, f"{self.where}: {key}")

    def take_any(self, key: str, default: Any = None) -> Any:
        """The raw value, for the few keys whose shape varies; the caller checks it."""
        return self._values.pop(key, default)

    def require(self, key: str, *accepted: Any) -> None:
        """Refuse every value of `key` but the accepted ones; an absent key is accepted."""
        value = self._values.pop(key, accepted[0])
        if value not in accepted:
            wanted = ", ".join(repr(a) for a in accepted)
            raise UnsupportedModel(f"{self.where}: '{key}' is {_shown(value)}; supported: {wanted}")

    def ignore(self, *keys: str) -> None:
        """Drop keys that cannot change the maths of inference."""
        for key in keys:
            self._values.pop(key, None)

    def finish(self) -> None:
        """Refuse the keys that nobody took."""
        if self._values:
            unknown = ", ".join(sorted(map(str, self._values)))
            raise UnsupportedModel(
                f"{self.where}: unknown keys: {unknown}",
                hint="written by a newer version? upgrade bonsai-lm, or convert the model again",
            )


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN scaling of the rotary frequencies; always on, from position 0.

    `factor` stretches `original_context`; pairs that turn more than `beta_fast` times within it
    keep their frequency, those under `beta_slow` are divided by `factor`, and a ramp joins the two.
    `attention_factor` multiplies cos and sin (0.1 ln(factor) + 1 when a checkpoint does not say).
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `dims` of each head, pairs (i, i + dims/2)."""

    theta: float
    dims: int
    yarn: Yarn | None = None

    def frequencies(self) -> list[float]:
        """Radians per position of the dims/2 pairs (YaRN: arXiv 2309.00071, section 3.4)."""
        half = self.dims // 2
        plain = [self.theta ** (-2.0 * i / self.dims) for i in range(half)]
        if self.yarn is None:
            return plain
        y = self.yarn
        low = max(math.floor(self._pair_turning(y.beta_fast)), 0)
        high = min(math.ceil(self._pair_turning(y.beta_slow)), self.dims - 1)
        width = max(high - low, 0.001)
        ramp = [min(max((i - low) / width, 0.0), 1.0) for i in range(half)]
        return [f * (1.0 - r) + f / y.factor * r for f, r in zip(plain, ramp, strict=True)]

    def _pair_turning(self, turns: float) -> float:
        """The (fractional) index of the pair that turns `turns` times within original_context."""
        assert self.yarn is not None
        span = self.yarn.original_context / (turns * 2.0 * math.pi)
        return self.dims * math.log(span) / (2.0 * math.log(self.theta))

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0 if self.yarn is None else self.yarn.attention_factor


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """The recurrent memory of the gated delta layers of one conversation.

    Each of `layers` keeps the last `taps` - 1 inputs of its convolution over `channels`, and a
    [key_dim, value_dim] matrix for each of `heads`. All of it is float32, whatever the weights are:
    in half precision it decays into repetition.
    """

    layers: int
    channels: int
    taps: int
    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a backend must remember of one conversation.

    Keys and values [kv_heads, head_dim] of every token for `kv_layers` layers, and a memory of
    fixed size where `delta` is not None. Layers of each kind are counted from 0 by themselves.
    """

    kv_layers: int
    kv_heads: int
    head_dim: int
    delta: DeltaSpec | None = None


def read_rope(fields: Fields, head_dim: int) -> RopeSpec:
    """A RopeSpec from {"theta", "dims", "yarn"}."""
    theta = fields.take(float, "theta")
    dims = fields.take_size("dims")
    scaling = fields.take_object("yarn")
    fields.finish()
    if theta <= 1.0 or dims % 2 or dims > head_dim:
        raise UnsupportedModel(
            f"{fields.where}: theta {theta} and dims {dims} do not fit heads of width {head_dim}"
        )
    if scaling is None:
        return RopeSpec(theta, dims)
    yarn = Yarn(
        factor=scaling.take(float, "factor"),
        original_context=scaling.take_size("original_context"),
        beta_fast=scaling.take(float, "beta_fast", 32.0),
        beta_slow=scaling.take(float, "beta_slow", 1.0),
        attention_factor=scaling.take(float, "attention_factor"),
    )
    scaling.finish()
    smallest = min(yarn.factor, yarn.beta_slow, yarn.attention_factor)
    if smallest <= 0 or yarn.beta_fast <= yarn.beta_slow:
        raise UnsupportedModel(f"{scaling.where}: {yarn} is not a valid scaling")
    return RopeSpec(theta, dims, yarn)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
