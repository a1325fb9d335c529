"""Write the tokenizer data of tests/data: small vocabularies, and ids from other implementations.

    python tests/oracles/make_tokenizer_golden.py SmolLM2-135M-Instruct.Q4_1.gguf

* smollm2_vocab.json: the first 2048 tokens of SmolLM2 (Apache-2.0) as GGUF metadata.
* sentencepiece_vocab.json: 600 pieces that sentencepiece learned from the Jargon File excerpt.
* tokenizer_golden.json: ids of a table of texts by `tokenizers` (with SmolLM2's pre-tokenizer:
  single digits, then GPT-2's pieces), for the small and for the whole vocabulary, and by
  `sentencepiece`.

Nothing of bonsai is used. Needs the `oracles` extra and sentencepiece.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import gguf
import sentencepiece
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import BPE

DATA = Path(__file__).parent.parent / "data"
SMALL = 2048
TEXTS = [
    "->",
    "(x):\n",
    "12345",
    "\n\n\n",
    "   x",
    "don't",
    "DON'T we'll They've I'D",
    "price 12345 -> 67.89",
    "def f(a, b):\n    return a + b\n\n\nprint(f(1, 2))\n",
    "trailing spaces   ",
    "\t\ttabs\tin\r\nlines \n \n",
    "no\u00a0break\u00a0space",
    "e\u0301 cafe\u0301 n\u0303 \u1e9b\u0323",
    "caf\u00e9 na\u00efve \u00dcber",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u4eca\u5929\u662f2026\u5e748\u670813\u65e5 \U0001f389",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e04\u0e23\u0e31\u0e1a",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0663\u0664 \u00b2\u00bd \u2177",
    "\u3042\u308a\u304c\u3068\u3046 \ud55c\uad6d\uc5b4 \u0645\u0631\u062d\u0628\u0627",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f600",
    "http://example.org/a?b=1&c=2#d",
    "...!!!??? --- ___ '''",
    "\u2028\u2029\u0085\u3000x",
    " ",
    "a",
    "",
]


def main(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    whole = {
        name: field.contents()
        for name, field in reader.fields.items()
        if name.startswith("tokenizer.")
    }
    small = first_tokens(whole, SMALL)
    write("smollm2_vocab.json", small)
    pieces, processor = learn_pieces((DATA / "jargon_4.4.7_excerpt.txt").read_text("utf-8"))
    write("sentencepiece_vocab.json", pieces)
    golden = {
        "texts": TEXTS,
        "smollm2_small": [reference(small).encode(text).ids for text in TEXTS],
        "smollm2": [reference(whole).encode(text).ids for text in TEXTS],
        "sentencepiece": [processor.encode(text) for text in TEXTS],
    }
    write("tokenizer_golden.json", golden)


def first_tokens(metadata: dict, count: int) -> dict:
    """The same vocabulary with its first `count` tokens, and the merges among them."""
    tokens = metadata["tokenizer.ggml.tokens"][:count]
    known = set(tokens)
    merges = [m for m in metadata["tokenizer.ggml.merges"] if m.replace(" ", "", 1) in known]
    return {
        **metadata,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": metadata["tokenizer.ggml.token_type"][:count],
        "tokenizer.ggml.merges": merges,
    }


def reference(metadata: dict) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    types = metadata["tokenizer.ggml.token_type"]
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


def learn_pieces(text: str) -> tuple[dict, sentencepiece.SentencePieceProcessor]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.vocab_size())

    def kind(i: int) -> int:
        if processor.is_unknown(i):
            return 2
        return 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
    }, processor


def write(name: str, value: dict) -> None:
    """One line for each key."""
    lines = [f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in value.items()]
    (DATA / name).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
