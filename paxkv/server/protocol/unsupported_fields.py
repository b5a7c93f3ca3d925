"""Fields of OpenAI's and vLLM's APIs that this version does not support.

Most are rejected. A field is ignored if the answer is still useful without it; `ignored_parts.py`
reports it to the client.
"""

from collections.abc import Mapping, Sequence

import msgspec

from paxkv.errors import UnsupportedFeatureError

# Field -> the values that ask for nothing. null always asks for nothing.
NeutralValues = Mapping[str, tuple[object, ...]]

# Field -> why it is rejected, or what to use instead, as half a sentence.
REASONS: Mapping[str, str] = {
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        "use structured_outputs",
    ),
    "logits_processors": "the server loads no code that a request names",
    "kv_transfer_params": "KV caches are not transferred between servers",
    "ec_transfer_params": "models take only text, so there is no encoder cache",
    "vllm_xargs": "the server has no extensions that would read it",
    "thinking_token_budget": (
        "thoughts are not limited by themselves; max_tokens limits thoughts and answer together"
    ),
    "repetition_detection": "repeated tokens do not end an answer; use repetition_penalty",
    "logprob_token_ids": (
        "answers have log-probabilities of the most likely tokens; use logprobs or top_logprobs"
    ),
    "return_token_offsets": (
        "character offsets are in answers of the render routes, which this server does not have"
    ),
    "routed_experts_prompt_start": "answers do not name the experts of their tokens",
    "watermarking": "answers are not watermarked",
    **dict.fromkeys(
        ("mm_processor_kwargs", "media_io_kwargs", "return_mm_kwargs"), "models take only text"
    ),
    "suffix": "models continue a text and do not fill gaps",
    "prompt_embeds": "prompts are text or token ids",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "conversation": "use previous_response_id",
    "include_reasoning": "answers contain the thoughts that --reasoning-parser finds",
}
_BOTH_ENDPOINTS: NeutralValues = {
    # vLLM's names before `structured_outputs`.
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "suffix": ("",),
    "prompt_embeds": (),
    # Newer than vLLM 0.16.
    "thinking_token_budget": (),
    "repetition_detection": (),
    "logprob_token_ids": ([],),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (),
    "watermarking": (False,),
    "ec_transfer_params": ({},),
    "return_mm_kwargs": (False,),
}
COMPLETION_FIELDS: NeutralValues = _BOTH_ENDPOINTS
CHAT_FIELDS: NeutralValues = {
    **_BOTH_ENDPOINTS,
    # OpenAI's names before `tools`.
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
CHAT_IGNORED: NeutralValues = {
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
RESPONSES_FIELDS: NeutralValues = {
    "conversation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "n": (1,),
    # vLLM's fields for models of one particular format.
    "enable_response_messages": (False,),
    "previous_input_messages": (),
    "mm_processor_kwargs": ({},),
    "vllm_xargs": ({},),
    # Newer than vLLM 0.16.
    "include_reasoning": (True,),
    "watermarking": (False,),
    "media_io_kwargs": ({},),
    "return_mm_kwargs": (False,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}
# Limits the calls of tools that the server runs. paxkv runs no tools.
RESPONSES_IGNORED: NeutralValues = {"max_tool_calls": ()}
TOKENIZE_FIELDS: NeutralValues = {"mm_processor_kwargs": ({},), "media_io_kwargs": ({},)}
# A beam search ranks tokens by the model's own probabilities, and ends only at EOS or max_tokens.
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
MESSAGE_FIELDS: NeutralValues = {"audio": ()}


def refuse_unsupported(
    fields: Mapping[str, object],
    neutral_values: NeutralValues,
    *,
    path: str = "",
    when: str = "by this version of paxkv",
) -> None:
    """Checks that no unsupported field asks for anything.

    Args:
        path: Prefix of the fields' names in errors.
        when: The end of the sentence "x is not supported ...".

    Raises:
        UnsupportedFeatureError: A field does; `param` names it.
    """
    for name, neutral in neutral_values.items():
        if asks_for_nothing(fields.get(name), neutral):
            continue
        remedy = f" or send {msgspec.json.encode(neutral[0]).decode()}" if neutral else ""
        reason = f": {REASONS[name]}" if name in REASONS else ""
        raise UnsupportedFeatureError(
            f"{path}{name} is not supported {when}{reason}; leave it out{remedy}.",
            param=f"{path}{name}",
        )


def asks_for_nothing(value: object, neutral: Sequence[object]) -> bool:
    """Whether a field's value is null or one of its neutral values."""
    return value is None or any(_is_same(value, v) for v in neutral)


def _is_same(value: object, neutral: object) -> bool:
    # In Python True == 1, in JSON they are two types: n=true must not pass for n=1.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
