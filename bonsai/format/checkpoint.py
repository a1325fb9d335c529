"""Opening a checkpoint: every claim of the manifest is checked before a tensor is handed out.

Knows the order of the checks. Does not know what a model needs: `models` asks for tensors by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from bonsai import cache
from bonsai.errors import FormatError, InvalidRequest, ModelNotFound
from bonsai.format import stamps
from bonsai.format.files import AGAIN, Progress, child, read_small, refuse_impostor, sha256, size_of
from bonsai.format.manifest import Manifest, TensorEntry
from bonsai.format.npz_io import NpzFile
from bonsai.format.planes import PROOF_INPUT, PROOF_OUTPUT, Store, check_planes, planes, signs
from bonsai.format.shards import INDEX, SINGLE, ShardedTensors
from bonsai.format.strict_json import parse_object
from bonsai.format.values import finite
from bonsai.matrix import DenseMatrix, Matrix, PackedMatrix, SignedHadamard, widen

__all__ = ["CHECKS", "CONFIG", "MANIFEST", "NPZ", "Checkpoint", "open_store", "read_manifest"]

MANIFEST = "manifest.json"
CONFIG = "config.json"
NPZ = "model.npz"
CHECKS = ("changed", "always", "never")
MAX_MANIFEST = 8 << 20  # bytes
MAX_CONFIG = 1 << 20  # bytes
SMALL = 1 << 20  # files below this are hashed at every open: a tokenizer, the index, the config


class Checkpoint:
    """An opened checkpoint. Arrays are read-only memory maps, valid as long as they are held."""

    def __init__(
        self, path: Path, manifest: Manifest, config: dict[str, Any], store: Store
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.config = config
        self._store = store
        self._asked: set[str] = set()
        self._transforms: dict[int, SignedHadamard] = {}

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        check: str = "changed",
        progress: Progress | None = None,
    ) -> Checkpoint:
        """The checkpoint in a folder. Sizes, names, shapes and dtypes are always checked.

        check "changed" hashes small files, and large ones that changed since they were last found
        good; "always" hashes all, "never" none. `progress("check", done, total)` counts bytes.
        Raises ModelNotFound, FormatError or UnsupportedModel.
        """
        if check not in CHECKS:
            raise InvalidRequest(f"check {check!r}", hint=f"one of: {', '.join(CHECKS)}")
        folder = Path(path)
        try:
            manifest = read_manifest(folder)
            with ExitStack() as opened:
                store = opened.enter_context(closing(open_store(folder, manifest)))
                for name, entry in manifest.files.items():
                    check_size(folder / name, entry.bytes)
                if check != "never":
                    check_hashes(folder, manifest, check == "always", progress)
                checkpoint = cls(folder, manifest, read_config(folder, manifest), store)
                opened.pop_all()
                return checkpoint
        except FormatError as error:
            error.hint = pull_again(folder) or error.hint
            raise

    @property
    def architecture(self) -> str:
        return self.manifest.architecture

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.tensor_bytes(name) for name in self.manifest.tensors)

    def tensor_bytes(self, name: str) -> int:
        """Bytes of all planes of one tensor."""
        return sum(self._store.info(p).nbytes for p in planes(name, self.manifest.tensors[name]))

    def names(self) -> list[str]:
        """The logical tensors, in the order of the manifest."""
        return list(self.manifest.tensors)

    def has(self, name: str) -> bool:
        return name in self.manifest.tensors

    def entry(self, name: str) -> TensorEntry:
        """Raises FormatError when there is no such tensor."""
        if name not in self.manifest.tensors:
            raise FormatError(f"{self.path}: there is no tensor '{name}'")
        return self.manifest.tensors[name]

    def planes(self, name: str) -> dict[str, np.ndarray]:
        """The arrays of a logical tensor as they lie in the file, unchecked."""
        return {plane: self._store.array(plane) for plane in planes(name, self.entry(name))}

    def matrix(self, name: str) -> Matrix:
        """A matrix as it lies in the file. Raises FormatError where a scale is not finite."""
        entry = self.entry(name)
        if len(entry.shape) != 2:
            raise FormatError(f"{self.path}: {name} is {list(entry.shape)}, not a matrix")
        self._asked.add(name)
        shape = (entry.shape[0], entry.shape[1])
        transform = self._transform(entry)
        arrays = self.planes(name)
        if entry.group is None:
            return DenseMatrix(name, entry.packing, shape, arrays[name], transform)
        codes, scales = arrays[f"{name}.codes"], arrays[f"{name}.scales"]
        biases = arrays.get(f"{name}.biases")
        for part, values in (("scales", scales), ("biases", biases)):
            if values is not None and not finite(values):
                raise FormatError(f"{self.path}: {name}.{part} has values that are not finite")
        return PackedMatrix(
            name, entry.packing, shape, entry.group, codes, scales, biases, transform
        )

    def vector(self, name: str) -> np.ndarray:
        """A dense tensor as float32, in its shape (a copy). Raises FormatError if it is packed."""
        entry = self.entry(name)
        if not entry.dense:
            raise FormatError(f"{self.path}: {name} is packed as {entry.packing}, not plain values")
        self._asked.add(name)
        values = self._store.array(name)
        if not finite(values, entry.packing):
            raise FormatError(f"{self.path}: {name} has values that are not finite")
        return widen(values, entry.packing)

    def proof(self) -> tuple[str, np.ndarray, np.ndarray] | None:
        """(matrix, input [in], output [out]): what a transformed matrix must make of an input."""
        spec = self.manifest.hadamard
        if spec is None or spec.proof is None:
            return None
        return spec.proof, self._store.array(PROOF_INPUT), self._store.array(PROOF_OUTPUT)

    def unused(self) -> list[str]:
        """Tensors that nobody asked for."""
        return [name for name in self.manifest.tensors if name not in self._asked]

    def release(self, name: str) -> None:
        """Tell the system that the pages of a tensor may leave memory; they come back when read."""
        for plane in planes(name, self.entry(name)):
            self._store.release(plane)

    def prefetch(self, name: str) -> None:
        """Ask the system to read the pages of a tensor soon."""
        for plane in planes(name, self.entry(name)):
            self._store.prefetch(plane)

    def check_files(self) -> None:
        """Raises FormatError where a file with tensors was written to since it was opened.

        Cheap (one look at each file), so that it can be done before every use: the pages of a file
        that was cut short are gone, and touching them ends the process. Works after `close`.
        """
        self._store.check()

    def close(self) -> None:
        """Close the files. Arrays that are still held stay valid."""
        self._store.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _transform(self, entry: TensorEntry) -> SignedHadamard | None:
        spec = self.manifest.hadamard
        if entry.transform is None or spec is None:
            return None
        width = entry.shape[1]
        if width not in self._transforms:
            values = self._store.array(signs(width))
            if not (np.abs(values) == 1).all():
                raise FormatError(f"{self.path}: {signs(width)} has values other than -1 and 1")
            self._transforms[width] = SignedHadamard(spec.block, values)
        return self._transforms[width]


def pull_again(folder: Path) -> str | None:
    """What to do about a damaged checkpoint that was pulled; None for any other."""
    name = cache.model_in(folder)
    return name and f"bonsai models rm {name}, then bonsai models pull {name}"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Raises ModelNotFound when there is no folder."""
    if not folder.is_dir():
        what = "is a file; a checkpoint is a directory" if folder.exists() else "no such directory"
        raise ModelNotFound(f"{folder}: {what}")
    path = child(folder, MANIFEST, str(folder))
    if not path.exists():
        raise FormatError(
            f"{folder}: no {MANIFEST}: not a bonsai checkpoint",
            hint=f"bonsai convert {folder} OUT",
        )
    return Manifest.read(parse_object(read_small(path, MAX_MANIFEST), str(path)), str(path))


def open_store(folder: Path, manifest: Manifest) -> Store:
    """The container that the manifest names, its structure checked against it."""
    where = str(folder / MANIFEST)
    for name in manifest.files:
        path = child(folder, name, where)
        if not path.is_file():
            raise FormatError(f"{path}: the file is missing", hint=AGAIN)
    held = [name for name in manifest.files if _holds_tensors(name)]
    for name in held:
        check_size(folder / name, manifest.files[name].bytes)
    if held == [NPZ]:
        store: Store = NpzFile(folder / NPZ)
    else:
        store = _open_safetensors(folder, manifest, held)
    try:
        check_planes(store, manifest)
    except BaseException:
        store.close()
        raise
    return store


def _open_safetensors(folder: Path, manifest: Manifest, held: list[str]) -> ShardedTensors:
    store = ShardedTensors(folder)
    opened = sorted(path.name for path in store.files)
    indexed = INDEX in manifest.files
    if opened != sorted(held) or indexed != (SINGLE not in held):
        store.close()
        listed = sorted(held) + [INDEX] * indexed
        raise FormatError(
            f"{folder}: the tensors lie in {', '.join(opened)}, "
            f"{MANIFEST} lists {', '.join(listed) or 'no such file'}",
            hint=AGAIN,
        )
    return store


def _holds_tensors(name: str) -> bool:
    return name.endswith((".safetensors", ".npz"))


def check_size(path: Path, expected: int) -> None:
    """Raises FormatError naming both sizes, and saying so when it is a pointer or a web page."""
    size = size_of(path)
    if size != expected:
        with open(path, "rb") as file:
            refuse_impostor(path, file.read(256))
        raise FormatError(f"{path}: {size} bytes, {MANIFEST} says {expected}", hint=AGAIN)


def check_hashes(
    folder: Path, manifest: Manifest, everything: bool, progress: Progress | None = None
) -> None:
    """Raises FormatError at the first file that is not what the manifest says."""
    todo = []
    for name, entry in manifest.files.items():
        path = folder / name
        if everything or entry.bytes < SMALL or not stamps.matches(path, entry.sha256):
            todo.append((path, entry))
    total, done = sum(entry.bytes for _, entry in todo), 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress("check", done, total)

    for path, entry in todo:
        before = stamps.look(path)
        check_hash(path, entry.sha256, step)
        if entry.bytes >= SMALL:
            stamps.remember(path, entry.sha256, before)


def check_hash(path: Path, expected: str, step: Callable[[int], None] | None = None) -> None:
    """Raises FormatError naming both hashes."""
    found = sha256(path, step)
    if found != expected:
        raise FormatError(
            f"{path}: sha256 is {found}, {MANIFEST} says {expected}: damaged or changed", hint=AGAIN
        )


def read_config(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """config.json, which must be of the manifest's architecture."""
    if CONFIG not in manifest.files:
        raise FormatError(f"{folder}: {MANIFEST} lists no {CONFIG}", hint=AGAIN)
    path = folder / CONFIG
    config: Mapping[str, Any] = parse_object(read_small(path, MAX_CONFIG), str(path))
    if config.get("architecture") != manifest.architecture:
        raise FormatError(
            f"{path}: architecture {config.get('architecture')!r:.60}, "
            f"{MANIFEST} says {manifest.architecture!r:.60}",
            hint=AGAIN,
        )
    return dict(config)
