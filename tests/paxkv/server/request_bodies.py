"""Bodies as hypothesis draws them: fields that exist, with values from right to absurd."""

import msgspec
from hypothesis import strategies as st

from paxkv.server.protocol.anthropic.request import (
    MESSAGES_FIELDS,
    MESSAGES_IGNORED,
    MessagesRequest,
)
from paxkv.server.protocol.openai_protocol import ChatCompletionRequest, CompletionRequest
from paxkv.server.protocol.responses.request import ResponsesRequest
from paxkv.server.protocol.unsupported_fields import (
    CHAT_FIELDS,
    CHAT_IGNORED,
    COMPLETION_FIELDS,
    RESPONSES_FIELDS,
    RESPONSES_IGNORED,
)

_TEXTS = st.one_of(
    st.sampled_from(["", "a", "text", "function", "user", "tool", "auto", "required", "none", "f"]),
    st.text(max_size=12),
)
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 30),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    _TEXTS,
)
_KEYS = st.one_of(
    st.sampled_from(
        ["type", "text", "role", "content", "name", "function", "parameters", "arguments"]
        + ["input", "input_schema", "tool_use_id", "thinking"]
        + ["json", "regex", "choice", "schema", "json_schema", "format", "effort", "7", "id"]
    ),
    st.text(max_size=6),
)
JSON = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_KEYS, inner, max_size=4)),
    max_leaves=12,
)
_TOOL = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.dictionaries(_KEYS, JSON, max_size=3) | _SCALARS}
)
_MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool", "king"]),
        "content": st.one_of(_TEXTS, JSON),
    },
    optional={"tool_calls": JSON | st.lists(_TOOL, max_size=2), "name": _SCALARS},
)
# Values that are right, so that what lies behind them is reached too.
_LIKELY = {
    "prompt": st.one_of(_TEXTS, st.lists(st.integers(0, 300), max_size=5), st.lists(_TEXTS)),
    "messages": st.lists(_MESSAGE, max_size=3),
    "input": st.one_of(_TEXTS, st.lists(_MESSAGE, max_size=3)),
    "tools": st.lists(_TOOL, max_size=3),
    "tool_choice": st.sampled_from(["auto", "none", "required"]),
    "logit_bias": st.dictionaries(st.integers(-1, 400).map(str), st.floats(-200, 200)),
    "max_tokens": st.integers(0, 8),
    "stream": st.booleans(),
    "echo": st.booleans(),
    "logprobs": st.integers(0, 5) | st.booleans(),
    "stop": st.lists(_TEXTS, max_size=3),
}
_STRUCTS = {
    "/v1/completions": (CompletionRequest, COMPLETION_FIELDS, ["prompt"]),
    "/v1/chat/completions": (ChatCompletionRequest, {**CHAT_FIELDS, **CHAT_IGNORED}, ["messages"]),
    "/v1/responses": (ResponsesRequest, {**RESPONSES_FIELDS, **RESPONSES_IGNORED}, ["input"]),
    "/v1/messages": (
        MessagesRequest,
        {**MESSAGES_FIELDS, **MESSAGES_IGNORED},
        ["messages", "max_tokens"],
    ),
}


def _bodies(path: str) -> st.SearchStrategy[dict[str, object]]:
    struct, others, wanted = _STRUCTS[path]
    names = [field.encode_name for field in msgspec.structs.fields(struct)] + list(others)
    # Which model is served is another question.
    names.remove("model") if "model" in names else None
    values = {name: st.one_of(_LIKELY.get(name, JSON), JSON) for name in names}
    likely = {name: st.one_of(_LIKELY[name], _LIKELY[name], JSON) for name in wanted}
    few = st.sets(st.sampled_from(names), max_size=5)
    return few.flatmap(
        lambda chosen: st.fixed_dictionaries(
            likely | {name: values[name] for name in chosen if name not in wanted}
        )
    )


# (path, body)
REQUESTS = st.sampled_from(list(_STRUCTS)).flatmap(
    lambda path: st.tuples(st.just(path), st.one_of(_bodies(path), _bodies(path), JSON))
)
