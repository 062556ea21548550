"""What the client wrote, as token ids."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfer.serving.errors import ApiError
from jaxinfer.serving.protocol import ChatBody, CompletionBody
from jaxinfer.serving.refused import MESSAGE, check_fields
from jaxinfer.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant")
TEMPLATE_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt", "self")  # not for the client to set


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt and the text it was made of, None where the client sent token ids."""

    token_ids: list[int]
    text: str | None


def completion_prompts(body: CompletionBody, tokenizer: Tokenizer) -> list[Prompt]:
    """Returns the prompts of a completion: one text or several, one list of token ids or several.

    Raises:
        ApiError: 400, the field has another form.
    """
    given = body.prompt
    if isinstance(given, str) or _is_ids(given):
        given = [given]
    if not isinstance(given, list) or not given or not (all(map(_is_ids, given)) or _all_texts(given)):
        raise ApiError(
            400,
            "prompt must be a string, a list of strings, a list of token ids, or a list of such lists",
            param="prompt",
        )
    return [Prompt(encode(one, tokenizer), one) if isinstance(one, str) else Prompt(one, None) for one in given]


def num_prompts(body: CompletionBody | ChatBody) -> int:
    """Returns how many prompts a request has, before they are looked at."""
    given = [] if isinstance(body, ChatBody) else body.prompt
    return len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 1


def chat_prompt(body: ChatBody, tokenizer: Tokenizer) -> Prompt:
    """Returns a conversation as the model's template writes it.

    Raises:
        ApiError: 400, a message has a form that is not supported, or the template refuses the conversation.
    """
    options = body.chat_template_kwargs or {}
    for name in TEMPLATE_ARGUMENTS:
        if name in options:
            raise ApiError(400, f"chat_template_kwargs must not hold {name!r}", param="chat_template_kwargs")
    return render(body.messages, tokenizer, options)


def render(messages: Any, tokenizer: Tokenizer, options: Mapping[str, Any]) -> Prompt:
    """Returns messages as a prompt that ends where the assistant begins. Raises as `chat_prompt`."""
    plain = _plain_messages(messages)
    try:
        text = tokenizer.apply_chat_template(plain, **options)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error
    return Prompt(encode(text, tokenizer, "messages"), text)  # a BOS that the template wrote is not doubled


def encode(text: str, tokenizer: Tokenizer, param: str = "prompt", add_special_tokens: bool = True) -> list[int]:
    """Returns the token ids of a text; a lone surrogate, which JSON can hold, is an ApiError 400."""
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except ValueError as error:
        raise ApiError(400, f"{param} must be valid Unicode: it holds half of a surrogate pair", param=param) from error


def _is_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(one) is int for one in given)


def _all_texts(given: list) -> bool:
    return all(isinstance(one, str) for one in given)


def _plain_messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: Any, path: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise ApiError(400, f'{path} must be an object such as {{"role": "user", "content": "Hi"}}', param=path)
    message = check_fields(message, ("role", "content"), MESSAGE, f"{path}.")
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{path}.role must be one of {', '.join(ROLES)}, got {role!r:.80}", param=f"{path}.role")
    # OpenAI's newer name for the system's role; no template knows it.
    role = "system" if role == "developer" else role
    return {"role": role, "content": _plain_content(message.get("content"), f"{path}.content")}


def _plain_content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ApiError(400, f"{path} must be a string or a list of text parts", param=path)
    return "\n".join(_text_of(part, f"{path}[{i}]") for i, part in enumerate(content))


def _text_of(part: Any, path: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise ApiError(
            400,
            f'{path} must be {{"type": "text", "text": "..."}}, got {kind!r:.80}: the model reads text only',
            param=path,
        )
    part = check_fields(part, ("type", "text"), {}, f"{path}.")
    if not isinstance(part.get("text"), str):
        raise ApiError(400, f"{path}.text must be a string", param=f"{path}.text")
    return part["text"]
