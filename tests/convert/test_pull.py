"""Pulling a repository that holds a foreign format: only its data comes, and it is converted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gguf_writer
import hf_writer
import pytest
import tiny_gguf
from fake_hub import FakeHub, serve

from bonsai import hub
from bonsai.convert import convert
from bonsai.format import Checkpoint


def pull(home: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("huggingface_hub", reason="needs huggingface_hub (extra: hub)")
    environment = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": url}
    command = [sys.executable, "-m", "bonsai", "models", "pull", *arguments]
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
        encoding="utf-8", check=False,
    )  # fmt: skip


def fetched(server: FakeHub) -> set[str]:
    """The files whose content was asked for."""
    return {r.rsplit("/", 1)[1] for r in server.requests if r.startswith("GET") and "resolve" in r}


def same_weights(a: Path, b: Path) -> bool:
    with Checkpoint.open(a) as one, Checkpoint.open(b) as other:
        return [file.sha256 for name, file in one.manifest.files.items() if "model" in name] == [
            file.sha256 for name, file in other.manifest.files.items() if "model" in name
        ]


def test_pull_converts_a_hugging_face_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = hf_writer.write(tmp_path / "raw", shards=2)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with serve() as server:
        code = {"modeling_x.py": b"raise SystemExit", "pytorch_model.bin": b"x"}
        commit = server.add("o/raw", {**files, **code, "sub/dir.json": b"{}"})
        done = pull(tmp_path / "home", server.url, "o/raw")
        assert (done.returncode, done.stderr) == (0, "")
        assert fetched(server) == set(files)
    place = hub.resolve("o/raw")
    assert done.stdout == f"{place}\n" and place.name == commit
    assert same_weights(place, convert(folder, tmp_path / "direct").path)
    assert [p.name for p in place.parent.iterdir() if p.name != "refs.json"] == [commit]


def test_pull_takes_the_one_gguf_file_that_was_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    spec = hf_writer.Tiny()
    source = tmp_path / "a.gguf"
    tiny_gguf.write(source, spec)
    data = source.read_bytes()
    with serve() as server:
        server.add("o/gguf", {"a.gguf": data, "b.gguf": b"GGUF damaged", "x.imatrix": b"x"})
        assert pull(tmp_path / "home", server.url, "o/gguf").returncode == 1
        assert fetched(server) == set()
        assert pull(tmp_path / "home", server.url, "o/gguf", "--file", "a.gguf").returncode == 0
        assert fetched(server) == {"a.gguf"}
        other = pull(tmp_path / "home", server.url, "o/gguf", "--file", "b.gguf")
    assert other.returncode == 1
    assert other.stderr == (
        "error: o/gguf is here already, made from a.gguf, not from b.gguf\n"
        "hint:  bonsai models rm o/gguf\n"
    )
    assert same_weights(hub.resolve("o/gguf"), convert(source, tmp_path / "direct").path)


def test_a_source_that_cannot_be_converted_leaves_nothing(tmp_path):
    with serve() as server:
        server.add("o/bad", {"bad.gguf": gguf_writer.header(3, 1, 0) + b"\xff" * 40})
        done = pull(tmp_path / "home", server.url, "o/bad")
    assert done.returncode == 1 and done.stderr.startswith("error: ")
    store = tmp_path / "home" / "bonsai"
    assert not store.exists() or [p for p in store.rglob("*") if p.is_file()] == []
