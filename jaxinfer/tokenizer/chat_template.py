"""Renders the jinja2 chat templates that models ship with, in a sandbox."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class _Refusal(Exception):
    """A template called `raise_exception`."""


class _GenerationTag(jinja2.ext.Extension):
    """Accepts {% generation %}, with which training code marks the assistant's words; renders them as is."""

    tags = {"generation"}  # noqa: RUF012 - the name and the form are jinja2's

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A chat template, compiled when it is first rendered.

    Args:
        source: The jinja2 source. It comes with the model and is not trusted, so it runs in jinja2's
            immutable sandbox.
        variables: Values every rendering sees, such as bos_token.
    """

    def __init__(self, source: str, variables: Mapping[str, str]):
        self.source = source
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        **variables: Any,
    ) -> str:
        """Returns the text of the conversation.

        Args:
            messages: Mappings with "role" and "content" (or "tool_calls"), oldest first.
            tools: JSON schemas of the functions the model may call.
            add_generation_prompt: Ends the text with the start of the assistant's turn.
            variables: Further variables for the template, for example enable_thinking=False.

        Raises:
            ValueError: A message or tool has the wrong form (the error names which), or the template is
                broken or refuses the conversation.
        """
        _check_messages(messages)
        _check_tools(tools)
        given = {
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "documents": None,
        }
        given["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render({**self._variables, **given, **variables})
        except _Refusal as error:
            raise ValueError(f"the model's chat template refused the conversation: {error}") from error
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the model's chat template is not valid jinja2, line {error.lineno}: {error}") from error
        except (
            jinja2.TemplateError,
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
            ArithmeticError,
        ) as error:
            # What a template does to a message of a form that it does not expect, such as None + str.
            raise ValueError(f"the model's chat template failed on this conversation: {error}") from error

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment.from_string(self.source)


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(
            f"messages must be a list such as [{{'role': 'user', 'content': 'Hi'}}], got {type(messages).__name__}"
        )
    if not messages:
        raise ValueError("messages is empty; want at least one such as {'role': 'user', 'content': 'Hi'}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{index}] must be a dict with 'role' and 'content', got {message!r}")
        if not isinstance(role := message.get("role"), str):
            raise ValueError(f"messages[{index}]['role'] must be a string such as 'user', got {role!r}")
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise ValueError(
                f"messages[{index}]['content'] must be a string or a list of parts "
                f"(or absent beside 'tool_calls'), got {content!r}"
            )


def _check_tools(tools: Sequence[Mapping[str, Any]] | None) -> None:
    for index, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping):
            raise ValueError(f"tools[{index}] must be the JSON schema of a function (a dict), got {tool!r}")
