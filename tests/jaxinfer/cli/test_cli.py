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

from jaxinfer.cli import main
from jaxinfer.cli.chat import Conversation
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
    monkeypatch.setattr(sys.modules["jaxinfer.cli.run"], "make_llm", lambda *_: llm)
    monkeypatch.setattr(sys.modules["jaxinfer.cli.chat"], "make_llm", lambda *_: llm)
    return llm


def test_run_streams_the_chat_answer_to_standard_output(call, one_llm):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [wanted] = one_llm.chat([{"role": "user", "content": "hi"}], params)
    assert call("run", "hi", "-m", TINY, *GREEDY) == (0, wanted.outputs[0].text + "\n", "")
    assert call("run", "-", *GREEDY, stdin="hi")[1] == wanted.outputs[0].text + "\n"
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
        assert "".join(conversation.answer("the other day in town"))
    assert "the oldest turn was dropped" in capfd.readouterr().err
    assert conversation.turns[0]["role"] == "user"
    with pytest.raises(ValueError, match="the limit is 96"):
        "".join(conversation.answer("x y z " * 80))
    assert conversation.turns == [] or conversation.turns[-1]["role"] == "assistant"


def test_an_interrupted_answer_is_remembered_as_far_as_it_went(llm):
    conversation = Conversation(llm, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), None)
    answer = conversation.answer("hi")
    said = next(answer)
    with pytest.raises(KeyboardInterrupt):
        answer.throw(KeyboardInterrupt)
    assert conversation.turns[-1] == {"role": "assistant", "content": said}
    assert not llm.engine.has_unfinished


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
        (["pull", "nothing"], "unknown model 'nothing'; known are smollm2-135m"),
        (["pull"], "give a NAME"),
        (["info", "nowhere"], "no model 'nowhere'"),
        (["info", TINY, "--memory", "lots"], "memory must be a number with a unit such as 24GB"),
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

    monkeypatch.setattr(sys.modules["jaxinfer.cli.run"], "make_llm", fail)
    assert call("run", "x")[0::2] == (1, "error: disk on fire\n")
    assert "Traceback" in call("--debug", "run", "x")[2]


def test_pull_prints_the_path_and_lists(call, monkeypatch, tmp_path):
    monkeypatch.setattr("checkpoints.hub.pull", lambda name, progress, force: tmp_path / name)
    assert call("pull", "smollm2-135m")[:2] == (0, f"{tmp_path / 'smollm2-135m'}\n")
    assert "Apache-2.0" in call("pull", "--list")[1]


@pytest.mark.parametrize("model", [TINY, "tests/golden/models/llama3-rope/model.gguf"])
def test_info(call, model):
    code, out, _ = call("info", model, "--memory", "1GB")
    rows = {line[:20].strip(): line[20:] for line in out.splitlines()}
    assert code == 0
    assert rows["family"] == "llama"
    assert "tokens" in rows["fits in 16 bits"]
    assert rows["RoPE"].endswith("none" if model == TINY else "factors")
    assert "F32" in rows["stored as"]


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


def test_version():
    assert python("-m", "jaxinfer.cli", "--version").stdout.startswith("jaxinfer, version 0.")


@pytest.mark.slow
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
