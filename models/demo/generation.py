"""Greedy answers from the training model, without a cache: slow, but right by construction."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from models.demo.tokenizer_training import END_OF_TEXT, TURN_END, TURN_START
from models.demo.training_model import DemoModel


@functools.partial(jax.jit, static_argnums=0)
def _next_token(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    token_ids: jax.Array,  # i32[num_reqs, row_length]
    seq_lens: jax.Array,  # i32[num_reqs]
) -> jax.Array:  # i32[num_reqs]
    num_reqs, length = token_ids.shape
    positions = jax.numpy.broadcast_to(jax.numpy.arange(length), token_ids.shape)
    logits = nnx.merge(graphdef, params)(token_ids, positions, jax.numpy.ones_like(token_ids))
    return logits[jax.numpy.arange(num_reqs), seq_lens - 1].argmax(-1)


def render_question(question: str, system: str | None = None) -> str:
    """Renders one question as the chat template does, up to where the answer begins."""
    head = "" if system is None else f"{TURN_START}system\n{system}{TURN_END}\n"
    return f"{head}{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"


def generate_greedy(
    model: DemoModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_tokens: int = 96,
) -> list[str]:
    """Continues each prompt until its turn ends; every token is computed from the whole text.

    Returns:
        The new text of each prompt, without the token that ended it.
    """
    graphdef, params = nnx.split(model, nnx.Param)
    stop_ids = {tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)}
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(list(prompts))]
    seq_lens = np.array([len(ids) for ids in encoded], np.int32)
    token_ids = np.zeros((len(encoded), int(seq_lens.max()) + max_tokens), np.int32)
    for row, ids in zip(token_ids, encoded, strict=True):
        row[: len(ids)] = ids
    generated: list[list[int]] = [[] for _ in encoded]
    running = set(range(len(encoded)))
    for _ in range(max_tokens):
        # Copies: a put may alias the host buffer, and these are written again below.
        drawn = np.asarray(_next_token(graphdef, params, token_ids.copy(), seq_lens.copy()))
        for i in sorted(running):
            if int(drawn[i]) in stop_ids:
                running.discard(i)
                continue
            generated[i].append(int(drawn[i]))
            token_ids[i, seq_lens[i]] = drawn[i]
            seq_lens[i] += 1
        if not running:
            break
    return [tokenizer.decode(ids) for ids in generated]
