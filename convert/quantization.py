"""How a Hugging Face or MLX folder stores its linears, from the keys of its config.json.

Knows `quantization_config` and `quantization`. Does not know tensors or architectures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bonsai.config import Fields
from bonsai.errors import UnsupportedModel

__all__ = ["Quantization", "read_quantization"]

MLX_BITS, MLX_GROUPS = (1, 2, 3, 4, 5, 6, 8), (32, 64, 128)
BITNET_MODES = (
    ("bitlinear", "offline"), ("autobitlinear", "offline"), ("autobitlinear", "online"),
)  # fmt: skip
PLAIN_NAME = re.compile(r"[\w.-]+")  # the key may also be a pattern, which we do not run


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the linears of a folder are stored. `method`: "none", "bitnet" or "mlx".

    bitnet: `divide` says that weights are trits divided by weight_scale, not multiplied; `online`
    that linears hold the weights of training, to be rounded to trits, but for the modules `kept`.
    mlx: `bits` and `group` of every packed module but those in `modules`.
    """

    method: str = "none"
    divide: bool = False
    online: bool = False
    kept: tuple[str, ...] = ()
    bits: int = 0
    group: int = 0
    modules: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def affine(self, module: str) -> tuple[int, int]:
        """(bits, group) of a packed module."""
        return self.modules.get(module, (self.bits, self.group))

    def rounds(self, module: str) -> bool:
        """Whether a linear that holds float weights has to be rounded to trits."""
        return self.online and not any(
            module.endswith(key) or module.startswith(key + ".") for key in self.kept
        )


def read_quantization(fields: Fields) -> Quantization:
    """`quantization_config` of transformers, or `quantization` of MLX (often written as both)."""
    mlx = fields.take_any("quantization")
    general = fields.take_any("quantization_config")
    if mlx is not None:
        return _read_mlx(mlx, f"{fields.where}: quantization")
    if general is None:
        return Quantization()
    where = f"{fields.where}: quantization_config"
    if not isinstance(general, Mapping):
        raise UnsupportedModel(f"{where}: expected an object, found {general!r}")
    if "quant_method" not in general and "bits" in general:
        return _read_mlx(general, where)
    return _read_bitnet(Fields({k: v for k, v in general.items() if v is not None}, where))


def _read_bitnet(fields: Fields) -> Quantization:
    method = fields.take(str, "quant_method")
    if method != "bitnet":
        raise UnsupportedModel(
            f"{fields.where}: quant_method {method!r} is not supported; supported: 'bitnet'",
            hint="convert the unquantized model instead",
        )
    linear_class = fields.take(str, "linear_class", "bitlinear")
    if linear_class not in ("bitlinear", "autobitlinear"):
        raise UnsupportedModel(
            f"{fields.where}: linear_class {linear_class!r}; supported: bitlinear, autobitlinear"
        )
    mode = fields.take(str, "quantization_mode", "offline")
    if (linear_class, mode) not in BITNET_MODES:
        raise UnsupportedModel(
            f"{fields.where}: quantization_mode {mode!r} with linear_class {linear_class!r}; "
            "supported: offline, and online with autobitlinear"
        )
    fields.require("use_rms_norm", False)
    kept = fields.take_any("modules_to_not_convert", [])
    fields.ignore("rms_norm_eps")
    fields.finish()
    divide = linear_class == "bitlinear"
    if mode != "online":
        return Quantization("bitnet", divide=divide)  # what is packed is known from its dtype
    plain = isinstance(kept, list) and all(
        isinstance(k, str) and PLAIN_NAME.fullmatch(k) for k in kept
    )
    if not plain:
        raise UnsupportedModel(
            f"{fields.where}: modules_to_not_convert is {kept!r:.80}; only plain names are read"
        )
    return Quantization("bitnet", divide=divide, online=True, kept=tuple(kept))


def _read_mlx(raw: Any, where: str) -> Quantization:
    fields = Fields(raw, where)
    fields.require("mode", "affine")
    bits, group = _bits_and_group(fields)
    modules = {}
    for key in [key for key, value in raw.items() if isinstance(value, Mapping | bool)]:
        value = fields.take_any(key)
        if isinstance(value, Mapping):
            module = Fields(value, f"{where}: {key}")
            module.require("mode", "affine")
            modules[key] = _bits_and_group(module)
            module.finish()
    fields.ignore("linear_class", "quantization_mode")
    fields.finish()
    return Quantization("mlx", bits=bits, group=group, modules=modules)


def _bits_and_group(fields: Fields) -> tuple[int, int]:
    bits, group = fields.take_any("bits"), fields.take_any("group_size", 64)
    if type(bits) is not int or bits not in MLX_BITS:
        raise UnsupportedModel(f"{fields.where}: bits is {bits!r}; supported: {_shown(MLX_BITS)}")
    if type(group) is not int or group not in MLX_GROUPS:
        raise UnsupportedModel(
            f"{fields.where}: group_size is {group!r}; supported: {_shown(MLX_GROUPS)}"
        )
    return bits, group


def _shown(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
