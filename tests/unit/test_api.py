"""The public names: complete, sorted, lazy, and callable where they promise to be."""

from __future__ import annotations

import subprocess
import sys

import pytest

import bonsai
from bonsai import errors


def fresh(code: str) -> str:
    """What `code` prints in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_public_names_are_sorted_and_all_there():
    assert bonsai.__all__ == sorted(set(bonsai.__all__))
    for name in bonsai.__all__:
        assert getattr(bonsai, name) is not None
    assert dir(bonsai) == bonsai.__all__


def test_every_error_is_public():
    assert set(errors.__all__) <= set(bonsai.__all__)
    for name in errors.__all__:
        assert issubclass(getattr(bonsai, name), bonsai.BonsaiError)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        bonsai.nonsense  # noqa: B018


def test_public_names_know_where_they_are():
    from bonsai.generate import Completion, load
    from bonsai.sampling import Sampling

    assert (bonsai.load, bonsai.Completion, bonsai.Sampling) == (load, Completion, Sampling)


def test_import_loads_nothing_but_a_few_modules_of_python():
    found = fresh(
        "import sys; before = set(sys.modules); import bonsai; new = set(sys.modules) - before\n"
        "print(len(new) < 100, {m.split('.')[0] for m in new} - set(sys.stdlib_module_names),"
        " [m for m in new if 'bonsai.' in m])"
    )
    assert found == "True {'bonsai'} []"


def test_errors_and_sampling_need_no_backend():
    assert (
        fresh(
            "import sys, bonsai\n"
            "bonsai.InvalidRequest, bonsai.Sampling(temperature=0.7)\n"
            "print([m for m in sys.modules if m.startswith('bonsai.backends')])"
        )
        == "[]"
    )


def test_backends_is_a_package_and_a_function():
    found = bonsai.backends()
    assert list(found) == list(bonsai.backends.NAMES)
    assert found["reference"].startswith("NumPy")
    assert all(isinstance(text, str) and text for text in found.values())
    assert found == bonsai.backends.status()


def test_convert_is_a_package_and_a_function():
    assert callable(bonsai.convert)
    with pytest.raises(bonsai.BonsaiError):
        bonsai.convert("no such file.gguf", "nowhere")


def test_version_is_the_distributions():
    from importlib.metadata import version

    assert bonsai.__version__ == version("bonsai-lm")


def test_library_prints_nothing(capsys):
    backend = bonsai.testing.ScriptedBackend(["Hello"])
    bonsai.testing.model(backend).chat().send("Hi")
    assert capsys.readouterr() == ("", "")
