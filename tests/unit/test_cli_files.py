"""The verbs that work on files and machines: convert, inspect, verify, bench, doctor."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import tiny
from command import Result, run

from bonsai import bench as timing
from bonsai import generate as generation
from bonsai.cli.console import printable, size
from bonsai.errors import InvalidRequest
from bonsai.format import Checkpoint
from bonsai.testing import ScriptedBackend, model


@pytest.fixture
def bonsai(monkeypatch, tmp_path):
    """bonsai("inspect", ...) in an empty folder, with an empty store."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("BONSAI_BACKEND", raising=False)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments, **streams: run(monkeypatch, *arguments, **streams)


@pytest.fixture
def checkpoint(tmp_path):
    return tiny.write(tmp_path / "model", tiny.Tiny(layers=1, packing="t5"))


INSPECTED = """\
path          model
architecture  qwen3
  layers      1
  hidden      128
  ffn         256
  heads       2
  kv_heads    1
  head_dim    64
  vocab       1000
  context     4096
  tied        true
  norm_eps    1e-06
  activation  "silu"
  rope        {"theta": 10000.0, "dims": 64}
  eos         []
source        random
made by       bonsai-lm 0.1.0
weights       275,968 in 13 tensors
size          62,304 bytes, 1.806 bits per weight
  8 tensors     t5 g128         60,256 bytes   1.750 bits  zeros 33.4%
  5 tensors         f32          2,048 bytes  32.000 bits
"""


def test_inspect_shows_what_a_checkpoint_is(bonsai, checkpoint):
    result = bonsai("inspect", "model")
    assert result.code == 0 and result.err == ""
    assert result.out == INSPECTED


def test_inspect_lists_tensors(bonsai, checkpoint):
    lines = bonsai("inspect", "model", "--tensors").out.removeprefix(INSPECTED).splitlines()
    assert len(lines) == 13
    assert lines[0] == (
        "embedding                      1000 x 128  t5 g128         28,000 bytes   1.750 bits"
        "  zeros 33.5%"
    )


def test_inspect_as_json(bonsai, checkpoint):
    facts = json.loads(bonsai("inspect", "model", "--json").out)
    with Checkpoint.open(checkpoint) as opened:
        assert facts["bytes"] == opened.nbytes == 62304
        assert facts["config"] == opened.config
        packed = [n for n in opened.names() if opened.entry(n).packing == "t5"]
        values = np.concatenate([opened.matrix(name).rows().ravel() for name in packed])
    assert facts["packings"][0]["zeros"] == pytest.approx(float((values == 0).mean()))
    assert facts["weights"] == 275968 and "tensors" not in facts
    assert facts["bits_per_weight"] == pytest.approx(8 * 62304 / 275968)
    assert facts["source"] == {"kind": "random", "files": {}}
    with_tensors = json.loads(bonsai("inspect", "model", "--json", "--tensors").out)
    assert sum(row["bytes"] for row in with_tensors["tensors"]) == 62304
    assert {row["packing"] for row in with_tensors["tensors"]} == {"t5", "f32"}


def test_inspect_opens_no_backend(bonsai, checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "bonsai.backends.cpu", None)
    monkeypatch.setitem(sys.modules, "bonsai.backends.reference", None)
    assert bonsai("inspect", "model").out == INSPECTED


def test_verify_says_good(bonsai, checkpoint):
    result = bonsai("verify", "model")
    assert (result.code, result.out, result.err) == (0, "good\n", "")
    facts = json.loads(bonsai("verify", "model", "--json").out)
    assert facts == {"path": "model", "good": True, "findings": []}


def test_verify_prints_each_finding_and_fails(bonsai, checkpoint):
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    result = bonsai("verify", "model")
    assert result.code == 1 and result.err == ""
    assert "model.safetensors" in result.out and "sha256" in result.out
    facts = json.loads(bonsai("verify", "model", "--json").out)
    assert not facts["good"] and facts["findings"] == result.out.splitlines()


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_a_foreign_model_is_to_be_converted(bonsai, tmp_path, verb):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(20))
    result = bonsai(verb, "m.gguf")
    assert result.code == 1
    assert result.err == (
        "error: m.gguf: a GGUF file, not a bonsai checkpoint\nhint:  bonsai convert m.gguf OUT\n"
    )


def test_convert_reports_what_it_did(bonsai, checkpoint):
    result = bonsai("convert", "model", "out", "--packing", "t2")
    assert result.code == 0 and result.err == ""
    assert result.out.splitlines()[:2] == [
        "qwen3 from bonsai: 13 tensors, 275,968 weights",
        "75,216 bytes of tensors, 2.180 bits per weight",
    ]
    assert "relative error: 0 (every weight is exact)\n" in result.out
    assert bonsai("verify", "out").code == 0


def test_convert_as_json(bonsai, checkpoint):
    flags = ("--container", "npz", "--json", "--tensors")
    facts = json.loads(bonsai("convert", "model", "out", *flags).out)
    assert facts["bytes"] == 62304 and facts["relative_error"] == 0
    assert facts["fallbacks"] == [] and len(facts["tensors"]) == 13
    with Checkpoint.open("out") as opened:
        assert "model.npz" in opened.manifest.files


def test_convert_refuses_what_is_there(bonsai, checkpoint):
    assert bonsai("convert", "model", "out").code == 0
    result = bonsai("convert", "model", "out")
    assert result.code == 1 and "out" in result.err and result.err.count("\n") == 2
    assert bonsai("convert", "model", "out", "--overwrite").code == 0


@pytest.mark.parametrize(
    "arguments",
    [("none", "out"), ("model", "out", "--from", "gguf"), (".", "out")],
)
def test_a_failed_conversion_leaves_nothing(bonsai, checkpoint, tmp_path, arguments):
    before = sorted(path.name for path in tmp_path.iterdir())
    result = bonsai("convert", *arguments)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: ") and "Traceback" not in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_convert_flags_are_checked_before_anything_is_read(bonsai):
    bad = {"--quant": "q3", "--group-size": "32", "--packing": "t3", "--from": "onnx"}
    for flag, value in {**bad, "--container": "zip", "--shard-bytes": "0"}.items():
        result = bonsai("convert", "none", "out", flag, value)
        assert result.code == 2 and value in result.err


def test_convert_shows_progress_to_people(bonsai, checkpoint):
    result = bonsai("convert", "model", "out", terminal=True)
    assert "convert" in result.err and result.out.startswith("qwen3 from bonsai")
    shutil.rmtree("out")
    assert bonsai("convert", "model", "out", "-q", terminal=True).err == ""


@pytest.fixture
def scripted(monkeypatch):
    backend = ScriptedBackend(["a", "b", "c"], ends=False)
    monkeypatch.setattr(generation, "load", lambda name, **_: model(backend))
    monkeypatch.setenv("BONSAI_MODEL", "scripted")
    return backend


BENCHED = r"""model    scripted
backend  scripted: no weights
prefill  [\d.]+ tok/s, spread [\d.]+%  \(7 tokens @ 3\)
decode   [\d.]+ tok/s, spread [\d.]+%  \(5 tokens @ 3\)
load     [\d.]+ s
memory   [\d.]+ MB at most
"""


def test_bench_measures_what_was_asked(bonsai, scripted):
    result = bonsai("bench", "-p", "7", "-n", "5", "-d", "3", "-r", "2")
    assert result.code == 0 and result.err == ""
    assert re.fullmatch(BENCHED, result.out)
    assert [len(ids) for ids in scripted.prompts] == [3, 7, 3, 7, 3, 7, 4, 4, 4]
    assert scripted.steps == 3 * (1 + 5) and scripted.open_sessions == 0


def test_bench_ends_with_one_line_of_json(bonsai, scripted):
    result = bonsai("bench", "-p", "7", "-n", "0", "-r", "3", "--json")
    facts = json.loads(result.out.splitlines()[-1])
    assert facts["prefill_tps"] == sorted(facts["prefill_runs"])[1] > 0
    assert len(facts["prefill_runs"]) == 3
    assert facts["decode_tps"] is None and facts["decode_gbps"] is None
    assert facts["peak_bytes"] > 1_000_000
    assert facts["model"] == facts["backend"] == "scripted" and facts["device"] == "no weights"
    assert facts["threads"] is None and facts["cpu"]
    assert facts["prompt_tokens"] == 7 and facts["version"]


def test_bench_reports_the_threads_of_the_backend(bonsai, scripted, monkeypatch):
    from bonsai.testing import ScriptedEngine

    monkeypatch.setattr(ScriptedEngine, "description", "cpu: avx2, 2 threads, exact")
    result = bonsai("bench", "-p", "7", "-n", "0", "-r", "1", "--json")
    facts = json.loads(result.out.splitlines()[-1])
    assert (facts["backend"], facts["device"]) == ("cpu", "avx2, 2 threads, exact")
    assert facts["threads"] == 2


def test_bench_says_when_it_does_not_fit(bonsai, scripted):
    result = bonsai("bench", "-p", "5000")
    assert result.code == 1 and result.err == (
        "error: the bench needs 5,000 tokens of context, max_context is 4,096\n"
        "hint:  smaller -p, -n and -d: the model was made for 4,096 tokens\n"
    )
    with pytest.raises(InvalidRequest) as caught:
        timing.run(model(ScriptedBackend(["a"]), max_context=100), prompt=4096, reply=0)
    assert caught.value.hint == "--max-context 4096, or smaller -p, -n and -d"
    assert bonsai("bench", "-p", "0", "-n", "0").code == 2
    with pytest.raises(InvalidRequest):
        timing.run(model(ScriptedBackend(["a"])), prompt=1, reply=4095)


def test_rates_are_medians():
    rate = timing.Rate((10.0, 30.0, 20.0))
    assert (rate.median, rate.spread) == (20.0, 1.0)
    found = timing.Bench(None, rate, 0, 5, 0, 2_000_000, 0.0, 0)
    assert found.decode_gbps == pytest.approx(0.04)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends processes without asking")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_terminated_conversion_leaves_nothing(tmp_path, name):
    source = tiny.write(tmp_path / "source")
    code = f"""
import os, signal, sys
from bonsai.cli import main
from bonsai.format import CheckpointWriter
CheckpointWriter.finish = lambda *a, **k: os.kill(os.getpid(), signal.{name})
sys.argv[1:] = {["convert", str(source), str(tmp_path / "out")]!r}
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    number = getattr(signal, name)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_models_without_a_verb_is_a_usage_error(bonsai):
    assert bonsai("models") == Result(
        2, "", "error: Missing command\nhint:  bonsai models --help\n"
    )


def test_doctor_says_what_works_and_why_not(bonsai, monkeypatch):
    import bonsai.backends as backends

    monkeypatch.setattr(
        backends, "status", lambda: {"cpu": "unavailable: not built", "reference": "NumPy"}
    )
    result = bonsai("doctor")
    assert result.code == 0 and result.err == ""
    for line in ("backend   cpu: not built", "backend   reference: NumPy", "0 B in 0 models"):
        assert line in result.out
    facts = json.loads(bonsai("doctor", "--json").out)
    assert facts["backends"]["cpu"] == {"works": False, "reason": "not built"}
    assert facts["backends"]["reference"] == {"works": True, "status": "NumPy"}
    assert facts["libraries"]["numpy"] and facts["cpus"] >= 1 and facts["store"]["models"] == 0


def test_what_comes_from_files_cannot_steer_a_terminal():
    assert printable("a\nb\x1b[2J\u202ec \u00fc") == "a b\\x1b[2J\\u202ec \u00fc"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (98_400_000, "98.4 MB"), (5.5e9, "5.5 GB"),
     (2e12, "2.0 TB"), (999_600, "1.0 MB")],
)  # fmt: skip
def test_sizes_are_decimal(nbytes, text):
    assert size(nbytes) == text
