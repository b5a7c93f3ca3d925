"""Arguments of vLLM's LLM are accepted if they are neutral; others are ignored or rejected."""

import warnings

import pytest

from paxkv.entrypoints.llm_arguments import drop_vllm_arguments, json_text
from paxkv.errors import ConfigError

# Arguments that scripts pass, with vLLM's default values.
NEUTRAL = {
    "runner": "auto",
    "convert": "auto",
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "trust_remote_code": False,
    "allowed_local_media_path": "",
    "allowed_media_domains": None,
    "pipeline_parallel_size": 1,
    "quantization_config": None,
    "swap_space": 4,
    "cpu_offload_gb": 0,
    "enforce_eager": False,
    "enable_return_routed_experts": False,
    "disable_custom_all_reduce": False,
    "hf_overrides": None,
    "mm_processor_kwargs": None,
    "pooler_config": None,
    "structured_outputs_config": None,
    "profiler_config": None,
    "attention_config": None,
    "kv_cache_memory_bytes": None,
    "compilation_config": None,
    "logits_processors": None,
    "disable_log_stats": True,
    "enable_lora": False,
    "task": "auto",
    "language_model_only": True,
    "stream_interval": 1,
    "reasoning_parser": "",
}


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_neutral_arguments_are_accepted_without_a_warning():
    assert drop_vllm_arguments(NEUTRAL) == {}


def test_ignored_arguments_give_one_warning_with_their_reasons():
    given = {"enforce_eager": True, "trust_remote_code": True, "attention_backend": "FLASH_ATTN"}
    with pytest.warns(UserWarning, match=r"LLM\(\) ignores enforce_eager \(.*XLA") as warned:
        assert drop_vllm_arguments({**given, "block_size": 32}) == {"block_size": 32}
    (warning,) = warned
    assert "attention_backend (use kernels instead)" in str(warning.message)


@pytest.mark.parametrize(
    ("argument", "value", "reason"),
    [
        ("pipeline_parallel_size", 2, "a part of every layer.* Pass 1, or leave it out"),
        ("quantization_config", {"bits": 8}, "quantized weights"),
        ("reasoning_parser", "qwen3", "as one text. Pass '', or leave it out"),
        ("enable_lora", True, "LoRA.* Pass False"),
        ("spec_method", "ngram", "use speculative_config"),
        ("hf_overrides", {"rope_theta": 1.0}, "follows the checkpoint"),
        ("structured_outputs_config", {"backend": "xgrammar"}, "StructuredOutputsParams"),
        ("kv_cache_memory_bytes", 1, "use num_gpu_blocks_override"),
    ],
)
def test_other_arguments_are_rejected_with_the_reason(argument, value, reason):
    with pytest.raises(ConfigError, match=rf"LLM\(\) does not support {argument}=.*{reason}"):
        drop_vllm_arguments({argument: value})


def test_names_unknown_to_vllm_are_returned():
    assert drop_vllm_arguments({"no_such": 1}) == {"no_such": 1}


def test_objects_become_json_text():
    assert json_text({"endpoint": "tcp://127.0.0.1:1"}) == '{"endpoint": "tcp://127.0.0.1:1"}'
    assert json_text(7) == 7
