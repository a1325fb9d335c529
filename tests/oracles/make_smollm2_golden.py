"""Write tests/data/smollm2_golden.json: what `transformers` makes of SmolLM2-135M-Instruct Q4_1.

    python tests/oracles/make_smollm2_golden.py SmolLM2-135M-Instruct.Q4_1.gguf

transformers dequantizes the GGUF to float32 by its own code and generates greedily, past the end
token, so that every prompt has 64 ids to compare. The long prompt is from the Jargon File 4.4.7,
which is in the public domain. Needs the `oracles` extra; takes about two minutes on two cores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DATA = Path(__file__).parent.parent / "data"
LENGTH = 64
TOP = 256
PROMPTS = {
    "english": ("chat", "Why is the sky blue?"),
    "code": ("raw", "def fibonacci(n):\n    "),
    "chinese": ("raw", "\u4e2d\u56fd\u7684\u9996\u90fd\u662f"),
    "emoji": ("chat", "What does \U0001f3f3\ufe0f\u200d\U0001f308 mean? And \U0001f600\U0001f680?"),
    "long": ("raw", None),
}


def main(gguf: Path) -> None:
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    golden = {}
    for name, (kind, text) in PROMPTS.items():
        text = text or (DATA / "jargon_4.4.7_excerpt.txt").read_text(encoding="utf-8")
        golden[name] = {"kind": kind, "text": text, **answer(tokenizer, model, kind, text)}
        print(name, len(golden[name]["ids"]), repr(tokenizer.decode(golden[name]["greedy"])))
    out = DATA / "smollm2_golden.json"
    out.write_text(json.dumps(golden, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")


def answer(tokenizer, model, kind: str, text: str) -> dict:
    """Prompt ids, 64 greedy ids, and the largest logits of the first position."""
    if kind == "chat":
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    else:
        ids = tokenizer(text)["input_ids"]
    with torch.no_grad():
        first = model(torch.tensor([ids])).logits[0, -1].double()
        output = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=LENGTH,
            min_new_tokens=LENGTH,
            eos_token_id=[],
            pad_token_id=0,
            do_sample=False,
        )
    top = torch.topk(first, TOP)
    return {
        "ids": ids,
        "greedy": output[0, len(ids) :].tolist(),
        "top_ids": top.indices.tolist(),
        "top_logits": [round(v, 5) for v in top.values.tolist()],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
