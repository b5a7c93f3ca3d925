"""A whole engine over a tiny checkpoint: checked after every step, and what it held and copied."""

import contextlib
import dataclasses
import os
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from models import load_model
from paxkv.client.async_client import AsyncEngineClient
from paxkv.client.input_processor import InputProcessor
from paxkv.client.output_processor import OutputProcessor
from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts import wire
from paxkv.contracts.engine_output import EngineDead, EngineOutput, StepOutputs
from paxkv.contracts.engine_request import AddRequest, EngineInput
from paxkv.contracts.engine_start import ModelInfo
from paxkv.contracts.executor import StepHandle
from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.contracts.wire import EngineTransport
from paxkv.engine.core_thread import CoreThread
from paxkv.engine.engine_core import EngineCore
from paxkv.entrypoints.build import BuiltEngine
from paxkv.llm import LLM
from paxkv.runner import model_runner
from paxkv.runner.model_runner import ModelRunner
from paxkv.runner.shapes import step_buckets
from paxkv.scheduler.async_scheduler import AsyncScheduler
from paxkv.scheduler.scheduler import Scheduler
from tests.paxkv.runner.shared_runners import SharedPrograms

MAX_MODEL_LEN = 128
MAX_NUM_SEQS = 8
# Also the largest step that compiles: one program for a single token, and one for all others.
MAX_NUM_BATCHED_TOKENS = 8
VOCAB_SIZE = 160
BLOCK_SIZE = 8
# Blocks in the device arrays; a test's scheduler may be given fewer.
MAX_NUM_BLOCKS = 160


def make_runner(
    checkpoint: Path,
    *,
    is_warm: bool = False,
    has_prompt_logprobs: bool = True,
    **cache_settings: str,
) -> ModelRunner:
    """A runner that engines of one test file share, one after another: each step compiles once.

    There is one program of bursts, for `MAX_NUM_SEQS` requests.

    Args:
        is_warm: The runner has all of its programs. It loads them from the test run's folder, or
            compiles and stores them there. Set it for a runner that several workers make.
        has_prompt_logprobs: False saves a warm runner one program of steps.
    """
    model = load_model(checkpoint, dtype="float32", load_format="auto", seed=0)
    # `tests/conftest.py` sets the variable, and workers of pytest-xdist inherit it.
    folder = Path(os.environ["JAX_COMPILATION_CACHE_DIR"], "checked-engines")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.ExitStack() as locks, pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_buckets, "decode_buckets", lambda max_num_seqs: (max_num_seqs,))
        if not has_prompt_logprobs:
            patch.setattr(model_runner, "make_features", lambda config, model: ())
        runner = ModelRunner(
            model,
            cache_config=CacheConfig(
                block_size=BLOCK_SIZE, num_gpu_blocks_override=MAX_NUM_BLOCKS, **cache_settings
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS
            ),
            max_model_len=MAX_MODEL_LEN,
            seed=0,
            program_store=SharedPrograms(folder, locks) if is_warm else None,
        )
        if is_warm:
            runner.warm_up()
    return runner


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What a test varies.

    Args:
        is_ahead: Steps are decided while others run, and decodes come in bursts.
        is_sharing: False takes the forks out of all requests: each computes all its tokens.
    """

    enable_prefix_caching: bool = False
    num_blocks: int = MAX_NUM_BLOCKS
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    is_sharing: bool = True
    is_ahead: bool = False


class ObservedRunner:
    """An `Executor` that counts what passes it.

    Args:
        scheduler: Whose blocks are counted as each step begins, when it holds the most.
    """

    num_padded_tokens = 0
    num_corrupted_requests = 0
    num_compiles_after_ready = 0

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self.kv_cache_config: KVCacheConfig = runner.kv_cache_config
        self.most_held_blocks = 0
        self.num_block_copies = 0
        self.num_computed_tokens = 0

    def feature_stats(self, *, only_new: bool) -> dict[str, object]:
        return self._runner.feature_stats(only_new=only_new)

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepHandle:
        self.most_held_blocks = max(self.most_held_blocks, num_held_blocks(self._scheduler))
        self.num_block_copies += len(scheduler_output.block_copies)
        self.num_computed_tokens += scheduler_output.total_num_scheduled_tokens
        return self._runner.execute_model(scheduler_output)

    def close(self) -> None:
        """Keeps the runner, which other engines use too."""


class CheckedCore(EngineCore):
    """An engine core that checks all invariants after each step."""

    def __init__(self, runner: ModelRunner, settings: EngineSettings) -> None:
        kv_cache_config = dataclasses.replace(
            runner.kv_cache_config, num_blocks=settings.num_blocks
        )
        self.scheduler = (AsyncScheduler if settings.is_ahead else Scheduler)(
            scheduler_config=SchedulerConfig(
                max_num_seqs=min(MAX_NUM_SEQS, settings.max_num_batched_tokens),
                max_num_batched_tokens=settings.max_num_batched_tokens,
            ),
            cache_config=CacheConfig(
                block_size=BLOCK_SIZE, enable_prefix_caching=settings.enable_prefix_caching
            ),
            kv_cache_config=kv_cache_config,
            max_model_len=MAX_MODEL_LEN,
        )
        self.observed = ObservedRunner(runner, self.scheduler)
        super().__init__(
            self.scheduler,
            self.observed,
            max_steps_in_flight=2 if settings.is_ahead else 1,
            max_decode_burst=4 if settings.is_ahead else 1,
        )
        self._is_sharing = settings.is_sharing

    def handle(self, message: EngineInput) -> EngineOutput | None:
        if isinstance(message, AddRequest) and not self._is_sharing:
            message = AddRequest(request=dataclasses.replace(message.request, fork_from=None))
        reply = super().handle(message)
        self.scheduler.check_invariants()
        return reply

    def step(self) -> StepOutputs:
        outputs = super().step()
        self.scheduler.check_invariants()
        return outputs

    @property
    def num_held_blocks(self) -> int:
        return num_held_blocks(self.scheduler)

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.make_stats().num_preemptions


def num_held_blocks(scheduler: Scheduler) -> int:
    stats = scheduler.make_stats()
    return stats.num_blocks - 1 - stats.num_free_blocks


class InlineTransport:
    """An `EngineTransport` whose engine computes one step whenever its client waits."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._replies: deque[EngineOutput] = deque()

    def send(self, message: EngineInput) -> None:
        reply = self._core.handle(wire.decode_input(wire.encode(message)))
        if reply is not None:
            self._replies.append(reply)

    def receive(self, timeout_s: float | None = None) -> EngineOutput:
        if self._replies:
            return self._replies.popleft()
        assert self._core.has_work, "the client waits for what will never come"
        return wire.decode_output(wire.encode(self._core.step()))

    def close(self) -> None:
        while self._core.has_work:
            self._core.step()
        self._replies.append(EngineDead(reason="closed"))


def built_engine(transport: EngineTransport, eos_token_ids: tuple[int, ...]) -> BuiltEngine:
    """What `paxkv.entrypoints.build` makes of a transport, without text."""
    return BuiltEngine(
        transport=transport,
        input_processor=InputProcessor(
            tokenizer=None,
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_fitting_tokens=10**6,
            eos_token_ids=eos_token_ids,
        ),
        tokenizer=None,
        chat_template=None,
        model_info=ModelInfo(
            served_model_name="tiny",
            model="tiny",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            max_fitting_tokens=10**6,
            created=0,
            max_num_seqs=8,
            cache_settings={"block_size": "16"},
        ),
    )


def make_llm(
    monkeypatch: pytest.MonkeyPatch,
    core: CheckedCore,
    eos_token_ids: tuple[int, ...] = (),
) -> LLM:
    """The offline door to a checked engine that steps in its caller's thread."""
    engine = built_engine(InlineTransport(core), eos_token_ids)
    monkeypatch.setattr("paxkv.llm.build_engine", lambda config, show_progress: engine)
    return LLM("tiny")


def completions_alone(
    runner: ModelRunner, prompt: list[int], params: SamplingParams
) -> list[list[int]]:
    """Tokens of the `n` completions, each of a request of its own in an engine of its own."""
    completions = []
    for index in range(params.n):
        with pytest.MonkeyPatch.context() as patch:
            llm = make_llm(patch, CheckedCore(runner, EngineSettings()))
            single = dataclasses.replace(params, n=1, seed=params.seed + index)
            (output,) = llm.generate(prompt, single, use_tqdm=False)
            llm.close()
        completions.append(output.outputs[0].token_ids)
    return completions


@asynccontextmanager
async def running_client(core: CheckedCore) -> AsyncIterator[AsyncEngineClient]:
    """The server's door to a checked engine in a thread of its own."""
    engine = built_engine(CoreThread(core), ())
    client = AsyncEngineClient(
        engine.transport, engine.input_processor, OutputProcessor(None), engine.model_info
    )
    await client.start()
    try:
        yield client
    finally:
        await client.close(drain_timeout_s=0)
