"""The optimizer: Muon for the weight matrices, AdamW for embedding and norms."""

import jax
import optax

NUM_WARMUP_STEPS = 88


def learning_rate_shape(num_steps: int) -> optax.Schedule:
    """Factor of the peak learning rate: a short rise, flat, linear to zero over the last 60 %."""
    warmup = min(NUM_WARMUP_STEPS, max(1, num_steps // 10))
    decay = max(1, int(num_steps * 0.6))
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, 1.0, warmup),
            optax.constant_schedule(1.0),
            optax.linear_schedule(1.0, 0.0, decay),
        ],
        [warmup, num_steps - decay],
    )


def _label(path: tuple[jax.tree_util.KeyEntry, ...], leaf: jax.Array) -> str:
    is_embedding = "embed" in jax.tree_util.keystr(path)
    return "matrix" if leaf.ndim == 2 and not is_embedding else "vector"


def _labels(params: optax.Params) -> optax.Params:
    return jax.tree_util.tree_map_with_path(_label, params)


def make_optimizer(
    *, num_steps: int, muon_learning_rate: float, adam_learning_rate: float
) -> optax.GradientTransformation:
    """Builds the optimizer.

    Source: Muon, https://kellerjordan.github.io/posts/muon, through `optax.contrib`.
    """
    shape = learning_rate_shape(num_steps)
    matrix = optax.contrib.muon(lambda step: muon_learning_rate * shape(step), weight_decay=0.1)
    vector = optax.adamw(
        lambda step: adam_learning_rate * shape(step), b1=0.9, b2=0.95, weight_decay=0.0
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition({"matrix": matrix, "vector": vector}, _labels),
    )
