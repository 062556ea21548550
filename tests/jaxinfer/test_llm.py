"""LLM.generate, chat and stream on the tiny model."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest

from jaxinfer.llm import LLM
from jaxinfer.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CHATS = json.loads(Path("tests/golden/models/tiny-chat/chat.json").read_text())


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = ["hello", "the quick brown", [5, 6, 7], "a"]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    assert [o.prompt for o in together] == ["hello", "the quick brown", None, "a"]
    assert together[2].prompt_token_ids == [5, 6, 7]
    assert all(o.finished and o.metrics.first_token is not None for o in together)


def test_more_prompts_than_rows_and_parameters_each(llm, naive):
    prompts = [[3 + i, 40 + i] for i in range(11)]
    params = [dataclasses.replace(GREEDY, max_tokens=1 + i) for i in range(11)]
    done = []
    outputs = llm.generate(prompts, params, progress=lambda *counts: done.append(counts))
    for prompt, param, output in zip(prompts, params, outputs):
        assert output.outputs[0].token_ids == naive.run(prompt, param)[0]
    assert done == [(i, 11) for i in range(1, 12)]


def test_chat_is_generation_from_the_rendered_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    rendered = llm.tokenizer.apply_chat_template(messages)
    assert texts(llm.chat(messages, GREEDY)) == texts(llm.generate(rendered, GREEDY))
    assert len(llm.chat([messages, messages], GREEDY)) == 2


def test_stream_joins_to_the_text_of_generate(llm):
    for params in (
        GREEDY,
        SamplingParams(temperature=1, seed=5, max_tokens=30),
        dataclasses.replace(GREEDY, echo=True),
    ):
        [output] = llm.generate("hello", params)
        chunks = list(llm.stream("hello", params))
        assert "".join(chunk.text for chunk in chunks) == output.outputs[0].text
        assert [t for chunk in chunks for t in chunk.token_ids] == output.outputs[0].token_ids
        assert [chunk.finish_reason for chunk in chunks].count(None) == len(chunks) - 1


def test_two_streams_and_a_generate_side_by_side(llm):
    wanted = texts(llm.generate(["hello", "there"], GREEDY))
    first, second = llm.stream("hello", GREEDY), llm.stream("there", GREEDY)
    parts = [next(first).text, next(second).text]
    assert texts(llm.generate("a", GREEDY)) == texts(llm.generate("a", GREEDY))
    assert parts[0] + "".join(c.text for c in first) == wanted[0]
    assert parts[1] + "".join(c.text for c in second) == wanted[1]


def test_a_fork_of_a_stream_goes_on_from_where_it_is(llm):
    [whole] = llm.generate("hello", dataclasses.replace(GREEDY, max_tokens=20))
    stream = llm.stream("hello", GREEDY)
    first = [next(stream), next(stream)]
    fork = llm.fork(stream, dataclasses.replace(GREEDY, max_tokens=20))
    assert "".join(chunk.text for chunk in fork) == whole.outputs[0].text
    rest = list(stream)
    assert [t for chunk in first + rest for t in chunk.token_ids] == whole.outputs[0].token_ids[:12]
    with pytest.raises(ValueError, match="only a stream of this LLM that has not ended"):
        llm.fork(iter(()))
    with pytest.raises(ValueError, match="only a stream of this LLM that has not ended"):
        llm.fork(stream)


def test_salts_for_all_or_one_for_each(llm):
    prompt = list(range(30, 70))
    llm.reset_prefix_cache()
    for salts, found in (("x", [0]), (["x"], [32]), (["y"], [0]), (None, [0])):
        outputs = llm.generate([prompt], GREEDY, cache_salt=salts)
        assert [output.metrics.num_cached_tokens for output in outputs] == found
    assert next(llm.stream(prompt, GREEDY, cache_salt="x")).token_ids
    with pytest.raises(ValueError, match="cache_salt must be one for all or one for each of the 1 prompts, got 2"):
        llm.generate([prompt], GREEDY, cache_salt=["x", "y"])


@pytest.mark.parametrize("read", [0, 1])
def test_a_dropped_stream_is_aborted(llm, read):
    stream = llm.stream("hello", dataclasses.replace(GREEDY, max_tokens=80))
    for _ in range(read):
        next(stream)
    stream.close()
    assert not llm.engine.has_unfinished
    assert llm.stats().num_used_pages == 0


def test_an_error_in_one_prompt_leaves_nothing_behind(llm):
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.generate(["hello", ""], GREEDY)
    assert not llm.engine.has_unfinished
    assert llm.stats().num_used_pages == 0


def test_several_completions(llm):
    params = SamplingParams(n=3, temperature=1, seed=11, max_tokens=8, ignore_eos=True)
    [output] = llm.generate("hello", params)
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    again = [llm.generate("hello", dataclasses.replace(params, n=1, seed=11 + i))[0].outputs[0] for i in range(3)]
    assert [c.token_ids for c in output.outputs] == [c.token_ids for c in again]


def test_a_seed_is_repeatable_and_independent_of_the_company(llm):
    params = SamplingParams(temperature=1, seed=3, max_tokens=10, ignore_eos=True)
    [alone] = llm.generate("hello", params)
    crowd = llm.generate(["hello", "x", "y", "z"], [params, *[SamplingParams(max_tokens=9)] * 3])
    assert crowd[0].outputs[0].token_ids == alone.outputs[0].token_ids
    assert (
        llm.generate("hello", dataclasses.replace(params, seed=4))[0].outputs[0].token_ids != alone.outputs[0].token_ids
    )


def test_prompt_logprobs_and_echo(llm, naive):
    prompt = list(range(30, 70))  # longer than a step, so that it is scored in chunks
    params = dataclasses.replace(GREEDY, prompt_logprobs=2, logprobs=0, echo=True)
    [output] = llm.generate([prompt], params)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for i, entry in enumerate(output.prompt_logprobs[1:], 1):
        _, _, [scores] = naive.run(prompt[:i], dataclasses.replace(GREEDY, max_tokens=1))
        assert entry[prompt[i]].logprob == pytest.approx(float(scores[prompt[i]]), abs=1e-4)
        assert entry[prompt[i]].rank == 1 + (scores > scores[prompt[i]]).sum()
        assert len(entry) in (2, 3)
    assert output.outputs[0].text.startswith(llm.tokenizer.decode(prompt))
    assert all(len(entry) == 1 for entry in output.outputs[0].logprobs)


def test_stop_reasons(llm):
    [plain] = llm.generate("hello", GREEDY)
    text, token_ids = plain.outputs[0].text, plain.outputs[0].token_ids
    assert (plain.outputs[0].finish_reason, plain.outputs[0].stop_reason) == ("length", None)
    [by_string] = llm.generate("hello", dataclasses.replace(GREEDY, stop=text[4:6]))
    assert by_string.outputs[0].text == text[: text.index(text[4:6])]
    assert (by_string.outputs[0].finish_reason, by_string.outputs[0].stop_reason) == ("stop", text[4:6])
    [by_token] = llm.generate("hello", dataclasses.replace(GREEDY, stop_token_ids=[token_ids[3]]))
    assert by_token.outputs[0].token_ids == token_ids[: token_ids.index(token_ids[3]) + 1]
    assert by_token.outputs[0].stop_reason == token_ids[3]


def test_nothing_allowed_ends_the_request(llm):
    params = dataclasses.replace(GREEDY, allowed_token_ids=[9], bad_words=[llm.tokenizer.decode([9])])
    [output] = llm.generate("hello", params)
    assert output.outputs[0].token_ids == []
    assert output.outputs[0].finish_reason == "stop"


def test_length_is_bounded_by_the_model(llm):
    [output] = llm.generate([[5] * 90], dataclasses.replace(GREEDY, max_tokens=None))
    assert len(output.outputs[0].token_ids) == 6
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", {}, "the prompt is empty: give at least one token"),
        ([[]], {}, "the prompt is empty"),
        ([[5] * 96], {}, r"the prompt has 96 tokens.*the limit is 96; shorten it or raise max_model_len"),
        ([[5, 320]], {}, r"prompt token 1 must be an id in \[0, 320\).*got 320"),
        ([[5, -1]], {}, "got -1"),
        ([[5, "a"]], {}, "got 'a'"),
        ([7.5], {}, "must be text or a sequence of token ids, got 7.5"),
        ("a", {"logit_bias": {400: 1}}, "logit_bias must hold ids below the vocabulary size 320, got"),
        ("a", {"stop_token_ids": [320]}, "stop_token_ids must hold ids below"),
    ],
)
def test_bad_requests(llm, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, SamplingParams(**params))


def test_bad_calls(llm, model):
    with pytest.raises(ValueError, match="unknown option max_seqs; LLM takes max_num_seqs"):
        LLM(model, max_seqs=3)
    with pytest.raises(ValueError, match="sampling_params must be one for all or one for each of the 2 prompts, got 3"):
        llm.generate(["a", "b"], [GREEDY] * 3)
    with pytest.raises(ValueError, match="priority needs LLM"):
        llm.generate(["a"], GREEDY, priority=[1])
    with pytest.raises(ValueError, match=r"params must be SamplingParams, got \{'temperature': 1\}"):
        llm.generate("a", {"temperature": 1})
    with pytest.raises(ValueError, match="the KV cache is too small for one request: 3 pages hold 32 tokens"):
        LLM(model, num_pages=3, max_model_len=96)
    with pytest.raises(ValueError, match="more than the model's 256"):
        LLM(model, max_model_len=300)


def test_the_sampler_is_compiled_when_it_is_needed(model, naive):
    llm = LLM(model, compile_cache=False, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=32)

    def run(params):
        [output] = llm.generate([5, 6, 7], params)
        assert output.outputs[0].token_ids == naive.run([5, 6, 7], params)[0]
        return sorted((shape.is_decode, shape.takes_best) for shape in llm.engine.runner._compiled)

    greedy = dataclasses.replace(GREEDY, max_tokens=6)
    llm.engine.prepare(3, greedy)
    assert run(greedy) == [(False, True), (True, True)]
    assert run(dataclasses.replace(greedy, temperature=1, seed=3)) == [
        (False, False), (False, True), (True, False), (True, True)
    ]  # fmt: skip
    llm.engine.runner._compiled = {s: step for s, step in llm.engine.runner._compiled.items() if not s.takes_best}
    assert run(greedy) == [(False, False), (True, False)]  # what is there serves


@pytest.mark.slow
def test_compilation_after_warmup_is_reported(model, caplog):
    engine = LLM(model, compile_cache=False, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=32).engine
    seen = []
    engine.warmup(lambda *counts: seen.append(counts))
    assert seen[-1][0] == seen[-1][1] == engine.stats().compile.num_compiled
    engine.add_request("a", [1, 2, 3], dataclasses.replace(GREEDY, logprobs=1, prompt_logprobs=1))
    while engine.has_work:
        engine.step()
    assert engine.stats().compile.num_after_warmup == 0
    shape = dataclasses.replace(engine.runner.buckets.decode(1), pages_per_row=1)
    engine.runner.compile([shape])
    assert engine.stats().compile.num_after_warmup == 1
    assert "after warm-up" in caplog.text


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_generate_and_not_the_engine(llm, monkeypatch):
    wanted = texts(llm.generate("hello", GREEDY))
    step = llm.engine.step

    def interrupted_step():
        chunks = step()
        if chunks:
            os.kill(os.getpid(), signal.SIGINT)
            sum(range(100_000))  # the signal arrives here, in the middle, and is held back
        return chunks

    monkeypatch.setattr(llm.engine, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello", "there"], GREEDY)
    monkeypatch.undo()
    assert not llm.engine.has_unfinished
    llm.engine.scheduler.check_integrity()
    assert texts(llm.generate("hello", GREEDY)) == wanted


def test_logprobs_of_a_request_that_stops_within_a_dispatch(llm):
    [plain] = llm.generate("hello", GREEDY)
    token_ids = plain.outputs[0].token_ids
    for end in range(1, 6):  # the stop falls on every place within the steps of a dispatch
        params = dataclasses.replace(GREEDY, stop_token_ids=[token_ids[end]], logprobs=1)
        completion = llm.generate("hello", params)[0].outputs[0]
        assert len(completion.logprobs) == len(completion.token_ids)
        assert all(token in entry for token, entry in zip(completion.token_ids, completion.logprobs))


def test_an_id_used_again_gets_nothing_of_the_request_before(llm):
    engine = llm.engine
    params = dataclasses.replace(GREEDY, logprobs=1)
    engine.add_request("again", "hello", params)
    engine.step()
    engine.step()
    engine.abort("again")
    engine.pop_output("again")
    engine.add_request("again", "there", params)
    while engine.has_work:
        engine.step()
    completion = engine.pop_output("again").outputs[0]
    assert len(completion.logprobs) == len(completion.token_ids) == 12
