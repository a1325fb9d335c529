"""Export and convert again: the same bits, the same tokenizer; and what is refused, by name."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import command
import numpy as np
import pytest
import tiny
import vocab
from tiny import Tiny

import bonsai
import bonsai.convert as convert
from bonsai import fidelity
from bonsai.config import Yarn
from bonsai.convert.export import TARGETS, export
from bonsai.convert.gguf import read_gguf
from bonsai.errors import ConversionError, InvalidRequest, UnsupportedModel
from bonsai.format import Checkpoint
from bonsai.matrix import PackedMatrix
from bonsai.tokenizer import Tokenizer

GGUF = [target for target in TARGETS if target.startswith("gguf")]
WORDS = ("hello", "world", "\u0120the", "\u0120the\u0120", "ing", "12")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
SPLIT = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False}
SAYINGS = (
    "hello world", " the thing: 1234 caf\u00e9 cafe\u0301 don't\n\n  x",
    "<|im_start|>\u00df\U0001f600",
)  # fmt: skip
SPEC = Tiny(hidden=256, ffn=512, heads=4, kv_heads=2, vocab=300, group=128)


def tokenizer_files(**parts) -> dict[str, bytes]:
    """A tokenizer as Qwen models have it, with a chat template and two ends."""
    steps = {"type": "Sequence", "pretokenizers": [SPLIT, {**LEVEL, "use_regex": False}]}
    pieces = {"normalizer": {"type": "NFC"}, "pre_tokenizer": steps, **parts}
    document = vocab.byte_level(WORDS, SPECIALS, **pieces)
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    pad = {"__type": "AddedToken", "content": "<|endoftext|>", "special": True, **flags}
    config = {"eos_token": "<|im_end|>", "pad_token": pad}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    generation = {"eos_token_id": [id_of(document, s) for s in ("<|im_end|>", "<|endoftext|>")]}
    return {
        "tokenizer.json": json.dumps(document).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps(generation).encode(),
        "chat_template.jinja": vocab.CHATML.encode(),
    }


def id_of(document: dict, content: str) -> int:
    return next(t["id"] for t in document["added_tokens"] if t["content"] == content)


def write(folder: Path, spec: Tiny = SPEC, made: tiny.Weights | None = None, **parts) -> Path:
    return tiny.save(folder, spec, made or tiny.weights(spec), tokenizer_files(**parts))


def there_and_back(source: Path, target: str, **options) -> Path:
    """Exported and converted again."""
    out = source.parent / ("pack" if target == "mlx-2bit" else "m.gguf")
    packing = {"gguf-ptq1_0": "t5"}.get(target)
    export(source, out, to=target, **options)
    convert(out, source.parent / "again", packing=packing)
    return source.parent / "again"


def assert_same_tensors(a: Path, b: Path) -> None:
    with Checkpoint.open(a) as one, Checkpoint.open(b) as two:
        assert set(one.names()) == set(two.names())
        for name in one.names():
            assert one.entry(name) == replace(two.entry(name), zeros=one.entry(name).zeros), name
            for plane, values in one.planes(name).items():
                assert values.tobytes() == two.planes(name)[plane].tobytes(), plane
        strip = {"eos", "context"} - {"context"}
        left, right = ({k: v for k, v in c.config.items() if k not in strip} for c in (one, two))
        assert left == right


def assert_same_tokenizer(a: Path, b: Path) -> None:
    one, two = Tokenizer.open(a), Tokenizer.open(b)
    assert (one.size, one.eos, one.bos, one.prefix) == (two.size, two.eos, two.bos, two.prefix)
    for text in SAYINGS:
        for special in (False, True):
            ids = one.encode(text, special=special, add_bos=True)
            assert ids == two.encode(text, special=special, add_bos=True)
            assert one.decode(ids) == two.decode(ids)
    if one.has_chat_template:
        chat = [{"role": "user", "content": "hello <|im_end|>"}]
        assert one.render(chat) == two.render(chat)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("target", "packing", "group"),
    [
        ("gguf-pq2_0", "t2", 128), ("gguf-ptq1_0", "t5", 128), ("gguf-tq2_0", "t2", 256),
        ("gguf-q2_0", "t2", 64), ("mlx-2bit", "t2", 128), ("mlx-2bit", "t2", 64),
    ],
)  # fmt: skip
def test_bits_come_back(tmp_path, architecture, tied, target, packing, group):
    spec = replace(SPEC, architecture=architecture, tied=tied, packing=packing, group=group)
    again = there_and_back(write(tmp_path / "m", spec), target)
    assert_same_tensors(tmp_path / "m", again)
    assert_same_tokenizer(tmp_path / "m", again)


def test_rows_of_llama_are_interleaved_in_the_file(tmp_path):
    """Row 2 i + j of a head is our row i + j * 32: the file differs, and comes back."""
    source = write(tmp_path / "m", replace(SPEC, architecture="llama", packing="f32", group=32))
    export(source, tmp_path / "m.gguf", to="gguf-pq2_0")
    raw = read_gguf(tmp_path / "m.gguf").rows("blk.0.attn_q.weight").view("<f4")
    with Checkpoint.open(source) as checkpoint:
        ours = checkpoint.matrix("layers.0.attn.q").rows()
    for head in range(4):
        for i in range(32):
            assert np.array_equal(raw[64 * head + 2 * i], ours[64 * head + i])
            assert np.array_equal(raw[64 * head + 2 * i + 1], ours[64 * head + i + 32])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("packing", ["t2", "t5", "b1"])
def test_any_ternary_packing_keeps_its_values(tmp_path, target, packing):
    spec = replace(SPEC, packing=packing, group=256 if target == "gguf-tq2_0" else 128)
    if packing == "b1" and target == "gguf-tq2_0":
        spec = replace(spec, group=128)
    again = there_and_back(write(tmp_path / "m", spec), target)
    with Checkpoint.open(tmp_path / "m") as one, Checkpoint.open(again) as two:
        for name in one.names():
            if len(one.entry(name).shape) == 2:
                assert np.array_equal(one.matrix(name).rows(), two.matrix(name).rows()), name


def test_imports_of_twins_compute_the_same(tmp_path):
    """PQ2_0, PTQ1_0 and MLX files of one model: `compare` finds nothing between them."""
    source = write(tmp_path / "m")
    models = []
    for target in ("gguf-pq2_0", "gguf-ptq1_0", "mlx-2bit"):
        export(source, tmp_path / target, to=target)
        convert(tmp_path / target, tmp_path / f"{target}.out")
        models.append(bonsai.load(tmp_path / f"{target}.out", backend="reference"))
    for other in models[1:]:
        found = fidelity.compare(models[0], other, "".join(SAYINGS))
        assert (found.max, found.same_top, found.ratio) == (0, 1, 1)


@pytest.mark.parametrize("target", ["gguf-pq2_0", "mlx-2bit"])
@pytest.mark.parametrize("packing", ["f32", "f16", "bf16"])
def test_plain_matrices_are_copied(tmp_path, target, packing):
    again = there_and_back(write(tmp_path / "m", replace(SPEC, packing=packing)), target)
    assert_same_tensors(tmp_path / "m", again)


def centred(spec: Tiny, packing: str) -> tiny.Weights:
    """Codes with the biases that Q4_0 and Q8_0 imply."""
    made = tiny.weights(replace(spec, packing=packing, group=32))
    for name, matrix in made.matrices.items():
        biases = matrix.scales * np.float16(-8 if packing == "q4" else -128)
        made.matrices[name] = replace(matrix, biases=biases)
    return made


@pytest.mark.parametrize(("packing", "kind"), [("q4", "Q4_0"), ("q8", "Q8_0")])
def test_centred_codes_have_a_type(tmp_path, packing, kind):
    source = write(tmp_path / "m", SPEC, centred(SPEC, packing))
    again = there_and_back(source, "gguf-pq2_0")
    assert read_gguf(tmp_path / "m.gguf").tensors["token_embd.weight"].type.name == kind
    assert_same_tensors(source, again)


def test_codes_with_biases_have_a_type_of_four_bits(tmp_path):
    source = write(tmp_path / "m", replace(SPEC, packing="q4", group=32))
    again = there_and_back(source, "gguf-pq2_0")
    assert read_gguf(tmp_path / "m.gguf").tensors["token_embd.weight"].type.name == "Q4_1"
    assert_same_tensors(source, again)
    source = write(tmp_path / "8", replace(SPEC, packing="q8", group=32))
    with pytest.raises(ConversionError, match=r"embedding: no GGUF type .*\(and 14 more tensors"):
        export(source, tmp_path / "8.gguf", to="gguf-pq2_0")


@pytest.mark.parametrize("packing", ["q4", "q8"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_mlx_has_any_affine_codes(tmp_path, packing, group):
    source = write(tmp_path / "m", replace(SPEC, packing="t2", table=packing, group=group))
    again = there_and_back(source, "mlx-2bit")
    assert_same_tensors(source, again)
    config = json.loads((tmp_path / "pack/config.json").read_text())
    own = {"bits": 4 if packing == "q4" else 8, "group_size": group}
    assert config["quantization"]["bits"] == 2
    assert config["quantization"]["model.embed_tokens"] == own


def shared_pairs(spec: Tiny) -> tiny.Weights:
    """Groups of 128 whose scales are equal in pairs."""
    made = tiny.weights(spec)
    for name, matrix in made.matrices.items():
        assert isinstance(matrix, PackedMatrix)
        scales = np.repeat(matrix.scales[:, ::2], 2, axis=1)
        made.matrices[name] = replace(matrix, scales=scales)
    return made


@pytest.mark.parametrize("packing", ["t2", "t5"])
def test_groups_that_share_a_scale_become_larger(tmp_path, packing):
    spec = replace(SPEC, packing=packing)
    made = shared_pairs(spec)
    again = there_and_back(write(tmp_path / "m", spec, made), "gguf-tq2_0")
    with Checkpoint.open(again) as checkpoint:
        for name, matrix in made.matrices.items():
            assert checkpoint.entry(name).group == 256
            assert np.array_equal(checkpoint.matrix(name).rows(), matrix.rows())
    down = made.matrices["layers.1.ffn.down"]
    assert isinstance(down, PackedMatrix)
    down.scales.view(np.uint16)[17, 3] ^= 1  # one bit of one scale
    write(tmp_path / "bad", spec, made)
    expected = r"layers.1.ffn.down: TQ2_0 cannot .* row 17 has different scales within 256 weights"
    with pytest.raises(ConversionError, match=expected):
        export(tmp_path / "bad", tmp_path / "bad.gguf", to="gguf-tq2_0")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "bad", "m", "m.gguf"]


@pytest.mark.parametrize("target", ["gguf-pq2_0", "gguf-ptq1_0", "gguf-tq2_0"])
def test_widths_that_are_not_whole_blocks_are_refused(tmp_path, target):
    group = 256 if target == "gguf-tq2_0" else 128
    spec = replace(SPEC, ffn=320, group=group)
    source = write(tmp_path / "m", spec)
    with pytest.raises(ConversionError, match=r"0.ffn.down: .* rows of 320 weights") as caught:
        export(source, tmp_path / "m.gguf", to=target)
    assert "--allow-f16" in caught.value.hint
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    again = there_and_back(source, target, allow_f16=True)
    types = {n: t.type.name for n, t in read_gguf(tmp_path / "m.gguf").tensors.items()}
    assert types["blk.0.ffn_down.weight"] == "F16"
    assert types["blk.0.ffn_up.weight"] == target[5:].upper()
    with Checkpoint.open(source) as one, Checkpoint.open(again) as two:
        name = "layers.0.ffn.down"
        assert np.array_equal(one.matrix(name).rows(), two.matrix(name).rows())


@pytest.mark.parametrize("target", ["gguf-q2_0", "mlx-2bit"])
def test_padded_groups_are_cut_into_smaller_ones(tmp_path, target):
    again = there_and_back(write(tmp_path / "m", replace(SPEC, ffn=320)), target)
    with Checkpoint.open(tmp_path / "m") as one, Checkpoint.open(again) as two:
        for name in ("layers.0.ffn.down", "layers.0.ffn.up"):
            assert np.array_equal(one.matrix(name).rows(), two.matrix(name).rows())
        assert two.entry("layers.0.ffn.down").group == 64


@pytest.mark.parametrize("target", ["gguf-pq2_0", "mlx-2bit"])
@pytest.mark.parametrize("yarn", [None, Yarn(4.0, 256, 32.0, 1.0, 0.1 * np.log(4) + 1)])
def test_the_config_comes_back(tmp_path, target, yarn):
    spec = replace(SPEC, yarn=yarn, theta=5e5, context=1024, head_dim=32, eos=(270, 271))
    source = write(tmp_path / "m", spec)
    again = there_and_back(source, target)
    one, two = (json.loads((f / "config.json").read_text()) for f in (source, again))
    assert sorted(two.pop("eos")) >= sorted(one.pop("eos"))
    if yarn is not None:
        factors = [c["rope"]["yarn"].pop("attention_factor") for c in (one, two)]
        assert factors[1] == pytest.approx(factors[0], rel=1e-6)
    assert one == two


def test_another_amplitude_of_yarn(tmp_path):
    source = write(tmp_path / "m", replace(SPEC, yarn=Yarn(4.0, 256, 32.0, 1.0, 1.3)))
    again = there_and_back(source, "gguf-pq2_0")
    found = json.loads((again / "config.json").read_text())["rope"]["yarn"]["attention_factor"]
    assert found == pytest.approx(1.3, rel=1e-6)
    with pytest.raises(ConversionError, match=r"attention_factor of YaRN is 1.3; MLX always uses"):
        export(source, tmp_path / "pack", to="mlx-2bit")


def test_a_number_that_float32_does_not_hold_is_refused(tmp_path):
    source = write(tmp_path / "m", replace(SPEC, theta=1000000.0001))
    with pytest.raises(ConversionError, match=r"'rope' exactly: .*1000000.0001.*would become"):
        export(source, tmp_path / "m.gguf", to="gguf-pq2_0")


@pytest.mark.parametrize(
    ("pre", "normalizer", "ignore_merges"),
    [
        ({**LEVEL, "use_regex": True}, None, False),
        ({**LEVEL, "use_regex": True}, {"type": "NFC"}, False),
        (
            {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    {**LEVEL, "use_regex": True},
                ],
            },
            None,
            False,
        ),
    ],
)
def test_ways_to_cut_text(tmp_path, pre, normalizer, ignore_merges):
    source = write(tmp_path / "m", pre_tokenizer=pre, normalizer=normalizer)
    assert_same_tokenizer(source, there_and_back(source, "gguf-pq2_0"))


def test_a_beginning_token_comes_back(tmp_path):
    files = tokenizer_files()
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": True}
    files["tokenizer_config.json"] = json.dumps(config).encode()
    tiny.write(tmp_path / "m", SPEC, files)
    again = there_and_back(tmp_path / "m", "gguf-pq2_0")
    assert_same_tokenizer(tmp_path / "m", again)
    assert Tokenizer.open(again).prefix == (Tokenizer.open(again).bos,) != (None,)


UNKNOWN = {"type": "Whitespace"}
ODD = [vocab.added("<odd>", 271, lstrip=True)]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"pre_tokenizer": UNKNOWN}, "no name that we know for the way .*Whitespace"),
        ({"normalizer": {"type": "NFKC"}}, "no name that we know"),
        ({"added_tokens": ODD}, "the token '<odd>' is lstrip"),
        ({"decoder": {"type": "Fuse"}}, "decoder 'Fuse': only byte-level"),
    ],
)
def test_tokenizers_that_gguf_cannot_say_are_refused(tmp_path, parts, message):
    files = tokenizer_files()
    document = json.loads(files["tokenizer.json"]) | parts
    files["tokenizer.json"] = json.dumps(document).encode()
    tiny.write(tmp_path / "m", SPEC, {"tokenizer.json": files["tokenizer.json"]})
    with pytest.raises(ConversionError, match=message):
        export(tmp_path / "m", tmp_path / "m.gguf", to="gguf-pq2_0")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    export(tmp_path / "m", tmp_path / "pack", to="mlx-2bit")  # copies the files
    assert (tmp_path / "pack/tokenizer.json").read_bytes() == files["tokenizer.json"]


def test_models_that_are_not_exported_are_named(tmp_path):
    spec = Tiny(architecture="qwen35", dims=16)
    with pytest.raises(UnsupportedModel, match="architecture qwen35 is not exported; supported: "):
        export(write(tmp_path / "m", spec), tmp_path / "out", to="mlx-2bit")
    folded = write(tmp_path / "h", replace(SPEC, hadamard=128))
    for target in ("mlx-2bit", "gguf-pq2_0"):
        with pytest.raises(ConversionError, match="embedding: its inputs are Hadamard-transformed"):
            export(folded, tmp_path / "out", to=target)
    tiny.write(tmp_path / "bare", SPEC)
    with pytest.raises(ConversionError, match=r"there is no tokenizer.json to export"):
        export(tmp_path / "bare", tmp_path / "out", to="gguf-pq2_0")
    with pytest.raises(InvalidRequest, match="to is 'gguf'"):
        export(folded, tmp_path / "out", to="gguf")


@pytest.mark.parametrize("target", ["gguf-pq2_0", "mlx-2bit"])
def test_nothing_half_written_stays_and_nothing_is_replaced(tmp_path, target):
    source, out = write(tmp_path / "m"), tmp_path / "deep" / "out"

    def stop(stage: str, done: int, total: int) -> None:
        assert stage == "export" and 0 < done <= total
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(source, out, to=target, progress=stop)
    assert os.listdir(tmp_path / "deep") == []
    export(source, out, to=target)
    before = out.stat().st_mtime_ns
    with pytest.raises(InvalidRequest, match="out exists already"):
        export(source, out, to=target)
    assert out.stat().st_mtime_ns == before and os.listdir(tmp_path / "deep") == ["out"]


def test_progress_ends_at_the_total(tmp_path):
    for target in TARGETS:
        calls = []
        spec = replace(SPEC, group=256, packing="t2")
        source = write(tmp_path / target, spec)
        export(source, tmp_path / f"{target}.out", to=target,
               progress=lambda *call, calls=calls: calls.append(call))  # fmt: skip
        assert calls[-1][1] == calls[-1][2] and [c[1] for c in calls] == sorted(c[1] for c in calls)


def test_the_verb(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "m")
    result = command.run(monkeypatch, "export", "m", "m.gguf", "--to", "gguf-pq2_0")
    assert (result.code, result.err) == (0, "")
    size = (tmp_path / "m.gguf").stat().st_size
    assert result.out.splitlines() == [
        f"qwen3 as gguf-pq2_0: 24 tensors, {size:,} bytes", "  15 in PQ2_0", "  9 in F32",
        "every weight is exact",
    ]  # fmt: skip
    words = ("export", "m", "pack", "--to", "mlx-2bit", "--json")
    facts = json.loads(command.run(monkeypatch, *words).out)
    assert facts["types"] == {"2 bits": 15, "F32": 9} and facts["path"] == str(tmp_path / "pack")
    assert command.run(monkeypatch, *words).code == 1
    assert command.run(monkeypatch, "export", "m", "x", "--to", "onnx").code == 2


def test_the_verb_knows_every_target():
    from bonsai.cli import export as verb

    assert verb.TARGETS == TARGETS
