"""Fields that OpenAI's API has and this server does not offer: refused by name, never ignored.

A value that asks for nothing, such as `"store": false` or null, is what the server does anyway and is accepted.
"""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from jaxinfer.serving.errors import ApiError

type Refused = Mapping[str, tuple[str, tuple[Any, ...]]]  # name -> why, and the values that ask for nothing

CHAT: Refused = {
    "best_of": ("the best of several answers is chosen for completions, not for chats", ()),
    "use_beam_search": ("beams are searched by the Python API alone: LLM.beam_search", (False,)),
    "tools": ("tool calls are not supported yet", ([],)),
    "tool_choice": ("tool calls are not supported yet", ("none",)),
    "parallel_tool_calls": ("tool calls are not supported yet", ()),
    "functions": ("tool calls are not supported yet", ([],)),
    "function_call": ("tool calls are not supported yet", ("none",)),
    "modalities": ("this server writes text only", (["text"],)),
    "audio": ("this server writes text only", ()),
    "prediction": ("predicted output is not supported", ()),
    "reasoning_effort": ("the effort of reasoning cannot be chosen; some models take chat_template_kwargs", ()),
    "verbosity": ("verbosity cannot be chosen; say it in the prompt", ()),
    "web_search_options": ("this server does not search the web", ()),
    "moderation": ("this server does not moderate", ()),
    "store": ("this server stores nothing", (False,)),
    "metadata": ("this server stores nothing", ({},)),
    "service_tier": ("there is one tier", ("auto", "default")),
    "prompt_cache_key": ("the prefix cache finds prompts by itself; cache_salt keeps tenants apart", ()),
    "prompt_cache_options": ("how long prefixes are kept cannot be chosen", ()),
    "prompt_cache_retention": ("how long prefixes are kept cannot be chosen", ()),
}
COMPLETION: Refused = {
    "suffix": ("text cannot be inserted, only continued", ()),
    "use_beam_search": ("beams are searched by the Python API alone: LLM.beam_search", (False,)),
}
STREAM_OPTIONS: Refused = {"include_obfuscation": ("streams are not padded", (False,))}
MESSAGE: Refused = {
    "name": ("names of participants are not supported; write them into the content", ()),
    "tool_calls": ("tool calls are not supported yet", ([],)),
    "function_call": ("tool calls are not supported yet", ()),
    "tool_call_id": ("tool calls are not supported yet", ()),
    "audio": ("this server reads text only", ()),
    "refusal": ("refusals are not supported; write it into the content", ()),
    "annotations": ("annotations are not supported", ([],)),
}


def check_fields(given: Any, known: Collection[str], refused: Refused, where: str = "") -> Any:
    """Returns the fields that are left when those that ask for nothing are taken out.

    Args:
        given: what the client sent; anything but an object is returned as it is.
        known: names of the fields that are implemented.
        refused: those that are not.
        where: path of the object in the request, with a point at its end.

    Raises:
        ApiError: 400 that names the first field that is refused or unknown.
    """
    if not isinstance(given, Mapping):
        return given
    kept = {}
    for name, value in given.items():
        if name in known:
            kept[name] = value
        elif name in refused:
            reason, accepted = refused[name]
            if value is not None and not any(type(value) is type(one) and value == one for one in accepted):
                raise ApiError(400, f"{where}{name}: {reason}", param=f"{where}{name}", code="unsupported_parameter")
        else:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ApiError(400, f"unknown field {where}{name}{hint}", param=f"{where}{name}", code="unknown_parameter")
    return kept
