"""Checks that engines on several devices answer as engines on one device."""

import json
import logging
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models import load_model
from paxkv import LLM, StructuredOutputsParams
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.request_output import Logprob, RequestOutput
from paxkv.generate import CompiledGenerator
from paxkv.runner.memory.device_mesh import find_mesh
from paxkv.runner.programs.generation import GenerateShape
from paxkv.runner.shapes.program_shapes import DraftShape
from tests.end_to_end.engine_harness import RecordingRunner, RunResult, run_engine
from tests.end_to_end.golden_runs import GREEDY, check_against
from tests.end_to_end.split_collectives import check_cache_in_place, check_collectives, collectives
from tests.end_to_end.split_configs import CONFIGS, LIMITS, PARAMS, PROMPTS, SETTINGS, STATE_PROMPTS
from tests.end_to_end.split_drafters import make_drafting_runner, run_with_drafts
from tests.oracles.serving_golden import load_serving_golden, write_serving_recipe


def check_golden(recipe: str, num_devices: int) -> None:
    """Greedy tokens and logits are those of transformers."""
    folder = write_serving_recipe(Path(tempfile.mkdtemp()), recipe)
    runner = RecordingRunner(folder, 16, mesh=find_mesh(num_devices), **LIMITS)
    golden = load_serving_golden(recipe)
    result = run_engine(runner, [g.prompt for g in golden], SETTINGS, sampling_params=GREEDY)
    check_against(golden, result)
    if runner.can_hit:
        assert sum(result.num_cached_tokens) > 0
    check_collectives(runner)


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
            for _, operation, dims in collectives(program.as_text()):
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
