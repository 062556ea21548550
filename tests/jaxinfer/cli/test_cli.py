"""The command line on the tiny model, in this process; and what must be seen from outside, in others."""

import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from checkpoints.wheels import PullError
from jaxinfer.cli import main
from jaxinfer.cli.chat import CUT_MARK, Conversation
from jaxinfer.cli.output import write
from jaxinfer.cli.stopwatch import Stopwatch
from jaxinfer.sampling.params import SamplingParams

TINY = "tests/golden/models/tiny-chat"
GREEDY = ["--temperature", "0", "--max-tokens", "8", "--ignore-eos"]


@pytest.fixture
def call(capfd, monkeypatch):
    """Runs the command line in this process; returns exit code, standard output and standard error."""

    def call(*arguments, stdin=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        return stop.value.code, *capfd.readouterr()

    return call


@pytest.fixture
def one_llm(llm, monkeypatch):
    """Commands that load a model get the session's engine: a new one would compile everything again."""
    for command in ("run", "chat"):
        monkeypatch.setattr(sys.modules[f"jaxinfer.cli.{command}"], "find_model", lambda *_: None)
        monkeypatch.setattr(sys.modules[f"jaxinfer.cli.{command}"], "make_llm", lambda *_, **__: llm)
    return llm


def said(answer):
    return "".join(chunk.text for chunk in answer)


def test_run_streams_the_chat_answer_to_standard_output(call, one_llm):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [wanted] = one_llm.chat([{"role": "user", "content": "hi"}], params)
    assert call("run", "hi", "-m", TINY, *GREEDY) == (0, wanted.outputs[0].text + "\n", "")
    assert call("run", "-", *GREEDY, stdin="hi\n")[1] == wanted.outputs[0].text + "\n"
    assert call("run", *GREEDY, stdin="hi")[1] == wanted.outputs[0].text + "\n"


def test_run_raw_and_every_sampling_option(call, one_llm):
    options = {
        "temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95, "repetition_penalty": 1.1,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "seed": 7, "max_tokens": 9, "min_tokens": 2,
    }  # fmt: skip
    [wanted] = one_llm.generate("hello", SamplingParams(**options, stop=("zz", "q"), ignore_eos=True))
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    code, out, _ = call("run", "hello", "--raw", *flags, "--stop", "zz", "--stop", "q", "--ignore-eos")
    assert (code, out) == (0, wanted.outputs[0].text + "\n")


def test_run_timings_go_to_standard_error(call, one_llm):
    code, out, err = call("run", "hi", "--timings", *GREEDY)
    assert code == 0
    assert "first token" in err
    assert "tok/s" in err
    assert "tok/s" not in out


def test_an_answer_cut_off_by_a_limit_that_nobody_asked_for_says_so(call, one_llm):
    code, _, err = call("run", "hi", "--ignore-eos", "--temperature", "0")
    room = one_llm.engine.max_model_len - len(one_llm.tokenizer.encode(chat_prompt(one_llm, "hi")))
    assert code == 0
    assert err == f"(cut off after {room} tokens by --max-model-len)\n"
    _, _, err = call("chat", "--ignore-eos", "--temperature", "0", stdin="hi\n")
    assert err == f"(cut off after {room} tokens by --max-model-len)\n"


def chat_prompt(llm, text):
    return llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])


def test_text_is_written_as_it_is(capfd):
    write("\x1b[31mred\x1b[0m")
    assert capfd.readouterr() == ("\x1b[31mred\x1b[0m", "")


def test_the_stopwatch_counts_decoding_from_the_first_tokens_on(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    watch = Stopwatch()
    now = 2.0
    watch.count(3)
    now = 4.0
    watch.count(8)
    watch.lap("other tokens")
    rows = {line[:14].strip(): line[14:].split() for line in watch.report().splitlines()}
    assert rows["first token"] == ["2.000", "s"]
    assert float(rows["= until then"][0]) == pytest.approx(2 + float(rows["start"][0]), abs=1e-3)  # from the process on
    assert rows["decode"] == ["4.0", "tok/s"]
    assert rows["tokens"] == ["11"]


@pytest.mark.slow
def test_run_loads_a_model_by_path(call):
    code, out, err = call("run", "hi", "-m", TINY, "--max-model-len", 64, *GREEDY)
    assert (code, err) == (0, "")
    assert len(out) > 1


def test_chat_keeps_the_conversation_and_resets(call, one_llm):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def answer(*turns):
        roles = ("user", "assistant") * len(turns)
        return one_llm.chat([{"role": r, "content": t} for r, t in zip(roles, turns)], params)[0].outputs[0].text

    first = answer("hi")
    second = answer("hi", first, "a")
    code, out, err = call("chat", *GREEDY, stdin="hi\na\n/reset\nhi\n/nonsense\n/exit\nnever\n")
    assert (code, out) == (0, f"{first}\n{second}\n{first}\n")
    assert "unknown command '/nonsense'" in err


def test_chat_drops_the_oldest_turns(llm, capfd):
    conversation = Conversation(llm, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), None)
    for _ in range(4):
        assert said(conversation.answer("the other day in town"))
    assert "its oldest 2 messages were dropped" in capfd.readouterr().err
    before = conversation.turns
    assert before[0]["role"] == "user"
    assert before[-1]["role"] == "assistant"
    with pytest.raises(ValueError, match="the limit is 96"):
        said(conversation.answer("x y z " * 80))
    assert conversation.turns == before


@pytest.mark.parametrize("size", [1, 4, 9, 16])
def test_what_is_kept_of_a_conversation_begins_with_a_question_and_fits(llm, size):
    conversation = Conversation(llm, SamplingParams(max_tokens=8), "be kind")
    words = [" ".join(["ab"] * (1 + (size * i) % 7)) for i in range(13)]
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(words)]
    prompt, kept = conversation._fit(turns)
    assert kept == turns[-len(kept) :]
    assert len(kept) % 2 == 1
    assert "be kind" in prompt
    room = llm.engine.max_model_len - 8
    assert len(llm.tokenizer.encode(prompt)) <= room
    if len(kept) < len(turns):  # and no more than needed was dropped
        system = {"role": "system", "content": "be kind"}
        longer = llm.tokenizer.apply_chat_template([system, *turns[-len(kept) - 2 :]])
        assert len(llm.tokenizer.encode(longer)) > room


def test_an_interrupted_answer_is_remembered_as_far_as_it_went(llm):
    conversation = Conversation(llm, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), None)
    answer = conversation.answer("hi")
    chunk = next(answer)
    with pytest.raises(KeyboardInterrupt):
        answer.throw(KeyboardInterrupt)
    assert conversation.turns[-1] == {"role": "assistant", "content": chunk.text + CUT_MARK}
    assert not llm.engine.has_unfinished


def test_ctrl_c_stops_an_answer_and_not_the_program(call, one_llm, monkeypatch):
    """One Ctrl-C in an answer, one at the prompt, an answer, and two at the prompt, which leave."""
    whole = one_llm.stream
    calls = 0

    def stream(prompt, params):
        nonlocal calls
        calls += 1
        with contextlib.closing(whole(prompt, params)) as chunks:
            for chunk in chunks:
                yield chunk
                if calls == 1:
                    raise KeyboardInterrupt

    lines = iter(["hi", KeyboardInterrupt, "a", KeyboardInterrupt, KeyboardInterrupt, "never"])

    def read(_):
        line = next(lines)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr(one_llm, "stream", stream)
    monkeypatch.setattr("builtins.input", read)
    code, out, err = call("chat", *GREEDY)
    assert code == 0
    assert err.splitlines() == ["(stopped)", "", "(Ctrl-C again to leave)", "", "(Ctrl-C again to leave)", ""]
    assert out.count("\n") >= 2
    assert next(lines) == "never"
    assert calls == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "x", "-m", "nowhere"], "no model 'nowhere': wanted an existing GGUF file"),
        (["run", "x", "-m", TINY, "--temperature", "-1"], "temperature must be finite and at least 0, got -1.0"),
        (["run", "x", "-m", TINY, "--max-model-len", "300"], "more than the model's 256 tokens"),
        (["run", "x", "--dtype", "int3"], "'int3' is not one of"),
        (["run", "x", "--heat", "2"], "No such option"),
        (["run", "x", "-m", TINY, "--raw", "--system", "s"], "--system needs the model's chat template"),
        (["run", "", "-m", TINY, "--raw"], "the prompt is empty"),
        (["run", "-", "-m", TINY], "the prompt is empty"),
        (["run", "x", "-m", TINY, "--max-model-len", "0"], "max_model_len must be an integer of at least 2"),
        (["run", "x", "-m", "nowhere", "--top-p", "7"], "top_p must be"),
        (["chat", "-m", "nowhere", "--top-p", "7"], "top_p must be"),
        (["pull", "--list", "smollm2-135m"], "--list takes neither"),
        (["pull", "nothing"], "unknown model 'nothing'; known are smollm2-135m"),
        (["pull"], "give a NAME"),
        (["info", "nowhere"], "no model 'nowhere'"),
        (["plan", TINY, "--memory", "lots"], "memory must be a number with a unit such as 24GB"),
        (["info", TINY, "--kv", "int3"], "kv_dtype must be"),
        (["info", "--kernels", "--kv", "int8"], "--kv is counted for a model's cache; give a MODEL"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(call, arguments, message):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_other_failures_are_exit_code_1_and_debug_shows_the_traceback(call, monkeypatch):
    def fail(*_):
        raise OSError("disk on fire")

    monkeypatch.setattr(sys.modules["jaxinfer.cli.run"], "find_model", fail)
    assert call("run", "x")[0::2] == (1, "error: disk on fire\n")
    assert call("run", "--raw", "--", "--debug")[0::2] == (1, "error: disk on fire\n")
    assert "Traceback" in call("--debug", "run", "x")[2]
    assert "Traceback" in call("run", "x", "--debug")[2]


def test_a_failed_download_is_exit_code_1(call, monkeypatch):
    def fail(*_, **__):
        raise PullError("smollm2-135m: pip failed")

    monkeypatch.setattr("checkpoints.hub.resolve", fail)
    assert call("run", "x") == (1, "", "error: smollm2-135m: pip failed\n")
    monkeypatch.setattr("checkpoints.hub.pull", fail)
    assert call("pull", "smollm2-135m") == (1, "", "error: smollm2-135m: pip failed\n")


def test_pull_prints_the_path_and_lists(call, monkeypatch, tmp_path):
    monkeypatch.setattr("checkpoints.hub.pull", lambda name, progress, force: tmp_path / name)
    assert call("pull", "smollm2-135m")[:2] == (0, f"{tmp_path / 'smollm2-135m'}\n")
    assert "Apache-2.0" in call("pull", "--list")[1]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (TINY, {"format": "safetensors", "RoPE": "theta 10000, scaling none", "tokenizer": "BPE"}),
        (f"{TINY}/model.gguf", {"format": "GGUF", "chat template": "yes", "tokenizer": "gpt2, pre-tokenizer"}),
        ("tests/golden/models/llama3-rope/model.gguf", {"RoPE": "theta 10000, scaling 8 factors up to 8"}),
    ],
)
def test_info(call, model, expected):
    code, out, _ = call("info", model)
    rows = {line[:20].strip(): line[20:] for line in out.splitlines()}
    assert code == 0
    assert rows["family"] == "llama"
    assert "F32" in rows["stored as"]
    assert "a token in int8" in call("info", model, "--kv", "int8")[1]
    for name, value in expected.items():
        assert rows[name].startswith(value)


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, **options)


def test_help_imports_no_jax():
    code = (
        "import sys\nfrom jaxinfer.cli import app\napp.main(['run', '--help'], standalone_mode=False)\n"
        "assert not {'jax', 'numpy', 'rich'} & set(sys.modules)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "--temperature" in done.stdout


def test_a_reader_that_goes_away_ends_it_quietly():
    code = "from jaxinfer.cli import main, pull\npull.callback = lambda **_: [print('x' * 99) for _ in range(9999)]\n"
    first = [sys.executable, "-c", f"{code}main(['pull', 'x'])"]
    with subprocess.Popen(first, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(5)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_version():
    assert python("-m", "jaxinfer.cli", "--version").stdout.startswith("jaxinfer, version 0.")


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_in_a_terminal_stops_the_answer_and_then_the_program():
    """Under a pseudo-terminal, the real model: Ctrl-C in an endless answer, then twice at the prompt."""
    main_end, terminal = pty.openpty()
    options = ["--temperature", "0", "--max-tokens", "100000", "--ignore-eos"]
    chat = subprocess.Popen(
        [sys.executable, "-m", "jaxinfer.cli", "chat", *options],
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.set_blocking(main_end, False)
    seen = ""

    def wait_for(text, seconds=120):
        nonlocal seen
        end = time.monotonic() + seconds
        while text not in seen:
            assert time.monotonic() < end, f"no {text!r} in {seen!r}"
            time.sleep(0.02)
            with contextlib.suppress(BlockingIOError):
                seen += os.read(main_end, 4096).decode(errors="replace")
        seen = seen.partition(text)[2]

    try:
        wait_for("> ")
        os.write(main_end, b"What is the capital of France?\n")
        wait_for("France?")
        wait_for("Paris")
        os.killpg(chat.pid, signal.SIGINT)
        wait_for("(stopped)")
        wait_for("> ")
        os.killpg(chat.pid, signal.SIGINT)
        wait_for("again to leave")
        wait_for("> ")
        os.killpg(chat.pid, signal.SIGINT)
        assert chat.wait(timeout=30) == 0
    finally:
        chat.kill()
        os.close(main_end)
        os.close(terminal)
