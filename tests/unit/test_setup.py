"""The set-up on a bare machine: what is missing is named, paths may be odd, scripts are ASCII."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    ROOT / "Makefile",
    ROOT / ".ci" / "run",
    *sorted((ROOT / "tools").iterdir()),
    *sorted((ROOT / ".github" / "workflows").iterdir()),
]
COMMANDS = ("sh", "make", "touch", "tail", "rm", "mkdir", "cat", "chmod")
needs_make = pytest.mark.skipif(
    os.name == "nt" or shutil.which("make") is None, reason="needs make and a POSIX shell"
)


@pytest.mark.parametrize("script", [p for p in SCRIPTS if p.is_file()], ids=lambda p: p.name)
def test_scripts_are_ascii_and_name_no_machine(script):
    text = script.read_bytes().decode("ascii")
    assert "\r" not in text
    for word in ("/home/", "/opt/", "/root", "pypi.org", "files.pythonhosted"):
        assert word not in text


@pytest.fixture
def machine(tmp_path):
    """machine("g++", PYTHON=...) -> what `make demo` says where only those programs exist."""
    folder = tmp_path / "a folder a b" / "\u00fc"
    bare = tmp_path / "bin"
    bare.mkdir()
    for name in COMMANDS:
        found = shutil.which(name)
        assert found is not None
        (bare / name).symlink_to(found)
    for name in ("Makefile", "pyproject.toml", "CMakeLists.txt", "tools/setup.sh"):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)

    def demo(*programs: str, python: str = "python3", **variables: str):
        for name in programs:
            _script(bare / name, "exit 0")
        environment = {"PATH": str(bare), "LC_ALL": "C", **variables}
        done = subprocess.run(
            ["make", "-s", "demo", f"PYTHON={python}"], cwd=folder, env=environment,
            capture_output=True, encoding="utf-8", check=False,
        )  # fmt: skip
        assert not (folder / ".venv" / "demo.stamp").exists()
        return done

    demo.bare = bare
    demo.folder = folder
    return demo


def _script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="ascii")
    path.chmod(0o755)


def _said(done) -> list[str]:
    """The error and the hint; whatever make adds in its own words is left out."""
    assert done.returncode != 0
    return [line for line in done.stderr.splitlines() if line.startswith(("error:", "hint:"))]


@needs_make
def test_no_python_is_named(machine):
    error, hint = _said(machine())
    assert error == "error: no Python: 'python3' is not on PATH"
    assert "apt install python3" in hint


@needs_make
def test_an_old_python_is_named(machine):
    _script(machine.bare / "python3", 'case "$1" in -c) exit 1;; *) echo Python 3.8.1;; esac')
    error, _ = _said(machine())
    assert error == "error: Python 3.8.1 is too old, bonsai needs 3.10 or newer"


@needs_make
def test_no_venv_module_is_named(machine):
    _script(machine.bare / "python3", 'case "$2" in *ensurepip*) exit 1;; *) exit 0;; esac')
    error, hint = _said(machine())
    assert error.startswith("error: python3 cannot make virtual environments")
    assert "apt install python3-venv" in hint


@needs_make
def test_no_headers_are_named(machine):
    _script(machine.bare / "python3", 'case "$2" in *Python.h*) exit 1;; *) exit 0;; esac')
    error, hint = _said(machine())
    assert error == "error: the C headers of python3 are missing (Python.h)"
    assert "apt install python3-dev" in hint


@needs_make
def test_no_compiler_is_named(machine):
    _script(machine.bare / "python3", "exit 0")
    error, hint = _said(machine())
    assert error == "error: no C++ compiler: none of c++, g++, clang++ is on PATH"
    assert "apt install g++" in hint and "xcode-select --install" in hint
    error, _ = _said(machine(CXX="icpx -O2"))
    assert error == "error: the C++ compiler 'icpx -O2' (CXX) is not on PATH"


@needs_make
def test_a_failing_build_shows_the_end_of_its_log(machine):
    _script(
        machine.bare / "python3",
        'if [ "$1" = -m ]; then mkdir -p .venv/bin && cat >.venv/bin/python <<EOF\n'
        "#!/bin/sh\necho first\necho 'CMake Error: no such thing'\nexit 1\nEOF\n"
        "chmod 755 .venv/bin/python; fi",
    )
    done = machine("g++")
    error, hint = _said(done)
    assert error == "error: bonsai could not be built or installed"
    assert hint.endswith("and in .venv/setup.log")
    assert "first\nCMake Error: no such thing\n" in done.stderr
    assert (machine.folder / ".venv" / "setup.log").exists()


@needs_make
def test_a_failed_download_ends_the_demo(machine):
    """The environment is made, its Python can do everything but pull."""
    inner = (
        'echo "$*" >>.venv/calls\ncase "$*" in *pull*) echo "error: no network" >&2; exit 1;; esac'
    )
    _script(
        machine.bare / "python3",
        'if [ "$1" = -m ]; then mkdir -p .venv/bin && cat >.venv/bin/python <<"EOF"\n'
        f"#!/bin/sh\n{inner}\nEOF\nchmod 755 .venv/bin/python; fi",
    )
    _script(machine.bare / "g++", "exit 0")
    done = subprocess.run(
        ["make", "-s", "demo", "PYTHON=python3"], cwd=machine.folder,
        env={"PATH": str(machine.bare), "LC_ALL": "C"},
        capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert _said(done) == ["error: no network"]
    calls = (machine.folder / ".venv" / "calls").read_text().splitlines()
    assert calls[-1].startswith("-m bonsai models pull ")


@needs_make
def test_a_failed_environment_is_not_left_half_made(machine):
    _script(
        machine.bare / "python3",
        '[ "$1" = -m ] && mkdir .venv && echo "no space" >&2 && exit 1; exit 0',
    )
    error, _ = _said(machine("g++"))
    assert error == "error: python3 could not make the environment .venv"
    assert not (machine.folder / ".venv").exists()


def test_the_running_python_passes_the_checks():
    """The questions that the script asks an interpreter have the right answer for this one."""
    text = (ROOT / "tools" / "setup.sh").read_text(encoding="ascii")
    assert "sys.version_info < (3, 10)" in text
    code = "import sys; sys.exit(sys.version_info < (3, 10))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
