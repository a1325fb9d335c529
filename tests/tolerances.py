"""How far two results may be apart, each bound once and with its reason. Never tuned for one test.

Each is a pair of keyword arguments of `numpy.testing.assert_allclose`: |a - b| <= atol + rtol |b|.
"""

EXACT = {"rtol": 0.0, "atol": 0.0}
"""Copies, integer sums, and the same operations in the same order."""

F32_REDUCTION = {"rtol": 1e-5, "atol": 1e-5}
"""One float32 op against float64: sums of up to some thousand terms of size about 1."""

F32_MODEL = {"rtol": 0.0, "atol": 1e-4}
"""Logits (up to about 6) of a tiny model in float32 against float64 or another float32."""

INT8_ACTIVATIONS = {"rtol": 0.0, "atol": 0.1}
"""One linear that rounds inputs of size 1.7 to int8, to outputs of about that size. A step is 1/127
of the largest input of a group (about 0.04), its error 0.012 on average; 0.1 is seven times what
random signs make of it. Where a weight sits is tested apart: one input at a time, much closer."""

FP16_STATE = {"rtol": 5e-3, "atol": 5e-3}
"""Attention over keys and values kept in fp16 (11 bits) against float64."""

INT8_MODEL = {"rtol": 0.0, "atol": 0.25}
"""Logits (of size 1) of a tiny random model whose activations are int8 and whose keys and values
are fp16: at most 0.15 in the golden models, 2 to 4 % of their size on average."""

INT8_HYBRID = {"rtol": 0.0, "atol": 1.2}
"""The same with gated delta nets, whose norm after the memory makes a small output, and its error,
large again: up to 0.96 in the golden models; a wrong model is off by 4 and more."""

INT8_SAME = {"rtol": 0.0, "atol": 0.1}
"""One history computed in two ways: where float32 sums differ in the last bit, an activation can
fall to the next step of int8."""

F16_MODEL = {"rtol": 0.0, "atol": 0.1}
"""Logits (up to about 6) of a tiny model whose activations, keys and values are float16 (11 bits):
0.01 without and 0.05 with gated delta nets, 0.001 to 0.003 on average."""

BF16_MODEL = {"rtol": 0.0, "atol": 0.4}
"""The same in bfloat16 (8 bits): 0.07 to 0.21, 0.01 to 0.02 on average."""
