"""What decoding on a Mac is predicted to cost, and where the prediction is shown."""

from __future__ import annotations

import json
import sys

import pytest
from command import run

from bonsai import backends
from bonsai.backends import Check
from bonsai.backends.mlx import BACKEND, costs
from bonsai.testing import ScriptedBackend, model


@pytest.mark.parametrize(
    ("device", "low", "high"),
    [("Apple M1", 4.72, 6.61), ("Apple M4 Pro", 18.96, 26.54), ("Apple M3 Max", 20.83, 38.89)],
)
def test_a_prediction_is_bandwidth_over_bytes(device: str, low: float, high: float) -> None:
    found = costs.predict(device, 7_200_000_000)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))
    assert "predicted" in str(found)
    assert device in str(found)


@pytest.mark.parametrize(("device", "count"), [("Apple M99", 10), ("AMD", 10), ("Apple M1", 0)])
def test_nothing_is_predicted_for_what_is_not_known(device: str, count: int) -> None:
    assert costs.predict(device, count) is None


def test_larger_chips_of_a_generation_are_not_slower() -> None:
    for generation in range(1, 6):
        names = [f"M{generation}{kind}" for kind in ("", " Pro", " Max")]
        rates = [costs.BANDWIDTH[name] for name in names]
        assert rates == sorted(rates)
        assert all(low <= high for low, high in rates)


@pytest.fixture
def cli_runner(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return lambda *arguments: run(monkeypatch, *arguments)


class Checked:
    def self_check(self):
        return iter([Check("part", True, "error 0"), Check("other", False, "error 9")])


def test_bench_shows_a_prediction_beside_the_measurement(cli_runner, monkeypatch) -> None:
    backend = ScriptedBackend(["a"], ends=False)
    made = model(backend)
    predicted = costs.predict("Apple M4", 1_000_000_000)
    monkeypatch.setattr(type(made.engine), "prediction", predicted, raising=False)
    monkeypatch.setattr("bonsai.generate.load", lambda name, **_: made)
    shown = cli_runner("bench", "-m", "scripted", "-p", "3", "-n", "2", "-r", "1", "--json").out
    assert "expected 60.0 to 84.0 tok/s predicted (Apple M4: 50 to 70 % of 120 GB/s" in shown
    assert json.loads(shown.splitlines()[-1])["decode_tps_predicted"] == pytest.approx([60, 84])


def test_doctor_shows_every_check_and_fails_with_one(cli_runner, monkeypatch) -> None:
    monkeypatch.setattr(backends, "NAMES", ("reference",))
    assert cli_runner("doctor", "--full").code == 0
    found = backends.get("reference")
    monkeypatch.setattr(type(found), "self_check", Checked.self_check, raising=False)
    shown = cli_runner("doctor", "--full")
    assert shown.code == 1
    assert "check     reference: part: ok, error 0\n" in shown.out
    assert "check     reference: other: WRONG, error 9\n" in shown.out
    facts = json.loads(cli_runner("doctor", "--full", "--json").out)
    assert [check["good"] for check in facts["checks"]["reference"]] == [True, False]
    assert "checks" not in json.loads(cli_runner("doctor", "--json").out)


def test_the_backend_is_right_about_itself() -> None:
    pytest.importorskip("mlx.core", reason="MLX is not installed")
    found = list(BACKEND.self_check())
    assert len(found) > 15
    assert all(check.good for check in found), [c for c in found if not c.good]


def test_a_check_that_breaks_is_a_finding() -> None:
    pytest.importorskip("mlx.core", reason="MLX is not installed")
    from bonsai.backends.mlx import check

    def broken():
        raise RuntimeError("no such kernel")

    found = check._try("a part", broken)
    assert (found.good, found.detail) == (False, "RuntimeError: no such kernel")
    assert not check._near(check.mx.ones((3,)), check.np.array([1.0, 1.0, 1.01]), 1e-3)[0]


def test_auto_is_mlx_on_apple_silicon_only(monkeypatch) -> None:
    for system, machine, expected in (
        ("darwin", "arm64", ("mlx", "cpu")),
        ("darwin", "x86_64", ("cpu",)),
        ("linux", "aarch64", ("cpu",)),
        ("win32", "AMD64", ("cpu",)),
    ):
        monkeypatch.setattr(backends.sys, "platform", system)
        monkeypatch.setattr(backends.platform, "machine", lambda machine=machine: machine)
        assert backends.automatic() == expected


def test_a_machine_without_mlx_hears_how_to_get_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.delitem(sys.modules, "bonsai.backends.mlx.device", raising=False)
    with pytest.raises(backends.BackendUnavailable, match="MLX"):
        backends.get("mlx")
    assert backends.status()["mlx"].startswith("unavailable: MLX ")
