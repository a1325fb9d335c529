"""Conversions under limits: little memory, no space, killed half-way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import counted
import hf_writer as hf
import numpy as np
import pytest

import bonsai.convert as convert
from bonsai.errors import BonsaiError

HERE = Path(__file__).parent
MB = 1 << 20

MEASURED = """
import sys, threading
import bonsai.convert

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

peak = start = anonymous()
over = threading.Event()

def watch():
    global peak
    while not over.wait(0.002):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
bonsai.convert(sys.argv[1], sys.argv[2], quant=sys.argv[3] or None)
over.set()
watcher.join()
print(start, peak)
"""


@pytest.fixture(scope="module")
def big_model(tmp_path_factory) -> Iterator[Path]:
    """300 MB in three shards: 18 float32 matrices of 16 MB, and small ones."""
    folder = tmp_path_factory.mktemp("big") / "hf"
    spec = hf.Tiny(layers=6, hidden=1024, ffn=4096, heads=1, vocab=320)
    block = np.random.default_rng(0).normal(size=(4096, 1024)).astype("<f4") / np.float32(32)
    source = hf.weights(hf.Tiny(layers=6, hidden=1024, ffn=64, heads=1))
    for name, shape in hf.linear_shapes(spec).items():
        source[name] = block[: shape[0] * shape[1] // 1024].reshape(shape)
    yield hf.write(folder, spec, source, shards=3)
    shutil.rmtree(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("quant", ["", "ternary", "q8"])
def test_memory_is_a_few_of_the_largest_tensors(tmp_path, big_model, quant):
    assert sum(path.stat().st_size for path in big_model.iterdir()) > 290 * MB
    command = [sys.executable, "-c", MEASURED, str(big_model), str(tmp_path / "out"), quant]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    start, peak = (int(kib) * 1024 for kib in result.stdout.split())
    shutil.rmtree(tmp_path / "out")
    assert peak - start < 3 * 16 * MB
    assert peak < 120 * MB


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs a limit on the size of files")
def test_no_space_leaves_nothing_and_says_so(tmp_path):
    import resource

    folder = hf.write(tmp_path / "hf")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(BonsaiError, match="no space left"):
            convert(folder, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == [folder]


KILLED = """
import sys, time
import bonsai.convert

def progress(stage, done, total):
    if stage == "convert" and done * 2 > total:
        print("half", flush=True)
        time.sleep(60)

bonsai.convert(sys.argv[1], sys.argv[2], progress=progress)
"""


def test_killed_half_way_leaves_nothing_that_loads(tmp_path):
    folder = hf.write(tmp_path / "hf")
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(folder), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.kill()
    assert not out.exists()
    for left in tmp_path.iterdir():
        if left != folder:
            assert not (left / "manifest.json").exists()
            with pytest.raises(BonsaiError):
                convert(left, tmp_path / "again")
    convert(folder, out)
    assert (out / "manifest.json").exists()


def test_error_in_a_late_tensor_leaves_nothing(tmp_path):
    source = hf.weights()
    source["lm_head.weight"][-1, -1] = np.nan
    folder = hf.write(tmp_path / "hf", tensors=source)
    with pytest.raises(BonsaiError, match=r"head \(lm_head.weight\): row 319"):
        convert(folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [folder]


def test_interrupt_leaves_nothing(tmp_path):
    def progress(stage: str, done: int, total: int) -> None:
        if done * 2 > total:
            raise KeyboardInterrupt

    folder = hf.write(tmp_path / "hf")
    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "out", progress=progress)
    assert list(tmp_path.iterdir()) == [folder]


def test_work_grows_with_the_number_of_tokens_not_faster(tmp_path):
    """A vocabulary twice as large takes at most 2.5 times as many lines of code."""
    import tiny_gguf

    lines = {}
    for count in (1000, 2000, 4000):
        spec = hf.Tiny(layers=1, hidden=64, heads=1, head_dim=64, ffn=64, vocab=count)
        words = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(count)]}
        words["tokenizer.ggml.token_type"] = [1] * count
        values = {**tiny_gguf.metadata(spec), **words}
        parts = tiny_gguf.tensors(spec, hf.weights(spec))
        path = tiny_gguf.gguf.write(tmp_path / f"{count}.gguf", values, parts)
        lines[count] = counted.lines(partial(convert, path, tmp_path / str(count)))
    assert lines[1000] > 1000
    assert lines[2000] < 2.5 * lines[1000] and lines[4000] < 2.5 * lines[2000]


def test_no_temporary_files_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    convert(hf.write(tmp_path / "hf"), "out")
    assert sorted(os.listdir(tmp_path)) == ["hf", "out"]
