"""`bonsai generate`, the default verb: one prompt, one reply."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from bonsai.cli import options
from bonsai.cli.options import TEXT, Choices, Load

if TYPE_CHECKING:
    from bonsai.generate import Model
    from bonsai.reply import Completion

__all__ = ["answer", "facts", "generate", "timing_line"]


@click.command()
@click.argument("prompt", required=False, type=TEXT)
@click.option("-s", "--system", type=TEXT, metavar="TEXT", help="System prompt.")
@click.option("--raw", is_flag=True, help="Do not apply the chat template.")
@options.model_options
@options.sampling_options
@options.json_flag
@options.verbosity
def generate(
    prompt: str | None,
    system: str | None,
    raw: bool,
    load: Load,
    choices: Choices,
    json_: bool,
    **request: Any,
) -> None:
    """Reply to PROMPT, or to standard input if PROMPT is absent or '-'.

    With both, as in `git diff | bonsai "Explain this."`, standard input follows PROMPT after an
    empty line.
    """
    if raw and (system is not None or request["think"] is not None):
        flag = "-s" if system is not None else "--think/--no-think"
        raise options.usage(f"{flag} needs the chat template, which --raw leaves out", "drop one")
    prompt = _prompt(prompt)
    console = options.console()
    with console.progress() as report:
        model = load(report)
        stream = model.stream(
            prompt,
            system=system,
            raw=raw,
            sampling=choices.over(model.sampling),
            progress=report,
            **request,
        )
        first = next(stream, None)  # the whole prefill; the bar is gone before any text comes
    with stream:
        text = answer(chain([first] if first else [], stream), show=not json_)
    completion = stream.completion
    if json_:
        click.echo(options.as_json(facts(model, load, completion)))
    elif not text.endswith("\n"):
        click.echo()
    console.note(timing_line(completion))


def answer(chunks: Any, *, show: bool = True) -> str:
    """Print the pieces of a reply as they come; all of it."""
    text = []
    for chunk in chunks:
        text.append(chunk.text)
        if show:
            click.echo(chunk.text, nl=False)
    return "".join(text)


def facts(model: Model, load: Load, completion: Completion) -> dict[str, Any]:
    """A reply as one JSON object."""
    usage, timings = completion.usage, completion.timings
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "tokens": list(completion.tokens),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timings": {
            "prefill_s": timings.prefill_s,
            "prefill_tps": timings.prefill_tps,
            "decode_s": timings.decode_s,
            "decode_tps": timings.decode_tps,
        },
        "model": load.name,
        "backend": model.engine.description,
    }


def timing_line(completion: Completion) -> str:
    """What the reply cost, for people."""
    usage, timings = completion.usage, completion.timings
    prompt = f"prompt {usage.prompt_tokens} tokens"
    if usage.cached_tokens:
        prompt += f" ({usage.cached_tokens} kept)"
    return (
        f"{prompt} in {timings.prefill_s:.2f} s ({timings.prefill_tps:.1f} tok/s), "
        f"reply {usage.completion_tokens} tokens in {timings.decode_s:.2f} s "
        f"({timings.decode_tps:.1f} tok/s), {completion.finish_reason}"
    )


def _prompt(given: str | None) -> str:
    """PROMPT and standard input as one text; a usage error where that is nothing."""
    waits = options.standard_input_is_terminal()
    if given is None and waits:
        raise options.usage("no prompt given", 'bonsai "Why is the sky blue?", or pipe text to it')
    if given is None or given == "-":
        text = options.read_standard_input()
    elif waits:
        text = given
    else:
        piped = options.read_standard_input()
        text = f"{given}\n\n{piped}" if piped else given
    if not text:
        raise options.usage("the prompt is empty", 'bonsai "Why is the sky blue?"')
    return text
