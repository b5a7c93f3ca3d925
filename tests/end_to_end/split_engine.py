"""Runs engines on simulated devices; the first argument of the command is a key of `CASES`.

The number of CPU devices is settled when JAX starts, so tests run this file in its own process.
"""

import collections
import dataclasses
import json
import logging
import math
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from models import load_model
from models.decoders.chosen_layer import choose_layer
from models.forward.kernel_settings import TOKENS_BY_HEAD, WHOLE, KernelSettings
from models.forward.layer_context import LayerContext
from models.layers.experts import Experts
from models.layers.routing import Routing
from models.stored_kernels.scaled import ScaledKernel
from paxkv import LLM, StructuredOutputsParams
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.request_output import Logprob, RequestOutput
from paxkv.generate import CompiledGenerator
from paxkv.runner.memory.device_mesh import find_mesh
from paxkv.runner.programs.generation import GenerateShape
from paxkv.runner.shapes.program_shapes import DraftShape, StepShape
from tests.end_to_end.engine_harness import (
    MAX_DECODE_BURST,
    MAX_NUM_SEQS,
    EngineSettings,
    RecordingRunner,
    RunResult,
    run_engine,
)
from tests.end_to_end.golden_runs import GREEDY, check_against
from tests.end_to_end.split_drafters import (
    check_state_drafter,
    make_drafting_runner,
    run_with_drafts,
)
from tests.end_to_end.split_states import LAYERS, MORE_LAYERS, check_own_heads
from tests.end_to_end.test_quantized_checkpoints import write_pair
from tests.engine_compilations import quick_engine_compilations
from tests.models.layers.test_experts import make_experts
from tests.models.layers.test_layer_stack import put_in_stacks
from tests.models.plain_context import plain_context
from tests.models.stored_kernels.dequantized import dequantized
from tests.oracles.serving_golden import load_serving_golden, write_serving_recipe
from tests.quick_compile import QUICK_COMPILE

# Few blocks, so that requests are preempted and prefixes are hit.
SETTINGS = EngineSettings(num_blocks=30, arrival_gap=2, max_decode_burst=4)
LIMITS: dict[str, Any] = {"max_num_batched_tokens": 64, "has_few_sizes": True}
PROMPTS = [[7, 8, 9, 7], list(range(5, 40)), list(range(5, 30)), [3] * 18]
# States of the first prompt are saved after 32 tokens.
STATE_PROMPTS = [list(range(5, 40)), list(range(5, 42)), [*range(5, 37), 9, 9], [3] * 18]
DRAWS = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 9, "ignore_eos": True}
PARAMS = [
    SamplingParams(seed=1, presence_penalty=0.7, frequency_penalty=0.3, **DRAWS),
    SamplingParams(seed=2, repetition_penalty=1.3, logit_bias={5: 2.0}, **DRAWS),
    SamplingParams(seed=3, min_p=0.01, top_k=40, **DRAWS),
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
]
# Weights are random. They are large enough that logits are as those of a trained model.
MOE_CONFIG = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "initializer_range": 0.2,
    "eos_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": MOE_CONFIG
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 3,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    # No number of devices divides the vocabulary; embedding and head are tied.
    "odd_vocabulary": MOE_CONFIG
    | {"architectures": ["LlamaForCausalLM"], "vocab_size": 163, "tie_word_embeddings": True},
    "few_kv_heads": MOE_CONFIG | {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2},
    # Sinks, biases of experts, and every second layer with a window.
    "gpt_oss": MOE_CONFIG
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_experts": 4,
        "num_local_experts": 4,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "intermediate_size": 32,
    },
    # Latents, which all devices have, and a shared expert.
    "deepseek_v3": MOE_CONFIG
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    # States, of whose heads each device has its own, beside attention and experts.
    "qwen3_next": MOE_CONFIG
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "full_attention_interval": 2,
        "norm_topk_prob": True,
    },
    # Several residual streams, an index of blocks, and two states in one layer.
    "qwen4_exp": MOE_CONFIG
    | {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "indexed_attention"],
        "hc_count": 2,
        "hc_lowrank": 16,
        "indexer_n_heads": 8,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 100,
        "make_ngram_vocab_size_divisible_by": 16,
        "split_ngram_parts": 2,
    },
    # Convolutions of queries and keys, and experts that a token may skip.
    "zaya": MOE_CONFIG
    | {
        "architectures": ["ZayaForCausalLM"],
        "num_experts_per_tok": 1,
        "router_hidden_size": 32,
        "layer_types": ["hybrid", "hybrid_sliding"],
        "sliding_window": 16,
    },
    # Biases of distances in each head, with and without a window, and convolutions.
    "inkling": MOE_CONFIG
    | {
        "architectures": ["InklingForCausalLM"],
        "swa_head_dim": 16,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 8,
        "sliding_window_size": 16,
        "d_rel": 4,
        "rel_extent": 20,
        "layer_types": ["hybrid_sliding", "hybrid"],
        "mlp_layer_types": ["dense", "sparse"],
        "route_scale": 2.0,
        "logits_mup_width_multiplier": 2.0,
        "log_scaling_n_floor": 8,
    },
    "lfm2": MOE_CONFIG
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"],
    },
    # States beside latents. Each device has the whole inner vectors of which decays are computed.
    "kimi_linear": MOE_CONFIG
    | {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_key_value_heads": 8,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    # States with slopes that depend on the layer.
    "minimax": MOE_CONFIG
    | {
        "architectures": ["MiniMaxForCausalLM"],
        "model_type": "minimax",
        "layer_types": ["linear_attention", "full_attention"],
    },
    # States beside keys and values, and a norm over all heads.
    "falcon_h1": MOE_CONFIG
    | {
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_rms_norm": True,
        "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3],
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "vocab_size": 160,
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_heads": 12,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "expand": 2,
        "initializer_range": 0.2,
        "eos_token_id": 2,
    },
}


def check_golden(recipe: str, num_devices: int, **limits: int) -> RecordingRunner:
    """Greedy tokens and logits are those of transformers.

    Args:
        limits: `max_num_batched_tokens` of the engine, instead of the value in `LIMITS`.
    """
    folder = write_serving_recipe(Path(tempfile.mkdtemp()), recipe)
    runner = RecordingRunner(folder, 16, mesh=find_mesh(num_devices), **LIMITS | limits)
    golden = load_serving_golden(recipe)
    settings = dataclasses.replace(SETTINGS, **limits)
    result = run_engine(runner, [g.prompt for g in golden], settings, sampling_params=GREEDY)
    check_against(golden, result)
    if runner.can_hit:
        assert sum(result.num_cached_tokens) > 0
    check_collectives(runner)
    return runner


def check_collectives(recording: RecordingRunner) -> None:
    """Two sums per layer and one for the embedding; then numbers of rows that draw."""
    runner = recording.runner
    config = runner.worker.programs._model.config
    for shape, program in runner.worker.programs._programs.items():
        num_sums = collections.Counter()
        for computation, operation, dims in _collectives(program.as_text()):
            if (operation, dims[-1]) == ("all-reduce", config.hidden_size):
                num_sums[computation] += 1
                continue
            assert not isinstance(shape, StepShape), (operation, dims)
            # Results contain the logits here (`RecordingRunner`).
            assert dims[-1] <= 2 * config.vocab_size, (operation, dims)
            assert math.prod(dims[:-1]) <= MAX_DECODE_BURST * MAX_NUM_SEQS, (operation, dims)
        # The entry of a step may have the last layer and the embedding. On a CPU, other layers are
        # in loops or conditions. A burst may have several layers in one computation.
        if isinstance(shape, StepShape):
            assert 2 <= max(num_sums.values()) <= 3, (shape, num_sums)
    check_cache_in_place(recording)


def check_cache_in_place(recording: RecordingRunner) -> None:
    """No program copies the cache of a device."""
    worker = recording.runner.worker
    cache_bytes = worker.kv_cache.addressable_shards[0].data.nbytes
    for shape, program in worker.programs._programs.items():
        memory = program.memory_analysis()
        if hasattr(shape, "tables"):
            assert memory.alias_size_in_bytes >= cache_bytes, shape
        assert memory.temp_size_in_bytes < cache_bytes / 2, shape


def _collectives(hlo: str) -> list[tuple[str, str, list[int]]]:
    found, computation = [], ""
    for line in hlo.splitlines():
        if line.startswith(("%", "ENTRY")):
            computation = line.split("(")[0]
        if match := re.search(
            r"= \w+\[([0-9,]*)\]\S* "
            r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(",
            line,
        ):
            dims = [int(size) for size in match[1].split(",") if size]
            found.append((computation, match[2], dims))
    return found


def check_same_as_alone(name: str, num_devices: int, **options: Any) -> None:
    """Tokens are those of one device: drawn with a seed, with penalties and biases, and greedy.

    Args:
        options: Of `load_model`.
    """
    folder = Path(tempfile.mkdtemp())
    if name in CONFIGS:
        (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    else:
        # Each device has whole groups of 32 inputs.
        write_serving_recipe(folder, name, intermediate_size=128)
    limits = LIMITS | options | {"load_format": "dummy" if name in CONFIGS else "auto"}

    # A block of Qwen4-Exp's index keys has as many tokens as fit a page of keys and values: 128 on
    # one device, fewer on several, where pages are smaller. A hit is a multiple of this number.
    hits_alike = name != "qwen4_exp"
    weight_bytes = []

    def run(mesh: jax.sharding.Mesh | None) -> RunResult:
        runner = RecordingRunner(folder, 16, mesh=mesh, **limits)
        weight_bytes.append(runner.runner._weight_bytes)
        check_cache_in_place(runner)
        prompts = STATE_PROMPTS if runner.has_states else PROMPTS
        result = run_engine(runner, prompts, SETTINGS, sampling_params=PARAMS)
        assert sum(result.num_cached_tokens) > 0 or not runner.has_states or not hits_alike
        return result

    alone, split = run(None), run(find_mesh(num_devices))
    assert split.token_ids == alone.token_ids
    assert split.num_cached_tokens == alone.num_cached_tokens or not hits_alike
    assert weight_bytes[1] < 1.4 / num_devices * weight_bytes[0]
    for one, many in zip(alone.logits, split.logits, strict=True):
        np.testing.assert_allclose(one, many, atol=1e-3)


def check_merged_attention(num_devices: int, num_ranks: int, dtype: str, atol: float) -> None:
    """Ranks that write and read their own positions compute what one device computes."""
    rng = np.random.default_rng(0)
    num_tokens, width = 35, 8  # prompts of 21 and 13 tokens, and one of padding
    q = jnp.asarray(rng.standard_normal((num_tokens, 2 * num_devices, width)), dtype)
    kv = jnp.asarray(rng.standard_normal((2, num_tokens, 1, width)), dtype)
    starts = jnp.array([0, 21, 34])
    positions = jnp.array([*range(21), *range(13), 0])
    lens = jnp.array([21, 13])
    tables = jnp.array([[2, 1], [3, 0]])

    ranks = KernelSettings.for_mesh(find_mesh(num_devices), num_context_ranks=num_ranks)
    block_size = 8  # of each rank

    def run(rows: jax.Array, query_starts: jax.Array, max_query_len: int | None) -> np.ndarray:
        def of_own_heads(q: jax.Array, slots: jax.Array, *last: jax.Array) -> jax.Array:
            pad_slot = pallas_kernels.pad_slot(1, 4, block_size)
            slots = ranks.context_ranks.own_slots(slots, positions, pad_slot)
            cache = jnp.full((1, 8, 1, block_size, width), jnp.nan, dtype)
            cache = pallas_kernels.kv_scatter(cache, *kv, slots, 0)
            rows, query_starts = last

            def attend(q: jax.Array, lens: jax.Array, **options: Any) -> Any:
                return pallas_kernels.paged_attention(
                    *(q, cache, 0, tables, lens, query_starts), scale=0.5, **options
                )

            return ranks.context_ranks.attend(
                *(attend, (q[rows],), lens, query_starts), max_query_len=max_query_len
            )

        specs = (TOKENS_BY_HEAD, WHOLE, WHOLE, WHOLE)

        def program(q: jax.Array, *last: jax.Array) -> jax.Array:
            slots = ranks.slot_mapping(
                *(positions[None], tables[None], starts),
                **{"block_size": block_size, "num_rows": 1, "num_blocks": 4},
            )[0]
            return ranks.by_device(
                of_own_heads, q, slots, *last, in_specs=specs, out_specs=TOKENS_BY_HEAD
            )

        return np.asarray(jax.jit(program, compiler_options=QUICK_COMPILE)(q, rows, query_starts))

    truth = _dense_attention(*(np.asarray(array, np.float32) for array in (q, *kv)), starts[:2])
    every, last = np.arange(num_tokens - 1), np.array([20, 33])
    for rows, query_starts, max_query_len in ((every, starts, None), (last, np.arange(3), 1)):
        merged = run(rows, query_starts, max_query_len)
        assert merged.dtype == dtype
        np.testing.assert_allclose(merged.astype(np.float32), truth[rows], atol=atol)


def _dense_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, starts: Sequence[int]
) -> np.ndarray:
    """Computes causal attention of prompts in float32, with one KV head and a scale of 0.5.

    Args:
        starts: The index of each prompt's first token.
    """
    found = []
    for token, row in enumerate(q):
        first = max(start for start in starts if start <= token)
        seen = slice(first, token + 1)
        scores = 0.5 * row @ k[seen, 0].T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        found.append(weights / weights.sum(axis=1, keepdims=True) @ v[seen, 0])
    return np.stack(found)


def check_context_ranks(name: str, num_devices: int, num_ranks: int, num_parts: int) -> None:
    """Tokens are those of one device, and each rank has its own positions of every block.

    Args:
        num_parts: Size of the KV cache of an engine with one device, divided by the size of the
            part that each of the devices has.
    """
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    block_size = 8 * num_ranks
    # 128 tokens, of the 243 of all requests. The first 55 of two prompts are the same, and one is
    # computed in two chunks.
    settings = dataclasses.replace(
        SETTINGS, block_size=block_size, num_blocks=1 + 128 // block_size, arrival_gap=1
    )
    prompts = [[7, 8, 9, 7], list(range(5, 75)), list(range(5, 60)), [3] * 18]

    def run(mesh: jax.sharding.Mesh | None, num_ranks: int) -> tuple[RecordingRunner, RunResult]:
        options = {"mesh": mesh, "num_context_ranks": num_ranks, "load_format": "dummy"}
        runner = RecordingRunner(folder, block_size // num_ranks, **options, **LIMITS)
        params = [dataclasses.replace(param, max_tokens=24) for param in PARAMS]
        return runner, run_engine(runner, prompts, settings, sampling_params=params)

    alone, one = run(None, 1)
    split, many = run(find_mesh(num_devices), num_ranks)
    assert many.token_ids == one.token_ids
    assert many.num_cached_tokens == one.num_cached_tokens
    assert sum(one.num_cached_tokens) > 0
    assert many.num_preemptions == one.num_preemptions > 0
    for logits in zip(one.logits, many.logits, strict=True):
        np.testing.assert_allclose(*logits, atol=1e-3)
    check_cache_in_place(split)
    block_bytes = [runner.runner.memory_plan.block_bytes for runner in (alone, split)]
    assert block_bytes[0] == num_parts * block_bytes[1]
    whole, *_ = _tokens_of_blocks(alone, block_size)
    for device_idx, part in enumerate(_tokens_of_blocks(split, block_size // num_ranks)):
        own = whole[..., device_idx % num_ranks :: num_ranks, :]
        if part.shape[2] < own.shape[2]:  # of all KV heads, the device has one
            head_idx = device_idx // (num_devices // own.shape[2])
            own = own[:, :, head_idx : head_idx + 1]
        assert np.count_nonzero(own) > 0
        np.testing.assert_allclose(part, own, atol=1e-4)


def _tokens_of_blocks(recording: RecordingRunner, block_size: int) -> list[np.ndarray]:
    """The pages of each device: [num_rows, num_blocks, num_kv_heads, block_size, width]."""
    runner = recording.runner
    (_, place), *_ = runner.worker.programs._model.places[0]
    shards = [np.asarray(shard.data) for shard in runner.worker.kv_cache.addressable_shards]
    return [np.asarray(place.format.view(shard, block_size)) for shard in shards]


def check_weights(num_devices: int) -> None:
    """Every device has its part of the weights that a single device has."""
    folder = write_serving_recipe(Path(tempfile.mkdtemp()), "qwen3", bias=True)
    alone = load_model(folder, dtype="float32")
    split = load_model(folder, dtype="float32", mesh=find_mesh(num_devices))
    for name, one, many in zip(alone.param_names, alone.params, split.params, strict=True):
        np.testing.assert_array_equal(one, many, err_msg=name)
        # Norms are whole, and so are keys and values: there are two heads of them.
        is_whole = "norm" in name or "k_proj" in name or "v_proj" in name or "o_proj.bias" in name
        num_parts = 1 if is_whole else num_devices
        sizes = {shard.data.size * num_parts for shard in many.addressable_shards}
        assert sizes == {one.size}, name
        assert len(many.addressable_shards) == num_devices


def check_state_collectives(num_devices: int) -> None:
    """A recurrent layer sums the squares of its norm, and the outputs of its last product."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(CONFIGS["mamba2"]))
    options = LIMITS | {"load_format": "dummy", "mesh": find_mesh(num_devices)}
    runner = RecordingRunner(folder, 16, **options).runner
    model = runner.worker.programs._model
    shape = next(shape for shape in runner._buckets.largest if isinstance(shape, StepShape))
    program = runner.worker.programs.compile(shape, runner.worker.kv_cache)
    found = {(operation, *dims) for _, operation, dims in _collectives(program.as_text())}
    assert {(operation, dims[-1]) for operation, *dims in found} == {
        ("all-reduce", model.config.hidden_size),
        ("all-reduce", 1),
    }


def check_kept_integers(quant_method: str, num_devices: int) -> None:
    """Devices share the integers of a quantized checkpoint, which stay what they are."""
    folder, _ = write_pair(Path(tempfile.mkdtemp()), quant_method, intermediate_size=128)
    options = {"dtype": "float32", "quantization": "checkpoint"}
    alone, split = (
        load_model(folder, mesh=mesh, **options) for mesh in (None, find_mesh(num_devices))
    )
    num_scaled = 0
    for name, one in alone.parameters.items():
        if isinstance(one, ScaledKernel):
            many = split.parameters[name]
            np.testing.assert_array_equal(dequantized(one), dequantized(many), err_msg=name)
            assert not many.numbers.is_fully_replicated, name
            num_scaled += 1
    assert num_scaled > 0


def check_expert_stacks(num_devices: int, **options: Any) -> None:
    """Devices share the experts of two layers, which are in one array for each projection."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(CONFIGS["qwen3_moe"]))
    alone, split = (
        load_model(folder, load_format="dummy", mesh=mesh, **options)
        for mesh in (None, find_mesh(num_devices))
    )
    names = [name for name in split.param_names if name.startswith("stacks.")]
    assert {place.num_layers for place in split.stack_places.values()} == {2}
    assert len(split.stack_places) == 2 * len(names) == 6
    for name in names:
        one, many = (model.parameters[name] for model in (alone, split))
        np.testing.assert_array_equal(one, many, err_msg=name)
        sizes = {shard.data.size * num_devices for shard in many.addressable_shards}
        assert sizes == {one.size}, name


def check_own_experts(num_devices: int) -> None:
    """A layer whose devices have whole experts computes what one device computes."""
    experts, rng = make_experts(use_bias=True), np.random.default_rng(0)
    in_stacks = [make_experts(use_bias=True, seed=seed) for seed in (1, 0)]
    put_in_stacks(in_stacks)
    x = jnp.asarray(rng.standard_normal((7, experts.gate_proj.kernel.shape[1])), jnp.float32)
    weights = jnp.asarray(rng.uniform(0.1, 1, (7, 2)), jnp.float32)
    context = plain_context(7)
    kernels = dataclasses.replace(
        KernelSettings.for_mesh(find_mesh(num_devices)), splits_experts=True
    )
    split = dataclasses.replace(context, kernels=kernels)

    def program(layer: Experts, context: LayerContext) -> Callable[..., jax.Array]:
        return jax.jit(
            lambda x, routing: layer(x, routing, context), compiler_options=QUICK_COMPILE
        )

    run_alone = program(experts, context)
    programs = [program(same, split) for same in (experts, choose_layer(in_stacks, jnp.int32(1)))]
    # Experts 2 and 3 are on the last two of four devices. In the second case, all choose them.
    for expert_ids in (rng.integers(0, 4, (7, 2)), [[2, 3]] * 7):
        routing = Routing(jnp.asarray(expert_ids, jnp.int32), weights)
        alone = run_alone(x, routing)
        for run in programs:
            np.testing.assert_allclose(run(x, routing), alone, rtol=1e-5, atol=1e-5)


def check_generator(num_devices: int) -> None:
    """`CompiledGenerator` draws the tokens of an engine, which are those of transformers."""
    folder = write_serving_recipe(Path(tempfile.mkdtemp()), "llama")
    golden = load_serving_golden("llama")
    prompts = [golden[3].prompt, golden[5].prompt]
    shape = GenerateShape(batch_size=2, max_prompt_len=64, max_new_tokens=12, max_stop_ids=2)
    model = load_model(folder, dtype="float32", mesh=find_mesh(num_devices))
    found = CompiledGenerator(model, shape).generate(prompts, GREEDY[:2])
    assert found == [golden[3].new_tokens, golden[5].new_tokens]


def check_drafter(method: str, num_devices: int) -> None:
    """Drafts are those of one device, and so are tokens; each device has a part of the drafter."""
    alone, split = (make_drafting_runner(method, mesh) for mesh in (None, find_mesh(num_devices)))
    assert run_with_drafts(split, method) == run_with_drafts(alone, method)
    kernels = [
        param for param in split.worker.head_params if not param.sharding.is_fully_replicated
    ]
    assert len(kernels) >= 5
    programs = split.worker.programs
    cache_bytes = split.worker.kv_cache.addressable_shards[0].data.nbytes
    for shape, program in programs._programs.items():
        if isinstance(shape, DraftShape):
            assert program.memory_analysis().alias_size_in_bytes >= cache_bytes
            # No weights are gathered: the most is a row of each token.
            num_tokens, hidden_size = shape.step.num_tokens, programs._model.config.hidden_size
            for _, operation, dims in _collectives(program.as_text()):
                assert math.prod(dims) <= num_tokens * hidden_size, (operation, dims)


def check_llm() -> None:
    """Grammars, log-probabilities, drafts and stored programs give what they give on one device."""
    prompts = ["What is a KV cache?", "Name three colors.", "abc abc abc abc"]
    greedy = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    params = [
        SamplingParams(logprobs=3, prompt_logprobs=2, **greedy),
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-f]{9}"), **greedy),
        SamplingParams(**greedy),
    ]
    settings = {
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 32,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    }
    programs = tempfile.mkdtemp()

    lines: list[str] = []
    logger = logging.getLogger("paxkv.runner.programs.warmup")
    logger.addFilter(lambda record: lines.append(record.getMessage()))
    logger.setLevel(logging.INFO)

    def run(num_devices: int) -> list[RequestOutput]:
        devices = {"tensor_parallel_size": num_devices, "compilation_cache_dir": programs}
        with LLM(**devices, **settings) as llm:
            return llm.generate(prompts, params, use_tqdm=False)

    alone = run(1)
    for split in (run(2), run(2)):
        for one, many in zip(alone, split, strict=True):
            assert many.outputs[0].token_ids == one.outputs[0].token_ids
        _check_logprobs(alone[0].outputs[0].logprobs, split[0].outputs[0].logprobs)
        _check_logprobs(alone[0].prompt_logprobs[1:], split[0].prompt_logprobs[1:])
    num_compiled = [int(re.search(r"(\d+) compiled", line)[1]) for line in lines]
    assert num_compiled[0] > 0 and num_compiled[1] > 0 and num_compiled[2] == 0, lines


def _check_logprobs(
    alone: Sequence[Mapping[int, Logprob]], split: Sequence[Mapping[int, Logprob]]
) -> None:
    for one, many in zip(alone, split, strict=True):
        assert list(one) == list(many)
        for token_id, logprob in one.items():
            assert abs(logprob.logprob - many[token_id].logprob) < 1e-4


OWN_EXPERTS = {"enable_expert_parallel": True}
CASES = {
    "quick": lambda: (
        check_weights(4),
        check_kept_integers("awq", 2),
        check_expert_stacks(4, **OWN_EXPERTS),
        check_own_experts(4),
        check_own_heads(LAYERS),
        check_merged_attention(4, 2, "float32", 1e-5),
        # All steps have one width here. `test_several_hosts.py` has steps of two widths.
        check_golden("gemma3_shallow", 4, max_num_batched_tokens=16),
    ),
    "llama": lambda: (
        check_golden("llama", 2),
        check_golden("llama", 4),
        check_same_as_alone("llama", 4),
        check_same_as_alone("odd_vocabulary", 4),
    ),
    "qwen3": lambda: (check_golden("qwen3", 2), check_golden("qwen3", 4), check_generator(4)),
    "windows": lambda: (check_golden("qwen2_window", 4), check_golden("gemma2", 2)),
    "sinks": lambda: (check_same_as_alone("gpt_oss", 2), check_same_as_alone("gpt_oss", 4)),
    "experts": lambda: (
        check_expert_stacks(2),
        check_same_as_alone("qwen3_moe", 2),
        check_same_as_alone("qwen3_moe", 4),
    ),
    "expert_parallel": lambda: (
        check_same_as_alone("qwen3_moe", 2, **OWN_EXPERTS),
        check_same_as_alone("gpt_oss", 4, **OWN_EXPERTS),
        check_same_as_alone(
            "qwen3_moe", 4, quantization="int8", quantization_group_size=32, **OWN_EXPERTS
        ),
        check_same_as_alone("zaya", 4, **OWN_EXPERTS),
    ),
    "llm": check_llm,
    "quantized": lambda: (
        check_same_as_alone("llama", 2, quantization="int4", quantization_group_size=32),
        check_same_as_alone("llama", 2, product_dtype="int8"),
        check_same_as_alone("qwen3_moe", 2, quantization="int8", quantization_group_size=32),
    ),
    "drafters": lambda: (
        check_drafter("eagle3", 2),
        check_drafter("draft_model", 2),
        check_drafter("mtp", 2),
        check_drafter("mtp", 4),
        check_state_drafter(),
    ),
    "latents": lambda: check_same_as_alone("deepseek_v3", 4),
    "context_parallel": lambda: (
        check_merged_attention(4, 2, "bfloat16", 2e-2),
        check_context_ranks("deepseek_v3", 2, 2, 2),
        check_context_ranks("deepseek_v3", 4, 4, 4),
        check_context_ranks("few_kv_heads", 4, 2, 4),
    ),
    "states": lambda: (
        check_same_as_alone("qwen3_next", 2),
        check_same_as_alone("qwen3_next", 4),
        check_same_as_alone("qwen4_exp", 4),
        check_same_as_alone("inkling", 2),
        check_same_as_alone("mamba2", 2),
        check_same_as_alone("mamba2", 4),
        check_same_as_alone("falcon_h1", 4),
        check_same_as_alone("kimi_linear", 4),
        check_same_as_alone("minimax", 4),
        check_own_heads(MORE_LAYERS),
        check_state_collectives(4),
        check_same_as_alone("lfm2", 2),
    ),
}


if __name__ == "__main__":
    with quick_engine_compilations():
        CASES[sys.argv[1]]()
    print("same")
