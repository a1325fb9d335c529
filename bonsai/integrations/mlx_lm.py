"""A bonsai checkpoint as a model of mlx-lm: its forward, caches and server over our linears.

    from bonsai.integrations.mlx_lm import load
    model, tokenizer = load("models/Ternary-Bonsai-4B")
    mlx_lm.generate(model, tokenizer, "Why is the sky blue?")

    python -m bonsai.integrations.mlx_lm server --model models/Ternary-Bonsai-4B

Knows how mlx-lm names its modules. Does not know how weights are packed: that is
`backends.mlx.linear`. Experimental as mlx-lm itself: names of its modules may change.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from bonsai import hub, models
from bonsai.backends.mlx.device import TYPES, facts
from bonsai.backends.mlx.linear import MlxLinear, Table, part_of
from bonsai.backends.mlx.load import dtype_for
from bonsai.config import RopeSpec
from bonsai.errors import BackendUnavailable, InvalidRequest, ModelNotFound, UnsupportedModel
from bonsai.format import Checkpoint
from bonsai.matrix import Matrix

__all__ = ["load", "main"]

VERBS = ("generate", "chat", "server", "cache_prompt")
"""Programs of mlx-lm that `main` runs."""


class Linear(nn.Module):
    """y = T(x) @ W^T over the last axis, whatever stands before it."""

    def __init__(self, made: MlxLinear) -> None:
        super().__init__()
        self._made = made
        self.planes = made.arrays  # parameters, so that mlx-lm counts their bytes

    def __call__(self, x: mx.array) -> mx.array:
        y = self._made(x.reshape(-1, x.shape[-1]))
        return y.reshape(*x.shape[:-1], -1)


class Embedding(nn.Module):
    """Rows of a table, and the table as a head where the model ties them."""

    def __init__(self, table: Table, head: Linear) -> None:
        super().__init__()
        self._table = table
        self.head = head

    def __call__(self, ids: mx.array) -> mx.array:
        return self._table.rows(ids.reshape(-1)).reshape(*ids.shape, -1)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.head(x)


class Rope(nn.Module):
    """The rotation of a `RopeSpec`, with the frequencies of this library."""

    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        self._spec = spec
        self._periods = mx.array((1 / np.array(spec.frequencies())).astype(np.float32))

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        dims, scale = self._spec.dims, self._spec.amplitude
        if scale != 1:
            x = mx.concatenate([scale * x[..., :dims], x[..., dims:]], axis=-1)
        return mx.fast.rope(
            x, dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._periods
        )


class ModuleOps:
    """Ops that only load: matrices become modules, one for each, and vectors arrays."""

    def __init__(self, dtype: Any, release: Callable[[str], None]) -> None:
        self.dtype = dtype
        self._release = release
        self._table: Table | None = None

    def vector(self, values: np.ndarray) -> mx.array:
        return mx.array(np.array(values, np.float32))

    def table(self, matrix: Matrix) -> Table:
        self._table = Table(matrix, self._part(matrix), self.dtype)
        return self._table

    def linear(self, *matrices: Matrix) -> tuple[Linear, ...]:
        return tuple(
            Linear(MlxLinear([(self._part(m), m.transform)], self.dtype, lambda y: None))
            for m in matrices
        )

    def _part(self, matrix: Matrix) -> Any:
        if self._table is not None and self._table.matrix is matrix:
            return self._table.part
        return part_of(matrix, lambda: self._release(matrix.name))


def load(
    name_or_path: str | os.PathLike[str], *, dtype: str | None = None, revision: str | None = None
) -> tuple[nn.Module, Any]:
    """(model, tokenizer) as `mlx_lm.load` gives them, of a bonsai checkpoint.

    `dtype` is that of activations: "float16", "bfloat16" or "float32"; None is the mlx backend's
    choice. Raises BonsaiErrors: ModelNotFound, UnsupportedModel, FormatError, BackendUnavailable.
    """
    if dtype is not None and dtype not in TYPES:
        raise InvalidRequest(f"dtype is {dtype!r}, expected one of: {', '.join(TYPES)}")
    with Checkpoint.open(hub.resolve(os.fspath(name_or_path), revision)) as checkpoint:
        kind = TYPES[dtype or dtype_for(checkpoint.architecture, facts().metal)]
        ops: Any = ModuleOps(kind, checkpoint.release)
        found = models.load(checkpoint, ops)
        model = _model(checkpoint.architecture, found, kind)
        mx.eval(model.parameters())
        mx.clear_cache()
        model.eval()
        return model, _tokenizer(checkpoint.path, found.config)


def main(arguments: list[str]) -> None:
    """Run a program of mlx-lm with a `load` that also knows bonsai checkpoints."""
    if not arguments or arguments[0] not in VERBS:
        raise InvalidRequest(
            f"mlx-lm has no program {arguments[:1]}", hint=f"one of: {', '.join(VERBS)}"
        )
    program = _library(arguments[0])
    program.load = _either(program.load)
    sys.argv = [f"mlx_lm.{arguments[0]}", *arguments[1:]]
    program.main()


def _either(original: Callable[..., Any]) -> Callable[..., Any]:
    """mlx-lm's `load`, but for names of bonsai checkpoints ours."""

    def load_any(name: str, *args: Any, **more: Any) -> Any:
        path = Path(name)
        try:
            theirs = path.is_dir() and not (path / "manifest.json").is_file()
            folder = path if theirs else hub.resolve(str(name))
        except ModelNotFound:
            theirs, folder = True, path
        if theirs:
            return original(name, *args, **more)
        if more.get("adapter_path"):
            raise InvalidRequest("adapters do not work on ternary linears")
        found = load(folder)
        return (*found, {}) if more.get("return_config") else found

    return load_any


def _library(module: str) -> Any:
    """A module of mlx-lm. Raises BackendUnavailable where it is missing."""
    try:
        return importlib.import_module(f"mlx_lm.{module}")
    except ImportError as error:
        raise BackendUnavailable(
            f"mlx_lm.{module} cannot be imported: {error}", hint="pip install -U mlx-lm"
        ) from error


def _tokenizer(folder: Path, cfg: Any) -> Any:
    """mlx-lm's wrapper around the checkpoint's tokenizer."""
    eos = list(cfg.eos) or None
    return _library("utils").load_tokenizer(folder, eos_token_ids=eos)


def _model(architecture: str, found: models.Model, dtype: Any) -> nn.Module:
    """mlx-lm's model with the modules and vectors of ours in their places."""
    build = BUILDERS.get(architecture)
    if build is None:
        raise UnsupportedModel(
            f"{architecture} has no bridge to mlx-lm; there is one for: {', '.join(BUILDERS)}"
        )
    cfg: Any = found.config
    model, inner, block = build(cfg)
    w = found.weights
    inner.embed_tokens = Embedding(w.embedding, w.head[0])  # type: ignore[index]
    inner.norm.weight = w.norm.astype(dtype)
    for target, layer in zip(inner.layers, w.layers, strict=True):
        target.input_layernorm.weight = _of(layer, "attn_norm").astype(dtype)
        target.post_attention_layernorm.weight = _of(layer, "ffn_norm").astype(dtype)
        mlp = target.mlp
        mlp.gate_proj, mlp.up_proj = _of(layer, "gate_up")
        (mlp.down_proj,) = _of(layer, "down")
        block(target, layer, cfg, dtype)
    if not cfg.tied:
        holder: Any = model.language_model if architecture == "qwen35" else model
        holder.lm_head = w.head[0]  # type: ignore[index]
    return model


def _of(layer: Any, name: str) -> Any:
    """A field of a block, or of the block inside it (BitNet)."""
    return getattr(getattr(layer, "layer", layer), name)


def _attention(target: Any, layer: Any, cfg: Any, dtype: Any) -> None:
    attn, layer = target.self_attn, getattr(layer, "layer", layer)
    attn.q_proj, attn.k_proj, attn.v_proj = layer.qkv
    (attn.o_proj,) = layer.out
    attn.rope = Rope(cfg.rope)
    if layer.q_norm is not None:
        attn.q_norm.weight, attn.k_norm.weight = (
            norm.astype(dtype) for norm in (layer.q_norm, layer.k_norm)
        )


def _bitnet_block(target: Any, block: Any, cfg: Any, dtype: Any) -> None:
    _attention(target, block, cfg, dtype)
    target.self_attn.attn_sub_norm.weight = block.attn_sub_norm.astype(dtype)
    target.mlp.ffn_sub_norm.weight = block.ffn_sub_norm.astype(dtype)


def _hybrid_block(target: Any, block: Any, cfg: Any, dtype: Any) -> None:
    mixer = block.mixer
    if hasattr(mixer, "qkv"):
        attn = target.self_attn
        attn.q_proj, attn.k_proj, attn.v_proj = mixer.qkv
        (attn.o_proj,) = block.out
        attn.rope = Rope(cfg.rope)
        attn.q_norm.weight, attn.k_norm.weight = (
            norm.astype(dtype) for norm in (mixer.q_norm, mixer.k_norm)
        )
        return
    net = target.linear_attn
    net.in_proj_qkv, net.in_proj_z = mixer.qkv_z
    net.in_proj_a, net.in_proj_b = mixer.ab
    (net.out_proj,) = block.out
    net.conv1d.weight = mixer.taps[:, :, None].astype(dtype)
    net.A_log, net.dt_bias = mixer.a_log, mixer.dt_bias
    net.norm.weight = mixer.norm.astype(dtype)


def _sizes(cfg: Any) -> dict[str, Any]:
    """What mlx-lm calls the sizes that every architecture has."""
    return {
        "hidden_size": cfg.hidden,
        "intermediate_size": cfg.ffn,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "rms_norm_eps": cfg.norm_eps,
        "vocab_size": cfg.vocab,
        "max_position_embeddings": cfg.context,
        "tie_word_embeddings": cfg.tied,
        "rope_theta": cfg.rope.theta,
    }


Built = tuple[Any, Any, Callable[[Any, Any, Any, Any], None]]
"""The model, what holds its blocks, and what fills a block."""


def _plain(name: str, fill: Callable[[Any, Any, Any, Any], None]) -> Callable[[Any], Built]:
    def build(cfg: Any) -> Built:
        module = _library(f"models.{name}")
        model = module.Model(module.ModelArgs.from_dict({"model_type": name, **_sizes(cfg)}))
        return model, model.model, fill

    return build


def _bitnet(cfg: Any) -> Built:
    if cfg.activation != "relu2" or cfg.heads * cfg.head_dim != cfg.hidden:
        raise UnsupportedModel(
            f"mlx-lm's bitnet has relu2 and {cfg.hidden} attention outputs, this model "
            f"{cfg.activation} and {cfg.heads * cfg.head_dim}"
        )
    return _plain("bitnet", _bitnet_block)(cfg)


def _hybrid(cfg: Any) -> Built:
    interval = cfg.kinds.index("attention") + 1 if "attention" in cfg.kinds else 0
    expected = tuple(
        "attention" if interval and (i + 1) % interval == 0 else "delta" for i in range(cfg.layers)
    )
    if not 1 < interval or cfg.kinds != expected:
        raise UnsupportedModel("mlx-lm's qwen3_5 needs an attention block every n blocks, n > 1")
    gdn = cfg.gdn
    values = {
        **_sizes(cfg),
        "model_type": "qwen3_5",
        "full_attention_interval": interval,
        "linear_num_value_heads": gdn.value_heads,
        "linear_num_key_heads": gdn.key_heads,
        "linear_key_head_dim": gdn.key_dim,
        "linear_value_head_dim": gdn.value_dim,
        "linear_conv_kernel_dim": gdn.taps,
        "rope_parameters": {
            "type": "default",
            "rope_theta": cfg.rope.theta,
            "partial_rotary_factor": cfg.rope.dims / cfg.head_dim,
        },
    }
    module = _library("models.qwen3_5")
    model = module.Model(module.ModelArgs.from_dict(values))
    return model, model.language_model.model, _hybrid_block


BUILDERS: Mapping[str, Callable[[Any], Built]] = {
    "llama": _plain("llama", _attention),
    "qwen3": _plain("qwen3", _attention),
    "bitnet": _bitnet,
    "qwen35": _hybrid,
}


if __name__ == "__main__":
    from bonsai.errors import BonsaiError

    try:
        main(sys.argv[1:])
    except BonsaiError as error:
        hint = f"\nhint:  {error.hint}" if error.hint else ""
        sys.exit(f"error: {error}{hint}")
