"""The command: how a verb is found, what stdin means, how errors read and how runs end."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import pytest
from command import Result, Terminal, run

from bonsai import generate as generation
from bonsai.cli import VERBS, main, options
from bonsai.errors import ModelNotFound
from bonsai.sampling import Sampling
from bonsai.testing import ScriptedBackend, model

NUMBER = r"[0-9.]+"


@pytest.fixture
def script(monkeypatch):
    """script("Hello", " you"): `-m scripted` replies so; returns the backend and what was asked."""

    def install(*replies, **options):
        replies = replies if replies and isinstance(replies[0], list) else [list(replies)]
        backend = ScriptedBackend(*replies)
        loads = []

        def load(name, **asked):
            loads.append((name, asked))
            return model(backend, **options)

        monkeypatch.setattr(generation, "load", load)
        monkeypatch.setenv("BONSAI_MODEL", "scripted")
        backend.loads = loads
        return backend

    return install


@pytest.fixture
def bonsai(monkeypatch):
    """bonsai("generate", "Hi", stdin=...) -> Result."""
    monkeypatch.delenv("BONSAI_MODEL", raising=False)
    monkeypatch.delenv("BONSAI_BACKEND", raising=False)
    return lambda *arguments, **streams: run(monkeypatch, *arguments, **streams)


def asked(backend) -> str:
    """The last prompt as text."""
    pieces = model(backend).tokenizer
    return pieces.decode(backend.prompts[-1])


def test_generate_is_the_default_verb(script, bonsai):
    script("Hello", " world")
    expected = Result(0, "Hello world\n", "")
    for words in (["Hi"], ["generate", "Hi"], ["-n", "5", "Hi"], ["--", "Hi"], ["-q", "Hi"]):
        assert bonsai(*words) == expected


def test_a_prompt_may_be_the_name_of_a_verb(script, bonsai):
    backend = script("ok")
    assert bonsai("generate", "models").code == 0
    assert asked(backend) == "user: models\nassistant: "
    assert bonsai("--", "models").code == 0
    assert asked(backend) == "user: models\nassistant: "


def test_stdin_is_the_prompt_where_there_is_none(script, bonsai):
    backend = script("ok")
    for words in ([], ["-"], ["generate"], ["generate", "-"]):
        assert bonsai(*words, stdin="a diff\n\n") == Result(0, "ok\n", "")
        assert asked(backend) == "user: a diff\n\nassistant: "
    bonsai("-s", "Write a commit message.", stdin="a diff\r\n")
    assert asked(backend) == "system: Write a commit message.\nuser: a diff\nassistant: "


def test_stdin_follows_the_prompt(script, bonsai):
    backend = script("ok")
    bonsai("Explain this.", stdin="\ufeffcode\n".encode())
    assert asked(backend) == "user: Explain this.\n\ncode\nassistant: "
    bonsai("Explain this.", stdin="")
    assert asked(backend) == "user: Explain this.\nassistant: "


def test_waiting_for_stdin_is_said(script, bonsai, monkeypatch):
    script("ok")
    monkeypatch.setattr(options, "WAIT_S", 0.01)
    read = io.BytesIO.read

    class Slow(io.BytesIO):
        def read(self, *size):
            time.sleep(0.2)
            return read(self, *size)

    monkeypatch.setattr("command.io.BytesIO", Slow)
    assert "waiting for the end of standard input\n" in bonsai(stdin="a", terminal=True).err
    assert bonsai(stdin="a").err == ""


def test_no_prompt_on_a_terminal_does_not_wait(script, bonsai):
    script("ok")
    hint = 'hint:  bonsai "Why is the sky blue?", or pipe text to it\n'
    for words in (["generate"], ["-s", "Be brief."]):
        assert bonsai(*words, stdin=None) == Result(2, "", f"error: no prompt given\n{hint}")
    help_text = bonsai(stdin=None)
    assert help_text.code == 0 and "Commands:" in help_text.out and help_text.err == ""


def test_bad_input_is_a_usage_error(script, bonsai):
    script("ok")
    hint = "hint:  convert it first, for example with: iconv -t UTF-8\n"
    assert bonsai(stdin=b"ab\xff") == Result(
        2, "", f"error: standard input is not UTF-8 text (byte 0xff at 2)\n{hint}"
    )
    assert bonsai(stdin="").err.startswith("error: the prompt is empty\n")
    for word, why in (("a\0b", "contains a NUL character"), ("\udcff", "is not valid UTF-8 text")):
        for words in ([word], ["Hi", "-s", word], ["Hi", "--stop", word], ["-m", word, "Hi"]):
            result = bonsai(*words)
            assert (result.code, result.out) == (2, "")
            assert why in result.err and result.err.count("\n") == 2


def test_usage_errors_are_two_lines(script, bonsai):
    script("ok")
    cases = {
        ("Hi", "--tmp", "1"): "--tmp",
        ("Hi", "there"): "there",
        ("Hi", "--temp", "hot"): "hot",
        ("Hi", "--temp", "nan"): "nan",
        ("Hi", "--temp", "-1"): "-1",
        ("Hi", "--top-p", "1.5"): "1.5",
        ("Hi", "-n", "0"): "0",
        ("Hi", "--max-context", "0"): "0",
        ("Hi", "--backend", "gpu"): "'gpu' is not one of auto, ",
        ("Hi", "--raw", "-s", "x"): "--raw",
        ("Hi", "--raw", "--think"): "--raw",
        ("inspect",): "PATH",
        ("models", "pul", "x"): "pul",
    }
    for words, mention in cases.items():
        result = bonsai(*words)
        lines = result.err.splitlines()
        assert (result.code, result.out, len(lines)) == (2, "", 2), (words, result)
        assert lines[0].startswith("error: ") and mention in lines[0]
        assert lines[1].startswith("hint:  ")


def test_a_missing_model_is_named(bonsai):
    assert bonsai("Hi") == Result(
        2,
        "",
        "error: no model given\n"
        "hint:  -m NAME_OR_PATH, or set BONSAI_MODEL; `bonsai models ls` lists what is here\n",
    )


def test_our_errors_end_with_1_and_a_traceback_only_with_v(monkeypatch, bonsai):
    def load(name, **_):
        raise ModelNotFound(f"no model at '{name}':\n\x1b[31mred", hint="bonsai models ls")

    monkeypatch.setattr(generation, "load", load)
    two = "error: no model at 'x': \\x1b[31mred\nhint:  bonsai models ls\n"
    assert bonsai("-m", "x", "Hi") == Result(1, "", two)
    assert bonsai("-q", "-m", "x", "Hi") == Result(1, "", two)
    verbose = bonsai("-v", "-m", "x", "Hi")
    assert verbose.code == 1 and verbose.err.endswith(two)
    assert verbose.err.startswith("Traceback (most recent call last):\n")


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (OSError(28, "No space left on device", "out"), "error: No space left on device: out\n"),
        (PermissionError(13, "Permission denied", "x"), "error: Permission denied: x\n"),
        (MemoryError(), "error: not enough memory\n"),
        (ZeroDivisionError("by zero"), "error: ZeroDivisionError: by zero\n"),
    ],
)
def test_every_failure_is_an_error_line(monkeypatch, bonsai, error, lines):
    def load(name, **_):
        raise error

    monkeypatch.setattr(generation, "load", load)
    result = bonsai("-m", "x", "Hi")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(lines + "hint:  ") and result.err.count("\n") == 2


def test_an_error_in_the_middle_of_a_reply(script, bonsai):
    script("Hel", ModelNotFound("gone", hint="look"))
    assert bonsai("Hi") == Result(1, "Hel", "error: gone\nhint:  look\n")


def test_interrupt_ends_with_130_and_a_whole_line(script, bonsai):
    backend = script("Hel", KeyboardInterrupt())
    assert bonsai("Hi") == Result(130, "Hel", "")
    result = bonsai("Hi", terminal=True, stdin="")
    assert result.code == 130 and result.out == "Hel" and result.err.endswith("\n")
    assert "Traceback" not in result.err and backend.open_sessions == 0


def test_flags_reach_the_model(script, bonsai):
    backend = script("ok", sampling=Sampling(temperature=0.5, top_k=7))
    bonsai("Hi", "--top-p", "0.9", "--seed", "3", "--min-p", "0.1", "--repetition-penalty", "1.1")
    wanted = Sampling(0.5, top_k=7, top_p=0.9, min_p=0.1, repetition_penalty=1.1, seed=3)
    assert backend.samplings == [wanted]
    bonsai("Hi", "--temp", "0", "--top-k", "0")
    assert backend.samplings[-1] == Sampling(temperature=0.0)
    flags = ["--max-context", "64", "--threads", "3", "--revision", "v1", "-m", "other"]
    bonsai("Hi", "--backend", "reference", *flags)
    name, options = backend.loads[-1]
    assert name == "other"
    assert options["backend"] == "reference"
    assert (options["max_context"], options["threads"], options["revision"]) == (64, 3, "v1")


def test_flags_come_from_the_environment(script, bonsai, monkeypatch):
    backend = script("ok")
    monkeypatch.setenv("BONSAI_BACKEND", "reference")
    bonsai("Hi")
    assert backend.loads[-1][0] == "scripted"
    assert backend.loads[-1][1]["backend"] == "reference"


def test_flags_that_change_nothing_are_noted(script, bonsai):
    script("ok")
    result = bonsai("Hi", "--top-p", "0.9", "--temp", "0", "-v")
    assert "the temperature is 0, so --top-p changes nothing; see --temp\n" in result.err


def test_limits_and_stops(script, bonsai):
    script("one ", "two ", "three")
    assert bonsai("Hi", "-n", "2").out == "one two \n"
    assert bonsai("Hi", "--stop", "three", "--stop", "tw").out == "one \n"


def test_raw_leaves_the_template_out(script, bonsai):
    backend = script("ok")
    bonsai("--raw", "Once")
    assert asked(backend) == "Once"


def test_json_is_one_object(script, bonsai):
    script("na\u00efve", " \U0001f600")
    result = bonsai("Hi", "--json")
    facts = json.loads(result.out)
    assert result.err == "" and "na\u00efve" in result.out
    assert facts["text"] == "na\u00efve \U0001f600"
    assert facts["finish_reason"] == "stop" and len(facts["tokens"]) == 3
    assert facts["usage"] == {"prompt_tokens": 20, "completion_tokens": 3, "cached_tokens": 0}
    assert facts["backend"] == "scripted: no weights" and facts["model"] == "scripted"
    assert set(facts["timings"]) == {"prefill_s", "prefill_tps", "decode_s", "decode_tps"}


def test_timings_are_for_people(script, bonsai):
    script("Hello\n")
    assert bonsai("Hi") == Result(0, "Hello\n", "")
    assert bonsai("Hi", "-q", terminal=True) == Result(0, "Hello\n", "")
    for result in (bonsai("Hi", "-v"), bonsai("Hi", terminal=True)):
        assert result.out == "Hello\n"
        assert "prompt 20 tokens in " in result.err and ", stop\n" in result.err


def test_chat_answers_each_line_of_a_pipe(script, bonsai):
    backend = script(["A"], ["B"], ["C"])
    assert bonsai("chat", "-s", "Be brief.", stdin="one\n\ntwo") == Result(0, "A\nB\n", "")
    whole = "system: Be brief.\nuser: one\nassistant: A\nuser: two\nassistant: "
    assert model(backend).tokenizer.encode(whole)[-9:] == backend.prompts[-1][-9:]
    assert backend.open_sessions == 0


def test_chat_resets_and_exits(script, bonsai):
    backend = script(["A"], ["B"], ["C"])
    assert bonsai("chat", stdin="one\n/reset\ntwo\n/exit\nthree").out == "A\nB\n"
    assert len(backend.samplings) == 2
    assert asked(backend) == "two\nassistant: "  # after "user: ", which the session still holds


def test_chat_survives_an_interrupted_reply(script, bonsai):
    script(["A", KeyboardInterrupt()], ["B"])
    assert bonsai("chat", stdin="one\ntwo\n") == Result(0, "A\nB\n", "")


def test_chat_ends_at_an_interrupted_prompt(script, bonsai, monkeypatch):
    script(["A"])
    answers = iter(["one"])

    def type_in(prompt=""):
        line = next(answers, None)
        if line is None:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", type_in)
    result = bonsai("chat", stdin=None, terminal=True)
    assert (result.code, result.out) == (130, "A\n")


def test_chat_goes_on_after_an_error_where_a_person_can_answer(script, bonsai, monkeypatch):
    lines = ["x" * 500, "one", "/exit"]
    typed = iter(lines)
    script(["A"], max_context=64)
    monkeypatch.setattr("builtins.input", lambda prompt="": next(typed))
    result = bonsai("chat", stdin=None)
    assert (result.code, result.out) == (0, "A\n")
    assert "error: prompt has " in result.err and result.err.count("error: ") == 1
    piped = bonsai("chat", stdin="\n".join(lines))
    assert (piped.code, piped.out) == (1, "")


def test_chat_ends_at_the_end_of_input(script, bonsai, monkeypatch):
    script(["A"])

    def type_in(prompt=""):
        raise EOFError

    monkeypatch.setattr("builtins.input", type_in)
    assert bonsai("chat", stdin=None).code == 0


class Full(io.BytesIO):
    """A disk without room, or a reader that went away."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, data):
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "err"),
    [
        (BrokenPipeError(32, "Broken pipe"), 0, ""),
        (OSError(28, "No space"), 1, "error: cannot write standard output: No space\n"),
    ],
)
def test_stdout_that_cannot_be_written(script, monkeypatch, error, code, err):
    script("Hello")
    out, notes = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(Full(error), write_through=True))
    monkeypatch.setattr(sys, "stderr", notes)
    assert main(["Hi"]) == code
    assert notes.text().splitlines()[:1] == err.splitlines()
    monkeypatch.setattr(sys, "stdout", out)


def python(*arguments, **options):
    """A fresh interpreter, in whose environment nothing makes it UTF-8."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, env=environment, check=False, **options
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("verb", ["doctor", "--help"])
def test_a_full_disk_behind_stdout_is_one_error(verb):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "bonsai", verb], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 1
    assert done.stderr.decode() == (
        "error: cannot write standard output: No space left on device\n"
        "hint:  free some space where it goes, or send it elsewhere\n"
    )


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
@pytest.mark.parametrize("arguments", ["doctor", "--help", "-m x Hi"])
def test_a_closed_stdout_is_an_error_before_any_work(arguments):
    command = f'exec "$0" -m bonsai {arguments} >&-'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable], stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE, encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: standard output is closed, so there is no place for the answer",
        "hint:  send it to a file or a pipe; or to nowhere with >/dev/null",
    ]


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_control_c_during_the_imports_is_silent(tmp_path):
    stuck = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor _ in range(10**9): pass\n"
    (tmp_path / "click.py").write_text(stuck)
    done = python("-c", (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from bonsai.__main__ import main; sys.exit(main())"
    ))  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_the_installed_command_is_the_one_that_imports_nothing_at_first():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    assert '\nbonsai = "bonsai.__main__:main"\n' in project


def test_help_imports_nothing_but_click():
    """No verb's help may wait for an array library, or for any other."""
    code = (
        "import sys; before = set(sys.modules)\n"
        "from bonsai.cli import VERBS, main; main(['--help'])\n"
        "for verb in VERBS: main([verb, '-h'])\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "new -= sys.stdlib_module_names | {'bonsai', 'click', 'colorama'}\n"
        "sys.exit(str(new) if new else 0)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_help_lists_every_verb(bonsai):
    listed = bonsai("--help").out
    assert [verb for verb in VERBS if f"\n  {verb} " not in listed] == []
    for verb in VERBS:
        result = bonsai(verb, "--help")
        assert result.code == 0 and result.out.startswith(f"Usage: bonsai {verb}")


def test_version(bonsai):
    import bonsai as package

    assert bonsai("--version") == Result(0, f"bonsai {package.__version__}\n", "")


def test_output_is_utf8_in_every_locale():
    code = (
        "import sys, bonsai.generate as g; from bonsai.testing import ScriptedBackend, model\n"
        "g.load = lambda *a, **k: model(ScriptedBackend(['\\u4f60\\u597d \\U0001f600']))\n"
        "from bonsai.cli import main; sys.exit(main(['-m', 'x', 'Hi']))"
    )
    done = python("-c", code, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("utf-8").strip() == "\u4f60\u597d \U0001f600"


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes and signals")
def test_a_reader_that_leaves_early_is_no_error():
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, "Hi"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(5)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 0


ENDLESS = (
    "import sys, bonsai.generate as g; from bonsai.testing import ScriptedBackend, model\n"
    "script = ScriptedBackend(['word '], ends=False, context=10**9)\n"
    "g.load = lambda *a, **k: model(script, max_context=10**9)\n"
    "from bonsai.cli import main; sys.exit(main(['-m', 'x', *sys.argv[1:]]))"
)


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_control_c_stops_at_once_and_leaves_the_terminal_sane():
    import pty
    import termios

    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [sys.executable, "-c", ENDLESS, "Hi"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    ) as process:
        seen = b""
        while b"word " not in seen:
            seen += os.read(ours, 64)
        process.send_signal(signal.SIGINT)
        hangs = Timer(60, process.kill)
        hangs.start()
        seen += _drain(process, ours)
        hangs.cancel()
    assert process.returncode == 130  # the reply itself would never end
    assert termios.tcgetattr(theirs) == before
    assert seen.endswith(b"\r\n") and b"Traceback" not in seen
    assert seen.count(b"\x1b[?25l") == seen.count(b"\x1b[?25h")  # a hidden cursor came back


def _drain(process, terminal) -> bytes:
    """What is written until the process has ended and nothing is left."""
    seen = b""
    while True:
        ended = process.poll() is not None
        while select.select([terminal], [], [], 0.05)[0]:
            seen += os.read(terminal, 65536)
        if ended:
            return seen


def test_memory_limit(script, bonsai):
    backend = script("ok")
    assert bonsai("--memory-limit", "2GiB", "Hi").code == 0
    assert backend.loads[-1][1]["memory_limit"] == 2 << 30
    assert bonsai("Hi").code == 0
    assert backend.loads[-1][1]["memory_limit"] is None
    for nonsense in ("2", "lots", "-1GB", "0GiB"):
        result = bonsai("--memory-limit", nonsense, "Hi")
        assert result.code == 2 and "not a number with a unit, such as 2GiB" in result.err
