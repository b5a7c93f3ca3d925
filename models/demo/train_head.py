"""Trains the draft head of the demo model: `python -m models.demo.train_head --out DIR`."""

import argparse
import functools
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save
from tokenizers import Tokenizer

from models.demo.batches import training_batch
from models.demo.checkpoint import load_checkpoint
from models.demo.head_model import HeadConfig, HeadModel
from models.demo.optimizer import make_optimizer
from models.demo.packing import PackedRows
from models.demo.train import LOG_EVERY, device_name
from models.demo.training_model import DemoModel

DEFAULT_NUM_STEPS = 1600
# Drafts of each token that the head learns.
NUM_DRAFTS = 3
MUON_LEARNING_RATE, ADAM_LEARNING_RATE = 0.01, 0.002
# Steps of other data, for the list of tokens and for measuring.
_NUM_COUNTED, _NUM_MEASURED = 40, 20


def find_draft_ids(tokenizer: Tokenizer, size: int, *, seed: int) -> np.ndarray:
    """The most frequent tokens of answers, i32[size], in rising order."""
    counts_np = np.zeros(tokenizer.get_vocab_size(), np.int64)
    for step in range(_NUM_COUNTED):
        batch = training_batch(tokenizer, seed=seed + 1, step=step)
        np.add.at(counts_np, batch.token_ids[batch.is_answer], 1)
    return np.sort(np.argsort(-counts_np, kind="stable")[:size]).astype(np.int32)


def run_head(
    head: HeadModel,
    target: DemoModel,
    draft_ids: jax.Array,  # i32[draft_vocab_size]
    batch: PackedRows,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes drafts after every token of a batch, and the tokens that the model writes there.

    Returns:
        logits f32[num_drafts, num_rows, row_length, draft_vocab_size]; wanted
        i32[num_drafts, num_rows, row_length], the index of the model's own token, or -1 if the
        head cannot propose it; and bool, whether the place is in an answer.
    """
    token_ids, positions, segment_ids, is_answer = batch
    states = target.hidden_states(token_ids, positions, segment_ids)
    own_ids = target.logits(states[-1]).argmax(-1)
    hidden = jnp.concatenate([states[idx - 1] for idx in head.config.layer_ids], axis=-1)
    embedded = target.embed_tokens(token_ids)
    logits = head(hidden, embedded, positions, segment_ids, NUM_DRAFTS)
    place_of = jnp.full(target.config.vocab_size, -1).at[draft_ids].set(jnp.arange(len(draft_ids)))
    length = token_ids.shape[1]
    wanted, counts = [], []
    for draft_idx in range(NUM_DRAFTS):
        distance = 2 + draft_idx
        wanted.append(place_of[jnp.roll(own_ids, 1 - distance, axis=1)])
        is_same = jnp.roll(segment_ids, -distance, axis=1) == segment_ids
        is_inside = jnp.arange(length) < length - distance
        counts.append(is_same & is_inside & jnp.roll(is_answer, -distance, axis=1))
    return jnp.stack(logits), jnp.stack(wanted), jnp.stack(counts)


def head_loss(
    head: HeadModel, target: DemoModel, draft_ids: jax.Array, batch: PackedRows
) -> jax.Array:  # f32[]
    """Mean cross-entropy of all drafts that the head can propose."""
    logits, wanted, counts = run_head(head, target, draft_ids, batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(wanted, 0))
    weights = (counts & (wanted >= 0)).astype(jnp.float32)
    return (losses * weights).sum() / weights.sum()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    params: nnx.State,
    opt_state: optax.OptState,
    target: DemoModel,
    draft_ids: jax.Array,
    batch: tuple[jax.Array, ...],
) -> tuple[nnx.State, optax.OptState, jax.Array]:
    loss, grads = jax.value_and_grad(
        lambda p: head_loss(nnx.merge(graphdef, p), target, draft_ids, batch)
    )(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


@functools.partial(jax.jit, static_argnums=0)
def _count_right(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    target: DemoModel,
    draft_ids: jax.Array,
    batch: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array]:  # i32[num_drafts] both
    """Counts drafts that are right with all drafts before them, and the measured places."""
    logits, wanted, counts = run_head(nnx.merge(graphdef, params), target, draft_ids, batch)
    is_right = jnp.cumprod(logits.argmax(-1) == wanted, axis=0, dtype=jnp.int32)
    # Only where all drafts are inside the answer.
    counts = counts[-1]
    return (is_right * counts).sum((1, 2)), jnp.broadcast_to(counts.sum(), (NUM_DRAFTS,))


def train_head(
    target: DemoModel, tokenizer: Tokenizer, config: HeadConfig, *, seed: int, num_steps: int
) -> tuple[HeadModel, np.ndarray, list[float]]:
    """Trains a head on the texts of the model's own training.

    Returns:
        The head; the token of each of its logits, i32[draft_vocab_size]; and the share of places in
        answers where the first draft is right, the first two, and so on, on other texts.
    """
    draft_ids_np = find_draft_ids(tokenizer, config.draft_vocab_size, seed=seed)
    head = HeadModel(config, target, draft_ids_np, rngs=nnx.Rngs(seed))
    graphdef, params = nnx.split(head, nnx.Param)
    optimizer = make_optimizer(
        num_steps=num_steps,
        muon_learning_rate=MUON_LEARNING_RATE,
        adam_learning_rate=ADAM_LEARNING_RATE,
    )
    opt_state = optimizer.init(params)
    losses: list[jax.Array] = []
    for step in range(num_steps):
        batch = as_arrays(training_batch(tokenizer, seed=seed + 2, step=step))
        params, opt_state, loss = _train_step(
            *(graphdef, optimizer, params, opt_state, target, draft_ids_np, batch)
        )
        losses.append(loss)
        if (step + 1) % LOG_EVERY == 0:
            shares = _measure(graphdef, params, target, tokenizer, draft_ids_np, seed=seed)
            mean = float(np.mean(jax.device_get(losses)))
            print(f"step {step + 1} loss {mean:.4f} right {format_shares(shares)}", flush=True)
            losses.clear()
    shares = _measure(graphdef, params, target, tokenizer, draft_ids_np, seed=seed)
    return nnx.merge(graphdef, params), draft_ids_np, shares


def _measure(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    target: DemoModel,
    tokenizer: Tokenizer,
    draft_ids_np: np.ndarray,
    *,
    seed: int,
) -> list[float]:
    num_right_np, num_np = np.zeros(NUM_DRAFTS), np.zeros(NUM_DRAFTS)
    for step in range(_NUM_MEASURED):
        batch = as_arrays(training_batch(tokenizer, seed=seed + 3, step=step))
        right, num = _count_right(graphdef, params, target, draft_ids_np, batch)
        num_right_np += np.asarray(right)
        num_np += np.asarray(num)
    return (num_right_np / num_np).tolist()


def format_shares(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.1%}" for share in shares)


def save_head(head: HeadModel, target: DemoModel, draft_ids_np: np.ndarray, folder: Path) -> None:
    """Writes 16-bit weights and config.json, in the layout of SpecForge."""
    config, sizes = head.config, target.config
    weights: dict[str, np.ndarray] = {}
    for path, variable in nnx.to_flat_state(nnx.state(head, nnx.Param)):
        *owner, leaf = map(str, path)
        name = ".".join(owner)
        if owner[0] in ("q_proj", "k_proj", "v_proj", "o_proj"):
            name = f"self_attn.{name}"
        if owner[0] not in ("fc", "norm", "lm_head"):
            name = f"midlayer.{name}"
        array = np.asarray(variable[...], np.float16)
        weights[f"{name}.weight"] = np.ascontiguousarray(array.T if leaf == "kernel" else array)
    weights["d2t"] = draft_ids_np.astype(np.int64) - np.arange(len(draft_ids_np))
    weights["t2d"] = np.isin(np.arange(sizes.vocab_size), draft_ids_np)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": sizes.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(config.layer_ids),
        "hidden_size": sizes.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta,
        "max_position_embeddings": sizes.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def as_arrays(batch: PackedRows) -> tuple[np.ndarray, ...]:
    return batch.token_ids, batch.positions, batch.segment_ids, batch.is_answer


_CARD = """\
---
library_name: transformers
tags: [paxkv, demo, eagle3]
---

# The draft head of the paxkv demo model

An EAGLE-3 head of {num_params:,} parameters in {num_bytes:,} bytes. It reads the outputs of layers
{layers} (counted from 1) of [the demo model](../checkpoint/README.md). It can propose {num_ids} of
its tokens, the most frequent ones in answers. This command uses it with the demo model:

    paxkv serve --speculative-config '{{"method": "eagle3", "num_speculative_tokens": 3}}'

Measured at each place of answers that were not drawn for training:

| right drafts | share of the places |
| --- | ---: |
{share_rows}

## Training

    {command}

{num_steps:,} steps, {minutes:.0f} minutes on {device}. The texts are those of
`models/demo/data.py`, drawn anew, and the wanted tokens are the model's own. The head learns three
drafts of each token, and reads its own hidden states for the second and the third (training-time
test). It starts as the model's last hidden state and vocabulary head. Muon trains matrices, and
AdamW norms. Another machine or library version rounds sums differently, so a new run gives weights
that behave alike but are not equal bit by bit. SHA-256 of model.safetensors: `{sha256}`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=DEFAULT_NUM_STEPS)
    args = parser.parse_args()
    target, tokenizer = load_checkpoint(args.model)
    started = time.perf_counter()
    head, draft_ids_np, shares = train_head(
        target, tokenizer, HeadConfig(), seed=args.seed, num_steps=args.steps
    )
    save_head(head, target, draft_ids_np, args.out)
    weights = (args.out / "model.safetensors").read_bytes()
    card = _CARD.format(
        num_params=sum(leaf.size for leaf in jax.tree.leaves(nnx.state(head, nnx.Param))),
        num_bytes=len(weights),
        layers=" and ".join(map(str, head.config.layer_ids)),
        num_ids=head.config.draft_vocab_size,
        share_rows="\n".join(
            f"| {name} | {share:.1%} |"
            for name, share in zip(("the first", "the first two", "all three"), shares, strict=True)
        ),
        command=f"python -m models.demo.train_head --out {args.out} --seed {args.seed} "
        f"--steps {args.steps}",
        num_steps=args.steps,
        minutes=(time.perf_counter() - started) / 60,
        device=device_name(),
        sha256=hashlib.sha256(weights).hexdigest(),
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
