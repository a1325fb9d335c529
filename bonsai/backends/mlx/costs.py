"""What decoding should cost on Apple silicon: bytes read per token over bandwidth, a prediction.

Knows the vendor's bandwidths and what share of them MLX programs have been seen to reach. Nothing
here was measured by this project on a Mac; `bonsai bench` prints a measurement beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BANDWIDTH", "SHARE", "Prediction", "bandwidth", "predict"]

BANDWIDTH: dict[str, tuple[float, float]] = {
    "M1": (68, 68), "M1 Pro": (200, 200), "M1 Max": (400, 400), "M1 Ultra": (800, 800),
    "M2": (100, 100), "M2 Pro": (200, 200), "M2 Max": (400, 400), "M2 Ultra": (800, 800),
    "M3": (100, 100), "M3 Pro": (150, 150), "M3 Max": (300, 400), "M3 Ultra": (819, 819),
    "M4": (120, 120), "M4 Pro": (273, 273), "M4 Max": (410, 546),
    "M5": (153, 153), "M5 Pro": (307, 307), "M5 Max": (460, 614),
}  # fmt: skip
"""GB/s (1e9 bytes) of the unified memory, from the technical specifications that Apple publishes of
each machine; two where a chip is sold with a smaller and a larger GPU."""

SHARE = (0.5, 0.7)
"""Of the bandwidth: published rates of 2-bit 27B models with MLX programs, on M1 Pro to M5 Max, are
45 to 69 % of it, most of them above half (docs/mac.md)."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Tokens per second of decoding at an empty context, lowest and highest, and why."""

    low: float
    high: float
    basis: str

    def __str__(self) -> str:
        return f"{self.low:.1f} to {self.high:.1f} tok/s predicted ({self.basis})"


def bandwidth(device: str) -> tuple[float, float] | None:
    """GB/s of a device that calls itself "Apple M3 Max"; None where it is not in the table."""
    return BANDWIDTH.get(device.removeprefix("Apple ").strip())


def predict(device: str, bytes_per_token: int) -> Prediction | None:
    """Decoding reads `bytes_per_token`; None for devices that are not in the table."""
    found = bandwidth(device)
    if found is None or bytes_per_token <= 0:
        return None
    low, high = (1e9 * found[i] * SHARE[i] / bytes_per_token for i in (0, 1))
    rates = f"{found[0]:.0f}" if found[0] == found[1] else f"{found[0]:.0f} to {found[1]:.0f}"
    shares = f"{100 * SHARE[0]:.0f} to {100 * SHARE[1]:.0f} %"
    basis = f"{device}: {shares} of {rates} GB/s, {bytes_per_token / 1e9:.2f} GB per token"
    return Prediction(low, high, basis)
