"""Structured outputs on the tiny model, whose text is noise unless a grammar forbids it."""

import dataclasses
import json
import re

import jsonschema_rs
import pytest

from jaxinfer.engine.request import FinishReason, Request
from jaxinfer.engine.scheduler import _append
from jaxinfer.llm import LLM
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.rows import takes_best
from jaxinfer.sampling.structured import StructuredOutputs

# Whitespace included, the longest text of this form and a prompt fit into the model's 256 tokens.
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["red", "green"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
EBNF = 'root ::= item+\nitem ::= "(" [a-c]{1,3} ")"'
LARK = 'start: "<" /[0-9]{2}/ ("," /[0-9]{2}/)? ">"'
FORMS = {
    "json": ({"json": SCHEMA}, lambda text: jsonschema_rs.validate(SCHEMA, json.loads(text))),
    "regex": ({"regex": r"[A-F]{3}-\d{2,4}"}, lambda text: re.fullmatch(r"[A-F]{3}-\d{2,4}", text)),
    "choice": ({"choice": ["yes", "no", "per\u00f2 \u2603"]}, lambda text: text in ("yes", "no", "per\u00f2 \u2603")),
    "ebnf": ({"grammar": EBNF}, lambda text: re.fullmatch(r"(\([a-c]{1,3}\))+", text)),
    "lark": ({"grammar": LARK}, lambda text: re.fullmatch(r"<\d\d(,\d\d)?>", text)),
}  # fmt: skip


def params(form, seed, **more):
    return SamplingParams(temperature=1, seed=seed, max_tokens=240, structured_outputs=FORMS[form][0], **more)


def check(form, output):
    assert output.finish_reason is FinishReason.STOP
    accepted = FORMS[form][1](output.text)
    assert accepted is None if form == "json" else accepted, output.text


@pytest.fixture(scope="module")
def roomy(model):
    return LLM(model, compile_cache=False, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=256, page_size=16)


def mixture(count):
    """Requests of every form, and between them some of none."""
    forms = [*FORMS, None]
    prompts = [[3 + i % 50, 40, 41 + i % 7] * (1 + i % 3) for i in range(count)]
    free = SamplingParams(temperature=1, max_tokens=20, seed=1, bad_words=["ab"], ignore_eos=True)
    chosen = [forms[i % len(forms)] for i in range(count)]
    return prompts, chosen, [free if form is None else params(form, i) for i, form in enumerate(chosen)]


def test_all_forms_at_once_and_free_text_between_them(roomy):
    prompts, forms, wanted = mixture(12)
    outputs = [output.outputs[0] for output in roomy.generate(prompts, wanted)]
    for form, output in zip(forms, outputs):
        if form is None:
            assert len(output.token_ids) == 20
        else:
            check(form, output)


@pytest.mark.slow
def test_what_is_said_depends_neither_on_neighbours_nor_on_preemption(model, roomy):
    prompts = [[3 + i, 40] for i in range(8)]
    wanted = [params("json", i) for i in range(7)] + [SamplingParams(seed=1, max_tokens=100, ignore_eos=True)]
    tight = LLM(
        model, compile_cache=False, max_num_seqs=8, max_num_batched_tokens=8, max_model_len=256, page_size=16,
        num_pages=18, prefix_cache=False,
    )  # fmt: skip
    together = tight.generate(prompts, wanted)
    assert tight.stats().num_preemptions
    for prompt, param, output in zip(prompts, wanted, together):
        assert roomy.generate(prompt, param)[0].outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.slow
def test_two_hundred_of_sixteen_at_once(model):
    llm = LLM(model, compile_cache=False, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=256)
    outputs = llm.generate([[3 + i % 50] for i in range(200)], [params("json", i) for i in range(200)])
    for output in outputs:
        check("json", output.outputs[0])


def test_greedy_and_log_probabilities(roomy):
    greedy = dataclasses.replace(params("regex", 0), temperature=0, logprobs=1)
    assert not takes_best(greedy)
    [output] = roomy.generate([5, 6, 7], greedy)
    check("regex", output.outputs[0])
    assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)


def test_completions_and_forks_have_grammars_of_their_own(roomy):
    [output] = roomy.generate([5, 6, 7], params("json", 3, n=4))
    for completion in output.outputs:
        check("json", completion)
    assert len({completion.text for completion in output.outputs}) > 1
    engine = roomy.engine
    engine.add_request("source", [5, 6, 7], params("json", 4))
    while len(engine._groups["source"][0].request.output_token_ids) < 4:
        engine.step()
    with pytest.raises(ValueError, match="structured_outputs of a fork are those of its source"):
        engine.fork("source", "other", params("regex", 1))
    engine.fork("source", "copy")
    while engine.has_work:
        engine.step()
    for name in ("source", "copy"):
        check("json", engine.pop_output(name).outputs[0])


@pytest.mark.parametrize(("wanted", "message"), [
    ({"regex": "("}, "structured_outputs.regex cannot be compiled"),
    ({"json": {"type": "objekt"}}, "structured_outputs.json cannot be compiled: Invalid type: objekt"),
    ({"grammar": "root ::= ("}, "structured_outputs.grammar cannot be compiled"),
])  # fmt: skip
def test_what_cannot_be_compiled_is_refused(roomy, wanted, message):
    with pytest.raises(ValueError, match=message):
        roomy.generate([5], SamplingParams(structured_outputs=wanted))
    assert not roomy.engine.has_work


@pytest.mark.parametrize(("wanted", "message"), [
    ({}, "must say one of json, json_object, regex, choice, grammar, got none"),
    ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
    ({"json": "[1]"}, "must be a JSON schema, an object"),
    ({"json": "{"}, "must be a JSON schema"),
    ({"choice": []}, "at least one string"),
    ({"regex": 3}, "regex must be a str"),
    ({"json_object": 1}, "json_object must be True or False"),
    ({"guided": "x"}, "unknown structured_outputs.guided"),
    ("json", "must be StructuredOutputs or a mapping"),
])  # fmt: skip
def test_wrong_arguments_are_refused(wanted, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(structured_outputs=wanted)


def test_a_text_that_goes_on_has_no_grammar():
    with pytest.raises(ValueError, match="ignore_eos can not go with structured_outputs"):
        SamplingParams(structured_outputs={"json_object": True}, ignore_eos=True)


def test_normal_form():
    once = StructuredOutputs(json=SCHEMA)
    assert once == StructuredOutputs(json=json.dumps(SCHEMA)) == StructuredOutputs.of({"json": SCHEMA})
    assert hash(once) == hash(StructuredOutputs(json=SCHEMA))
    assert dataclasses.replace(SamplingParams(structured_outputs=once), n=2).structured_outputs is once


def test_a_grammar_that_fails_ends_its_request_alone():
    class Failed:
        error = "too complex"

    request = Request("a", [1], SamplingParams(), 5, 0, grammar=Failed())
    assert _append(request, [-1]) is FinishReason.ERROR
    assert request.stop_reason == "too complex"
