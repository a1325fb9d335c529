"""Writing a checkpoint: tensor by tensor, complete or not at all.

Knows the order of the steps and what may be written. Does not know where tensors come from. All
files are made in a hidden folder beside the target, which takes the target's name at the very end.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from bonsai import ternary
from bonsai.config import Fields
from bonsai.errors import BonsaiError, ConversionError, InvalidRequest
from bonsai.format.beside import beside
from bonsai.format.checkpoint import CONFIG, MANIFEST, Checkpoint
from bonsai.format.containers import NpzSink, SafetensorsSink, Sink, sync
from bonsai.format.files import Progress, child, sha256
from bonsai.format.manifest import FORMAT, VERSION, TensorEntry, check_name, read_tensor
from bonsai.format.planes import PROOF_INPUT, PROOF_OUTPUT, Plane, planes, signs
from bonsai.format.safetensors_io import DTYPES
from bonsai.format.values import finite, narrow
from bonsai.matrix import DENSE, DenseMatrix, Matrix, PackedMatrix, SignedHadamard

__all__ = ["CheckpointWriter"]

CONTAINERS = ("safetensors", "npz")
_NO_SPACE = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))


class CheckpointWriter:
    """with CheckpointWriter(out) as writer: writer.matrix(m) ...; writer.finish(...).

    Leaving the block without `finish`, for whatever reason, leaves nothing behind. `shard_bytes`
    cuts safetensors into files of at most that many bytes of tensors; a larger one gets its own.
    `overwrite` allows replacing a checkpoint; any other folder with something in it is refused.
    """

    def __init__(
        self,
        out_dir: str | os.PathLike[str],
        container: str = "safetensors",
        shard_bytes: int | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        if container not in CONTAINERS:
            raise InvalidRequest(
                f"container {container!r}", hint=f"one of: {', '.join(CONTAINERS)}"
            )
        if shard_bytes is not None and (container == "npz" or shard_bytes <= 0):
            raise InvalidRequest(f"{container} in shards of {shard_bytes} bytes is not possible")
        self._out = Path(os.path.abspath(out_dir))
        self._overwrite = overwrite
        with _writing(self._out):
            _check_target(self._out, overwrite)
        self._tensors: dict[str, dict[str, Any]] = {}
        self._transforms: dict[int, SignedHadamard] = {}
        self._proof: tuple[str, np.ndarray, np.ndarray] | None = None
        self._names: list[str] = []
        with _writing(self._out), ExitStack() as made:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._folder = made.enter_context(beside(self._out))
            self._folder.mkdir()
            self._sink: Sink
            if container == "npz":
                self._sink = NpzSink(self._folder)
            else:
                self._sink = SafetensorsSink(self._folder, shard_bytes)
            self._made = made.pop_all()

    def matrix(self, matrix: Matrix) -> None:
        """Write a matrix. Raises ConversionError where a value is not finite or a plane wrong."""
        listed: dict[str, Any] = {"packing": matrix.packing, "shape": list(matrix.shape)}
        if isinstance(matrix, PackedMatrix):
            listed["group"] = matrix.group
        if matrix.transform is not None:
            listed["transform"] = "hadamard"
            self._check_transform(matrix.name, matrix.shape[1], matrix.transform)
        self._write(matrix.name, listed, _parts(matrix))
        if matrix.transform is not None:
            self._transforms.setdefault(matrix.shape[1], matrix.transform)

    def vector(self, name: str, values: np.ndarray, packing: str = "f32") -> None:
        """Write float32 values of any shape as f32, f16 or bf16 (to nearest, ties to even)."""
        values = np.asarray(values)
        if packing not in DENSE or values.dtype != np.float32:
            raise ConversionError(f"{name}: {values.dtype} values as {packing!r}, expected float32")
        listed = {"packing": packing, "shape": list(values.shape)}
        self._write(name, listed, {name: narrow(values, packing)})

    def file(self, name: str, data: bytes) -> None:
        """Write a small file: a tokenizer, a template."""
        if name in (CONFIG, MANIFEST, *self._names) or name.endswith((".safetensors", ".npz")):
            raise InvalidRequest(f"{name}: the writer makes this file, or it is written already")
        self._put(name, data)
        self._names.append(name)

    def proof(self, matrix: str, x: np.ndarray, y: np.ndarray) -> None:
        """Store that a transformed matrix makes y [out] of x [in], both float32."""
        self._proof = matrix, np.asarray(x, "<f4"), np.asarray(y, "<f4")

    def finish(
        self,
        *,
        architecture: str,
        config: Mapping[str, Any],
        source: Mapping[str, Any] | None = None,
        sampling: Mapping[str, float] | None = None,
        tokenizer_size: int | None = None,
        progress: Progress | None = None,
    ) -> Path:
        """Complete the checkpoint and give it its name; returns the folder.

        `source` and `sampling` are as in manifest.json. `progress("hash", done, total)` counts
        bytes.
        """
        hadamard = self._write_hadamard()
        with _writing(self._out):
            names = [*self._sink.finish(), *self._names, CONFIG]
        self._put(CONFIG, _json({"architecture": architecture, **config}))
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "architecture": architecture,
            "created_by": f"bonsai-lm {importlib.metadata.version('bonsai-lm')}",
            "source": source,
            "sampling": dict(sampling) if sampling else None,
            "tokenizer": None if tokenizer_size is None else {"size": tokenizer_size},
            "hadamard": hadamard,
            "files": self._hash(names, progress),
            "tensors": self._tensors,
        }
        self._put(MANIFEST, _json({k: v for k, v in manifest.items() if v is not None}))
        # The reader's own checks: what it would refuse never gets the final name.
        Checkpoint.open(self._folder, check="never").close()
        with _writing(self._out):
            _publish(self._folder, self._out, self._overwrite)
        return self._out

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._sink.close()
        self._made.close()

    def _write(self, name: str, listed: dict[str, Any], parts: Mapping[str, np.ndarray]) -> None:
        check_name(name, str(self._out))
        entry = read_tensor(Fields(listed, name))
        if name in self._tensors:
            raise ConversionError(f"{name} is written twice")
        _check_parts(name, entry, parts)
        if entry.packing in ("t2", "t5"):
            listed["zeros"] = _zeros(name, entry, parts[f"{name}.codes"])
        self._add(planes(name, entry), parts)
        self._tensors[name] = listed

    def _add(self, wanted: Mapping[str, Plane], parts: Mapping[str, np.ndarray]) -> None:
        with _writing(self._out):
            for plane, (dtype, _) in wanted.items():
                self._sink.add(plane, dtype, parts[plane])

    def _put(self, name: str, data: bytes) -> None:
        path = child(self._folder, name, str(self._out))
        with _writing(self._out), open(path, "wb") as file:
            file.write(data)
            sync(file)

    def _hash(self, names: list[str], progress: Progress | None) -> dict[str, Any]:
        sizes = {name: (self._folder / name).stat().st_size for name in names}
        total, done = sum(sizes.values()), 0

        def step(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress("hash", done, total)

        return {
            name: {"bytes": size, "sha256": sha256(self._folder / name, step)}
            for name, size in sizes.items()
        }

    def _check_transform(self, name: str, width: int, transform: SignedHadamard) -> None:
        """One sign vector per width and one block for all: refuse a second one."""
        good = transform.signs.shape == (width,) and (np.abs(transform.signs) == 1).all()
        if not good or transform.block & (transform.block - 1) or width % transform.block:
            raise ConversionError(
                f"{name}: a transform of block {transform.block} with signs "
                f"{list(transform.signs.shape)} does not fit inputs of {width}"
            )
        first = self._transforms.get(width, transform)
        blocks = {transform.block} | {known.block for known in self._transforms.values()}
        if len(blocks) > 1 or not np.array_equal(first.signs, transform.signs):
            raise ConversionError(
                f"{name}: its transform differs from that of other matrices "
                f"(width {width}, blocks {sorted(blocks)})"
            )

    def _check_proof(self) -> None:
        if self._proof is None:
            return
        name, x, y = self._proof
        listed = self._tensors.get(name, {})
        if "transform" not in listed or [*y.shape, *x.shape] != listed["shape"]:
            raise ConversionError(
                f"{name}: a proof of {list(x.shape)} to {list(y.shape)}, "
                f"but no transformed matrix of that shape was written"
            )
        if not (finite(x, "f32") and finite(y, "f32") and y.any()):
            raise ConversionError(f"{name}: its proof has no output, or values that are not finite")

    def _write_hadamard(self) -> dict[str, Any] | None:
        """Write signs and proof; returns what the manifest says about them."""
        self._check_proof()
        if not self._transforms:
            return None
        extra = {signs(width): ("I8", known.signs) for width, known in self._transforms.items()}
        block = next(iter(self._transforms.values())).block
        found: dict[str, Any] = {"block": block, "widths": list(self._transforms)}
        if self._proof is not None:
            found["proof"] = {"matrix": self._proof[0]}
            extra |= {PROOF_INPUT: ("F32", self._proof[1]), PROOF_OUTPUT: ("F32", self._proof[2])}
        with _writing(self._out):
            for plane, (dtype, values) in extra.items():
                self._sink.add(plane, dtype, values)
        return found


def _parts(matrix: Matrix) -> dict[str, np.ndarray]:
    """Plane name -> array."""
    if isinstance(matrix, DenseMatrix):
        return {matrix.name: matrix.values}
    parts = {f"{matrix.name}.codes": matrix.codes, f"{matrix.name}.scales": matrix.scales}
    if matrix.biases is not None:
        parts[f"{matrix.name}.biases"] = matrix.biases
    return parts


def _check_parts(name: str, entry: TensorEntry, parts: Mapping[str, np.ndarray]) -> None:
    wanted = planes(name, entry)
    if set(parts) != set(wanted):
        raise ConversionError(
            f"{name}: {entry.packing} has the planes {', '.join(wanted)}, found {', '.join(parts)}"
        )
    for plane, (dtype, shape) in wanted.items():
        values = parts[plane]
        if values.shape != shape or values.dtype != DTYPES[dtype]:
            raise ConversionError(
                f"{plane} is {values.dtype} {list(values.shape)}, {entry.packing} "
                f"{list(entry.shape)} needs {dtype} {list(shape)}"
            )
        if (entry.dense or not plane.endswith(".codes")) and not finite(values, entry.packing):
            raise ConversionError(
                f"{plane} has values that are not finite",
                hint="a scale must be representable in fp16: below 65520",
            )


def _zeros(name: str, entry: TensorEntry, codes: np.ndarray) -> float:
    """The fraction of zero trits; refuses codes that are not ternary."""
    assert entry.group is not None
    zeros, impossible = ternary.census(codes, entry.packing, entry.group, entry.shape[1])
    if impossible:
        raise ConversionError(f"{name}.codes: {impossible} codes that no ternary matrix has")
    return zeros / (entry.shape[0] * entry.shape[1])


def _check_target(out: Path, overwrite: bool) -> None:
    """Refuse a target that would be lost, before any work is done."""
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MANIFEST).is_file():
        raise InvalidRequest(
            f"{out} exists and is not a bonsai checkpoint; it will not be replaced",
            hint="name another folder",
        )
    if not overwrite:
        raise InvalidRequest(
            f"{out} exists already", hint="--overwrite replaces it; or name another folder"
        )


def _publish(folder: Path, out: Path, overwrite: bool) -> None:
    """Give `folder` the name `out`; what was there is removed only after that."""
    _sync_folder(folder)
    _check_target(out, overwrite)
    old = None
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
    elif os.path.lexists(out):
        old = out.with_name(f".{out.name}.{secrets.token_hex(4)}.old")
        os.replace(out, old)
    try:
        os.replace(folder, out)
    except OSError:
        if old is not None:
            os.replace(old, out)
        raise
    _sync_folder(out.parent)
    if old is not None:
        if old.is_symlink():
            old.unlink()
        else:
            shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Flush a directory, where the system can (Windows cannot open one)."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Turn a failed write into one clear error."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise BonsaiError(
                f"no space left for {out}; nothing was written", hint="free some space and repeat"
            ) from error
        raise BonsaiError(f"{out} cannot be written: {error.strerror or error}") from error


def _json(values: Mapping[str, Any]) -> bytes:
    """JSON for people: one line per key, and per entry where an object holds objects."""
    lines = []
    for key, value in values.items():
        text = json.dumps(value, allow_nan=False)
        if isinstance(value, dict) and any(isinstance(item, dict) for item in value.values()):
            inner = (f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            text = "{\n" + ",\n".join(inner) + "\n }"
        lines.append(f" {json.dumps(key)}: {text}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()
