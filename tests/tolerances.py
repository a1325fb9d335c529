"""How far two results may be apart, each bound once and with its reason. Never tuned for one test.

Each is a pair of keyword arguments of `numpy.testing.assert_allclose`: |a - b| <= atol + rtol |b|.
"""

EXACT = {"rtol": 0.0, "atol": 0.0}
"""Copies, integer sums, and the same operations in the same order."""

F32_REDUCTION = {"rtol": 1e-5, "atol": 1e-5}
"""One float32 op against float64: sums of up to some thousand terms of size about 1."""

F32_MODEL = {"rtol": 0.0, "atol": 1e-4}
"""Logits (up to about 6) of a tiny model in float32 against float64 or another float32."""

INT8_ACTIVATIONS = {"rtol": 0.02, "atol": 0.02}
"""One linear whose activations are rounded to int8: half a step of 1/127 of the group's largest,
which random signs average over the sum; relative to outputs of size about 1."""

FP16_STATE = {"rtol": 5e-3, "atol": 5e-3}
"""Attention over keys and values kept in fp16 (11 bits) against float64."""
