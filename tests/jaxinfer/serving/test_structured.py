"""The form of answers over HTTP: OpenAI's response_format, and vLLM's structured_outputs."""

import json
import re

import openai
import pytest

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


def test_a_chat_keeps_to_a_schema_whole_and_streamed(client):
    options = {"model": "tiny", "messages": HI, "response_format": JSON, "seed": 5, "max_tokens": 70}
    [choice] = client.chat.completions.create(**options).choices
    assert json.loads(choice.message.content).keys() == {"ok"}
    assert choice.finish_reason == "stop"
    events = client.chat.completions.create(**options, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events) == choice.message.content


def test_completions_of_every_other_form(client):
    def texts(**wanted):
        answer = client.completions.create(model="tiny", prompt="x", max_tokens=70, n=2, seed=1, extra_body=wanted)
        return [choice.text for choice in answer.choices]

    assert all(re.fullmatch(r"\d{2}:\d{2}", text) for text in texts(structured_outputs={"regex": r"\d{2}:\d{2}"}))
    assert set(texts(structured_outputs={"choice": ["yes", "no"]})) <= {"yes", "no"}
    assert set(texts(structured_outputs={"grammar": 'root ::= "a" | "b"'})) <= {"a", "b"}
    assert all(json.loads(text).keys() == {"ok"} for text in texts(response_format=JSON))
    assert len(texts(response_format={"type": "text"})) == 2


@pytest.mark.parametrize(("fields", "param"), [
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object", "json_schema": JSON["json_schema"]}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": JSON, "structured_outputs": {"regex": "a"}}, "response_format"),
    ({"response_format": JSON | {"json_schema": {"name": "x", "schema": {"type": "objekt"}}}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_name(client, fields, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=HI, extra_body=fields)
    assert error.value.param == param
