"""Trains the demo checkpoint: `python -m models.demo.train --out DIR --seed 0 --steps N`."""

import argparse
import functools
import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer

from models.demo.batches import training_batch
from models.demo.checkpoint import load_checkpoint, save_checkpoint
from models.demo.evaluate import evaluate, format_score
from models.demo.generation import generate_greedy, render_question
from models.demo.model_card import TrainingRecord, render_model_card
from models.demo.optimizer import make_optimizer
from models.demo.packing import PackedRows
from models.demo.tokenizer_training import train_tokenizer
from models.demo.training_model import DemoModel, DemoModelConfig

# These numbers made the checkpoint that ships; the model card names the command.
DEFAULT_NUM_STEPS = 2800
# Steps between two lines of the log.
LOG_EVERY = 100
DEFAULT_MUON_LEARNING_RATE = 0.02
DEFAULT_ADAM_LEARNING_RATE = 0.003

CARD_QUESTIONS = (
    "What is 23 + 58?",
    "What is 12 - 90?",
    "What is 345 + 678?",
    "Count from 8 to 14.",
    "Reverse the word 'stone'.",
    "Sort these words: plum, boat, apple",
    "What is a slot?",
    "Who are you?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Everything except the code that a run depends on."""

    seed: int = 0
    num_steps: int = DEFAULT_NUM_STEPS
    muon_learning_rate: float = DEFAULT_MUON_LEARNING_RATE
    adam_learning_rate: float = DEFAULT_ADAM_LEARNING_RATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The work that a run has done. It is saved with the parameters, so that the run can resume."""

    num_steps: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0


def answer_loss(
    model: DemoModel,
    token_ids: jax.Array,  # i32[num_rows, row_length]
    positions: jax.Array,  # i32[num_rows, row_length]
    segment_ids: jax.Array,  # i32[num_rows, row_length]
    is_answer: jax.Array,  # bool[num_rows, row_length]
) -> jax.Array:  # f32[]
    """Mean cross-entropy of the answers' tokens, each predicted from the token before it."""
    logits = model(token_ids, positions, segment_ids)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, token_ids[:, 1:])
    weights = is_answer[:, 1:].astype(jnp.float32)
    return (losses * weights).sum() / weights.sum()


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    params: nnx.State,
    opt_state: optax.OptState,
    arrays: tuple[jax.Array, ...],
) -> tuple[nnx.State, optax.OptState, jax.Array]:
    """One update; compiled once per batch shape."""
    loss, grads = jax.value_and_grad(lambda p: answer_loss(nnx.merge(graphdef, p), *arrays))(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def _as_arrays(batch: PackedRows) -> tuple[np.ndarray, ...]:
    return batch.token_ids, batch.positions, batch.segment_ids, batch.is_answer


def _save_state(path: Path, progress: Progress, state: object) -> None:
    """Writes a new file and renames it, so that a crash leaves one whole file."""
    leaves = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    partial = path.with_suffix(".partial.npz")
    np.savez(
        partial,
        step=progress.num_steps,
        num_tokens=progress.num_tokens,
        elapsed_s=progress.elapsed_s,
        **leaves,
    )
    partial.rename(path)


def _load_state(path: Path, state: object) -> tuple[Progress, object]:
    with np.load(path) as saved:
        leaves = [jnp.asarray(saved[f"leaf_{i}"]) for i in range(len(jax.tree.leaves(state)))]
        progress = Progress(
            num_steps=int(saved["step"]),
            num_tokens=int(saved["num_tokens"]),
            elapsed_s=float(saved["elapsed_s"]),
        )
    return progress, jax.tree.unflatten(jax.tree.structure(state), leaves)


def train(
    tokenizer: Tokenizer,
    model_config: DemoModelConfig,
    training: TrainingConfig,
    *,
    state_path: Path | None = None,
    save_every: int = 400,
) -> tuple[DemoModel, Progress]:
    """Runs the steps, resuming from `state_path` where an earlier run was interrupted."""
    graphdef, params = nnx.split(DemoModel(model_config, rngs=nnx.Rngs(training.seed)), nnx.Param)
    optimizer = make_optimizer(
        num_steps=training.num_steps,
        muon_learning_rate=training.muon_learning_rate,
        adam_learning_rate=training.adam_learning_rate,
    )
    opt_state = optimizer.init(params)
    before = Progress()
    if state_path is not None and state_path.exists():
        before, (params, opt_state) = _load_state(state_path, (params, opt_state))
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{num_params} parameters, steps {before.num_steps} to {training.num_steps}", flush=True)
    progress, started = before, time.perf_counter()
    losses: list[jax.Array] = []
    for step in range(before.num_steps, training.num_steps):
        batch = training_batch(tokenizer, seed=training.seed, step=step)
        params, opt_state, loss = train_step(
            graphdef, optimizer, params, opt_state, _as_arrays(batch)
        )
        losses.append(loss)
        progress = Progress(
            num_steps=step + 1,
            num_tokens=progress.num_tokens + int((batch.segment_ids > 0).sum()),
            elapsed_s=before.elapsed_s + time.perf_counter() - started,
        )
        if progress.num_steps % LOG_EVERY == 0:
            rate = progress.num_tokens / progress.elapsed_s
            mean = float(np.mean(jax.device_get(losses)))
            print(f"step {step + 1} loss {mean:.4f} {rate:.0f} tokens/s", flush=True)
            losses.clear()
        if state_path is not None and progress.num_steps % save_every == 0:
            _save_state(state_path, progress, (params, opt_state))
            for score in evaluate(nnx.merge(graphdef, params), tokenizer, num_per_task=100):
                print(f"    {format_score(score)}", flush=True)
    return nnx.merge(graphdef, params), progress


def device_name() -> str:
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    # Only Linux can say how many cores this process may use.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{num_cores} CPU core(s)"


def write_model_card(
    folder: Path, training: TrainingConfig, progress: Progress, *, num_per_task: int
) -> None:
    """Measures the checkpoint as it is stored and writes its README.md."""
    model, tokenizer = load_checkpoint(folder)
    scores = evaluate(model, tokenizer, num_per_task=num_per_task)
    for score in scores:
        print(format_score(score), flush=True)
    answers = generate_greedy(model, tokenizer, [render_question(q) for q in CARD_QUESTIONS])
    weights = (folder / "model.safetensors").read_bytes()
    record = TrainingRecord(
        command=(
            f"python -m models.demo.train --out {folder} "
            f"--seed {training.seed} --steps {training.num_steps}"
        ),
        seed=training.seed,
        num_steps=progress.num_steps,
        num_tokens=progress.num_tokens,
        num_params=sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))),
        elapsed_s=progress.elapsed_s,
        device=device_name(),
        weights_sha256=hashlib.sha256(weights).hexdigest(),
    )
    examples = list(zip(CARD_QUESTIONS, answers, strict=True))
    card = render_model_card(model.config, record, scores, examples)
    (folder / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--state", type=Path, help="file to save to, and to resume from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=DEFAULT_NUM_STEPS)
    parser.add_argument("--num-per-task", type=int, default=2000, help="held-out prompts per task")
    args = parser.parse_args()
    training = TrainingConfig(seed=args.seed, num_steps=args.steps)
    model_config = DemoModelConfig()
    tokenizer = train_tokenizer(seed=training.seed, vocab_size=model_config.vocab_size)
    model, progress = train(tokenizer, model_config, training, state_path=args.state)
    save_checkpoint(model, tokenizer, args.out)
    write_model_card(args.out, training, progress, num_per_task=args.num_per_task)


if __name__ == "__main__":
    main()
