"""Fields of OpenAI's and vLLM's API that this version cannot honour: refused, never ignored."""

from collections.abc import Mapping

import msgspec

from paxkv.errors import UnsupportedFeatureError

# Field -> the values that ask for nothing. null always does.
NeutralValues = Mapping[str, tuple[object, ...]]

_BOTH_ENDPOINTS: NeutralValues = {
    # vLLM's names before `structured_outputs`.
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}
COMPLETION_FIELDS: NeutralValues = {**_BOTH_ENDPOINTS, "suffix": ("",), "prompt_embeds": ()}
CHAT_FIELDS: NeutralValues = {
    **_BOTH_ENDPOINTS,
    # OpenAI's names before `tools`.
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "mm_processor_kwargs": ({},),
}
RESPONSES_FIELDS: NeutralValues = {
    "conversation": (),
    "max_tool_calls": (),
    "prompt": (),
    "top_logprobs": (0,),
    "n": (1,),
    # vLLM's, for models of one format.
    "enable_response_messages": (False,),
    "previous_input_messages": (),
}
TOKENIZE_FIELDS: NeutralValues = {"mm_processor_kwargs": ({},)}
# A beam search ranks tokens by the model's own probabilities and ends at EOS or max_tokens alone.
BEAM_SEARCH_FIELDS: NeutralValues = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "seed": (),
    "stop": ([],),
    "stop_token_ids": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
}
NO_BEAM_SEARCH_FIELDS: NeutralValues = {"length_penalty": (1,)}
MESSAGE_FIELDS: NeutralValues = {"function_call": (), "audio": ()}


def refuse_unsupported(
    fields: Mapping[str, object],
    neutral_values: NeutralValues,
    *,
    path: str = "",
    when: str = "by this version of paxkv",
) -> None:
    """Checks that no field asks for what cannot be done.

    Args:
        path: What the fields' names are shown behind.
        when: Ends the sentence "x is not supported ...".

    Raises:
        UnsupportedFeatureError: One does; `param` names it.
    """
    for name, neutral in neutral_values.items():
        value = fields.get(name)
        if value is None or any(_is_same(value, v) for v in neutral):
            continue
        remedy = f" or send {msgspec.json.encode(neutral[0]).decode()}" if neutral else ""
        raise UnsupportedFeatureError(
            f"{path}{name} is not supported {when}; leave it out{remedy}.",
            param=f"{path}{name}",
        )


def _is_same(value: object, neutral: object) -> bool:
    # In Python True == 1, in JSON they are two types: n=true must not pass for n=1.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
