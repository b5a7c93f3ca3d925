"""The documented memory of states: slots of published models, compared with vLLM's rule.

vLLM 0.16 gives a state one page. It makes the blocks of attention so long that their pages hold the
state, in steps of 16 tokens, and pads the state to the page. With prefix caching (the cache mode
`align`), a request holds two pages per group of states, otherwise one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from models.decoder_spec import DecoderSpec
from models.registry import read_config
from paxkv.config.cache_config import CacheConfig
from paxkv.contracts.kv_cache_spec import AttentionSpec, MambaSpec, cdiv
from paxkv.runner.memory.kv_cache_groups import groups_of_spec
from paxkv.runner.memory.memory_plan import MemoryPlan, plan_memory

PAGE = Path(__file__).parents[2] / "docs/design/kv-cache.md"
BLOCK_SIZE, NUM_TOKENS = 16, 1000

# Fields of published config.json files.
_QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 2_048,
    "intermediate_size": 5_120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "max_position_embeddings": 262_144,
}
_NEMOTRON_H_8B = {
    "architectures": ["NemotronHForCausalLM"],
    "vocab_size": 131_072,
    "hidden_size": 4_096,
    "intermediate_size": 21_504,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 128,
    "mlp_hidden_act": "relu2",
    "max_position_embeddings": 8_192,
}
_BAMBA_9B = {
    "architectures": ["BambaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "attn_layer_indices": [9, 18, 27],
    "attn_rotary_emb": 64,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "max_position_embeddings": 262_144,
}
MODELS: Mapping[str, Mapping[str, object]] = {
    "Qwen3-Next-80B": _QWEN3_NEXT_80B,
    "Nemotron-H-8B": _NEMOTRON_H_8B,
    "Bamba-9B": _BAMBA_9B,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a running request in one of the engines."""

    attention_tokens: int  # in a block of attention
    num_groups: int  # of states
    blocks_per_group: int
    state_bytes: int
    cached_state_bytes: int  # with a prefix cache
    padding: float  # share of state_bytes
    request_bytes: int  # of a request of NUM_TOKENS tokens with a prefix cache


def spec_of(model: str, dtype: str) -> DecoderSpec:
    spec = read_config(MODELS[model]).spec("bfloat16")
    return spec.with_state_dtypes(window=dtype, state=dtype)


def plan_of(spec: DecoderSpec, num_devices: int = 1) -> MemoryPlan:
    return plan_memory(
        groups_of_spec(spec, block_size=BLOCK_SIZE),
        CacheConfig(num_gpu_blocks_override=10_000),
        max_model_len=8_192,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        memory=None,
        num_devices=num_devices,
    )


def memory_of_paxkv(spec: DecoderSpec) -> Memory:
    plan = plan_of(spec)
    states, attention = (group.kv_cache_spec for group in plan.kv_cache_config.kv_cache_groups)
    assert isinstance(states, MambaSpec)
    assert isinstance(attention, AttentionSpec)
    return Memory(
        attention_tokens=attention.block_size,
        num_groups=states.num_parts,
        blocks_per_group=states.blocks_per_state,
        state_bytes=plan.slot_bytes,
        cached_state_bytes=plan.slot_bytes,
        padding=1 - content_bytes(spec) / plan.slot_bytes,
        request_bytes=plan.num_blocks_of_req(NUM_TOKENS) * plan.block_bytes,
    )


def memory_of_vllm(spec: DecoderSpec) -> Memory:
    formats = list(spec.own_formats.values())
    (state_bytes,) = {cache.content_bytes(1) for cache in formats if cache.kind == "state"}
    (token_bytes,) = {cache.content_bytes(1) for cache in formats if cache.kind != "state"}
    num_states = sum(cache.kind == "state" for cache in formats)
    num_rows = len(formats) - num_states
    num_groups = cdiv(num_states, num_rows)
    attention_tokens = 16 * cdiv(state_bytes, 16 * token_bytes)
    block_bytes = num_rows * attention_tokens * token_bytes
    num_attention_blocks = cdiv(NUM_TOKENS, attention_tokens)
    return Memory(
        attention_tokens=attention_tokens,
        num_groups=num_groups,
        blocks_per_group=1,
        state_bytes=num_groups * block_bytes,
        cached_state_bytes=2 * num_groups * block_bytes,
        padding=1 - content_bytes(spec) / (num_groups * block_bytes),
        request_bytes=(2 * num_groups + num_attention_blocks) * block_bytes,
    )


def content_bytes(spec: DecoderSpec) -> int:
    """Bytes of the states of all layers, without padding."""
    formats = spec.own_formats.values()
    return sum(cache.content_bytes(1) for cache in formats if cache.kind == "state")


def row_of(model: str, dtype: str, engine: str, memory: Memory) -> str:
    cells = [
        *(model, dtype, engine, f"{memory.attention_tokens:,}"),
        f"{memory.num_groups} × {memory.blocks_per_group}",
        _mib(memory.state_bytes),
        f"{100 * memory.padding:.1f} %",
        _mib(memory.cached_state_bytes),
        _mib(memory.request_bytes),
    ]
    return f"| {' | '.join(cells)} |"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_documented_memory_of_states_is_that_of_the_plan(model: str, dtype: str) -> None:
    spec = spec_of(model, dtype)
    ours, theirs = memory_of_paxkv(spec), memory_of_vllm(spec)
    rows = [row_of(model, dtype, "paxkv", ours), row_of(model, dtype, "vLLM", theirs)]
    assert "\n".join(rows) in PAGE.read_text(encoding="utf-8")
    assert ours.request_bytes < theirs.request_bytes


def test_a_state_takes_the_pages_that_it_needs() -> None:
    """By hand: 32 heads of 128 x 128 numbers, and 3 inputs of a convolution of 8,192 channels."""
    page_bytes = BLOCK_SIZE * 2 * 256 * 2 * 2  # tokens, heads, width, keys and values, bytes
    num_pages = math.ceil(32 * 128 * 128 * 4 / page_bytes) + math.ceil(3 * 8192 * 4 / page_bytes)
    ours = memory_of_paxkv(spec_of("Qwen3-Next-80B", "float32"))
    assert (ours.num_groups, ours.blocks_per_group) == (3, num_pages)
    assert ours.state_bytes == 36 * num_pages * page_bytes


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_a_device_has_its_part_of_the_states_of_a_request(model, num_devices):
    spec = spec_of(model, "float32")
    own = spec.on_each_of(num_devices)
    # Each device has the channels of the one group of Bamba, 0.1 % of its states.
    copies = 0.001 * num_devices if model == "Bamba-9B" else 0
    copied = content_bytes(own) * num_devices / content_bytes(spec) - 1
    assert 0 <= copied <= copies
    alone, split = plan_of(spec).slot_bytes, plan_of(own).slot_bytes
    assert split == pytest.approx(alone / num_devices, rel=0.02)


def test_the_report_names_states_that_are_not_split():
    spec = spec_of("Qwen3-Next-80B", "float32")  # with 32 value heads
    reports = {n: plan_of(spec.on_each_of(n), n).report() for n in (1, 4, 64)}
    assert "of states per running request, 36 of 36 states not split," in reports[64]
    assert "not split" not in reports[1] + reports[4]
