"""Layers one after the other in the program, against two ways to hold them once.

scanned:  `lax.scan` over stacked weights. The program holds one layer; at every step each layer's
          weights have to be taken out of the stack.
looped:   a loop over the layers that holds attention once, and the products with a layer's own
          weights as the branches of a `lax.switch`. Weights stay where they are: what paxkv does
          on CPUs (`models/layer_loop.py`).

For each model: CPU seconds to trace and lower, CPU seconds to compile, and milliseconds of a step
(the fastest and the median of many, all ways in turns), for decoding and for a chunk of a prompt.
All ways give the same logits, which is checked.

    python -m benchmarks.layer_scan --models demo small
"""

import argparse
import dataclasses
import importlib.resources
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.stages import Compiled

from benchmarks.command_line import positive_int, run_benchmark
from benchmarks.random_checkpoint import MODEL_SHAPES, write_checkpoint
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, processor_name
from models import ForwardBatch, KVCache, LoadedModel, load_model
from models.layer_loop import run_in_turn
from paxkv.runner.programs.compiler_options import compiler_options
from paxkv.runner.programs.processor import instruction_sets, num_threads

BLOCK_SIZE = 16
LAYERS_PREFIX = "layers."
MAX_RELATIVE_ERROR = 1e-4

# (params, stacked, kv_cache, batch) -> logits f32[num_reqs, vocab], kv_cache. `stacked` is empty
# for unrolled layers.
Arrays = tuple[jax.Array, ...]
Step = Callable[[Arrays, Arrays, KVCache, ForwardBatch], tuple[jax.Array, KVCache]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kind of step: `num_reqs` requests, each with as many new tokens and cached ones."""

    name: str
    num_reqs: int
    num_new_tokens: int
    context_len: int


WORKS = (
    Work(name="decode", num_reqs=64, num_new_tokens=1, context_len=256),
    Work(name="decode of one", num_reqs=1, num_new_tokens=1, context_len=256),
    Work(name="chunk", num_reqs=2, num_new_tokens=128, context_len=256),
)


def make_unrolled(model: LoadedModel) -> Step:
    """The model's own forward pass."""

    def step(
        params: Arrays, stacked: Arrays, kv_cache: KVCache, batch: ForwardBatch
    ) -> tuple[jax.Array, KVCache]:
        hidden, kv_cache = model.forward(params, kv_cache, batch)
        return model.compute_logits(params, hidden[batch.logits_indices]), kv_cache

    return step


def make_scanned(model: LoadedModel) -> Step:
    """The same with the layers' part replaced by a scan; all layers must be of one kind."""

    def step(
        outer: Arrays, stacked: Arrays, kv_cache: KVCache, batch: ForwardBatch
    ) -> tuple[jax.Array, KVCache]:
        decoder = _merge(model, outer, [array[0] for array in stacked])
        first_def, first_state = nnx.split(decoder.layers[0])
        layer_tree = jax.tree.structure(first_state)

        context = decoder.make_context(batch, kv_cache, model.kernels)

        def run_layer(
            carry: tuple[jax.Array, KVCache], xs: tuple[Arrays, jax.Array]
        ) -> tuple[tuple[jax.Array, KVCache], None]:
            weights, row = xs
            layer = nnx.merge(first_def, jax.tree.unflatten(layer_tree, weights))
            # The one thing that tells the layers of such a model apart.
            object.__setattr__(layer.self_attn, "row", row)
            return run_in_turn([layer], *carry, context), None

        rows = jnp.arange(model.config.num_layers, dtype=jnp.int32)
        carry = (decoder.embed_tokens(batch.token_ids), kv_cache)
        (hidden, kv_cache), _ = jax.lax.scan(run_layer, carry, (stacked, rows))
        hidden = decoder.norm(hidden)
        return decoder.compute_logits(hidden[batch.logits_indices]), kv_cache

    return step


def make_looped(model: LoadedModel) -> Step:
    """The model's own forward pass with its loop over the layers."""
    kernels = dataclasses.replace(model.kernels, loops_over_layers=True)
    return make_unrolled(model.with_kernels(kernels))


WAYS = {"unrolled": make_unrolled, "scanned": make_scanned, "looped": make_looped}


def split_params(model: LoadedModel) -> tuple[Arrays, Arrays]:
    """What is not in a layer, and what is, stacked: each f[num_layers, ...]."""
    by_layer: dict[str, list[jax.Array]] = {}
    outer = []
    for name, array in zip(model.param_names, model.params, strict=True):
        if name.startswith(LAYERS_PREFIX):
            rest = name.removeprefix(LAYERS_PREFIX).partition(".")[2]
            by_layer.setdefault(rest, []).append(array)
        else:
            outer.append(array)
    return tuple(outer), tuple(jnp.stack(arrays) for arrays in by_layer.values())


def _merge(model: LoadedModel, outer: Arrays, layer: Sequence[jax.Array]) -> nnx.Module:
    """The decoder with one layer's weights in every layer."""
    outer_left, layer_idx_of = list(outer), {}
    params = []
    for name in model.param_names:
        if name.startswith(LAYERS_PREFIX):
            rest = name.removeprefix(LAYERS_PREFIX).partition(".")[2]
            params.append(layer[layer_idx_of.setdefault(rest, len(layer_idx_of))])
        else:
            params.append(outer_left.pop(0))
    return nnx.merge(model.graphdef, jax.tree.unflatten(model.params_treedef, params))


def make_inputs(model: LoadedModel, work: Work) -> tuple[KVCache, ForwardBatch]:
    """A cache of random keys and values, and a batch whose requests' blocks lie mixed."""
    config, rng = model.config, np.random.default_rng(0)
    seq_len = work.context_len + work.num_new_tokens
    blocks_per_req = -(-seq_len // BLOCK_SIZE)
    num_blocks = 1 + work.num_reqs * blocks_per_req
    cache_shape = (config.num_layers, num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    tables_np = 1 + rng.permutation(num_blocks - 1).reshape(1, work.num_reqs, blocks_per_req)
    num_tokens = work.num_reqs * work.num_new_tokens
    starts_np = np.arange(work.num_reqs + 1, dtype=np.int32) * work.num_new_tokens
    new_np = np.arange(work.context_len, seq_len, dtype=np.int32)
    kv_cache = KVCache(
        k=jnp.asarray(rng.standard_normal(cache_shape, np.float32)),
        v=jnp.asarray(rng.standard_normal(cache_shape, np.float32)),
    )
    batch = ForwardBatch(
        token_ids=jnp.asarray(rng.integers(0, config.vocab_size, num_tokens, np.int32)),
        positions=jnp.asarray(np.tile(new_np, work.num_reqs)),
        query_start_loc=jnp.asarray(starts_np),
        seq_lens=jnp.full((1, work.num_reqs), seq_len, jnp.int32),
        block_tables=jnp.asarray(tables_np.astype(np.int32)),
        logits_indices=jnp.asarray(starts_np[1:] - 1),
        max_query_len=1 if work.num_new_tokens == 1 else None,
    )
    return kv_cache, batch


@dataclasses.dataclass(kw_only=True)
class Variant:
    """A way to run the layers, its program, and what was measured."""

    name: str
    params: Arrays
    stacked: Arrays
    program: Compiled
    lower_cpu_s: float
    compile_cpu_s: float
    step_ms: list[float] = dataclasses.field(default_factory=list)


def compile_variant(name: str, model: LoadedModel, work: Work) -> Variant:
    """Compiles one of `WAYS` from scratch, as a first start does."""
    make_step = WAYS[name]
    params, stacked = split_params(model) if name == "scanned" else (model.params, ())
    kv_cache, batch = make_inputs(model, work)
    start = time.process_time()
    lowered = jax.jit(make_step(model), donate_argnums=2).lower(params, stacked, kv_cache, batch)
    lowered_at = time.process_time()
    options = compiler_options(
        jax.default_backend(),
        {param.dtype.name for param in params},
        num_cores=num_threads(),
        instruction_sets=instruction_sets(),
    )
    program = lowered.compile(options)
    return Variant(
        name=name,
        params=params,
        stacked=stacked,
        program=program,
        lower_cpu_s=lowered_at - start,
        compile_cpu_s=time.process_time() - lowered_at,
    )


def measure_steps(
    variants: Sequence[Variant], model: LoadedModel, work: Work, num_repetitions: int
) -> None:
    """Times steps in turns, so that whatever else the machine does meets all alike.

    Raises:
        RuntimeError: The variants' logits differ.
    """
    inputs = [make_inputs(model, work) for _ in variants]
    caches, batches = [list(part) for part in zip(*inputs, strict=True)]
    results_np = []
    for repetition in range(num_repetitions + 1):
        for idx, variant in enumerate(variants):
            start = time.perf_counter()
            logits, caches[idx] = variant.program(
                variant.params, variant.stacked, caches[idx], batches[idx]
            )
            jax.block_until_ready(logits)
            if repetition:
                variant.step_ms.append(1e3 * (time.perf_counter() - start))
            else:  # the first run touches memory for the first time
                results_np.append(jax.device_get(logits))
    for variant, result_np in zip(variants[1:], results_np[1:], strict=True):
        difference = float(np.linalg.norm(result_np - results_np[0]))
        relative = difference / float(np.linalg.norm(results_np[0]))
        if not relative <= MAX_RELATIVE_ERROR:
            raise RuntimeError(
                f"{work.name}: logits of {variant.name} and {variants[0].name} layers differ by "
                f"{relative:.2g} of their norm; wanted at most {MAX_RELATIVE_ERROR}."
            )


def measure_model(name: str, num_repetitions: int) -> list[ResultRow]:
    """Prints a table for one model and returns its rows."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = _load(name, Path(folder))
    for work in WORKS:
        variants = [compile_variant(way, model, work) for way in WAYS]
        measure_steps(variants, model, work, num_repetitions)
        for variant in variants:
            case = f"{name}, {model.config.num_layers} layers, {work.name}, {variant.name}"
            figures = {
                "lower_cpu_s": [variant.lower_cpu_s],
                "compile_cpu_s": [variant.compile_cpu_s],
                "step_ms": variant.step_ms,
            }
            rows += [
                ResultRow(
                    benchmark="benchmarks.layer_scan",
                    case=case,
                    metric=metric,
                    values=values,
                    device=processor_name(),
                )
                for metric, values in figures.items()
            ]
            print(
                f"| {case} | {variant.lower_cpu_s:.2f} | {variant.compile_cpu_s:.2f} "
                f"| {min(variant.step_ms):.2f} | {statistics.median(variant.step_ms):.2f} |",
                flush=True,
            )
    return rows


def _load(name: str, folder: Path) -> LoadedModel:
    if name == "demo":
        return load_model(Path(str(importlib.resources.files("models.demo") / "checkpoint")))
    return load_model(write_checkpoint(folder, MODEL_SHAPES[name]))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layer_scan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        *("--models", "-m"),
        nargs="+",
        choices=("demo", *sorted(MODEL_SHAPES)),
        default=["demo", "small"],
    )
    parser.add_argument(
        "--repetitions", type=positive_int, default=30, help="steps timed of each kind"
    )
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results")
    arguments = parser.parse_args()
    # Programs from an earlier run would make compiling look free.
    jax.config.update("jax_enable_compilation_cache", False)
    print("| model, step, layers | lower CPU s | compile CPU s | step ms, fastest | median |")
    print("| --- | --- | --- | --- | --- |")
    rows = []
    for name in arguments.models:
        rows += measure_model(name, arguments.repetitions)
    if arguments.save:
        append_rows(rows, RESULTS_FOLDER / "layer_scan.jsonl")


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
