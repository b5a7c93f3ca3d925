"""A real HTTP server and engine core with a fake device, for traffic without a model."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

from paxkv.client.async_client import AsyncEngineClient
from paxkv.client.input_processor import InputProcessor
from paxkv.client.output_processor import OutputProcessor
from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.config.server_config import ServerConfig
from paxkv.contracts.engine_start import ModelInfo
from paxkv.contracts.executor import StepHandle
from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paxkv.engine.core_thread import CoreThread
from paxkv.engine.engine_core import EngineCore
from paxkv.scheduler.async_scheduler import AsyncScheduler
from paxkv.server.app import create_app
from paxkv.server.http_server import HttpServer, bind_socket, socket_url
from tests.paxkv.engine.fake_engine import FakeExecutor
from tests.paxkv.scheduler.stepping import window
from tests.paxkv.server.fake_engine import MODEL_NAME, VOCAB_SIZE, FakeTokenizer

MAX_MODEL_LEN = 2048
BLOCK_SIZE = 4
FULL = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="float32")


class SlowDevice(FakeExecutor):
    """An executor whose steps take time while the host waits for their tokens."""

    def __init__(self, kv_cache_config: KVCacheConfig, step_s: float) -> None:
        super().__init__(kv_cache_config, fails_at_step=None)
        self._device_s = step_s

    def execute_model(self, scheduler_output: SchedulerOutput) -> "SlowStep":
        return SlowStep(super().execute_model(scheduler_output), self._device_s)


class SlowStep:
    def __init__(self, step: StepHandle, device_s: float) -> None:
        self._step = step
        self._device_s = device_s

    @property
    def is_done(self) -> bool:
        return False

    def sample_tokens(self) -> ModelRunnerOutput:
        time.sleep(self._device_s)
        return self._step.sample_tokens()


def make_client(
    *,
    num_blocks: int,
    step_s: float,
    max_num_seqs: int,
    with_window: bool = False,
    max_num_batched_tokens: int = 512,
) -> AsyncEngineClient:
    specs = (FULL, window(32)) if with_window else (FULL,)
    kv_cache_config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_groups=tuple(
            KVCacheGroupSpec(layer_names=(f"layers.{i}",), kv_cache_spec=spec)
            for i, spec in enumerate(specs)
        ),
    )
    scheduler = AsyncScheduler(
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        ),
        cache_config=CacheConfig(),
        kv_cache_config=kv_cache_config,
        max_model_len=MAX_MODEL_LEN,
    )
    executor = SlowDevice(kv_cache_config, step_s)
    core = EngineCore(scheduler, executor, max_steps_in_flight=2)
    return AsyncEngineClient(
        CoreThread(core),
        InputProcessor(
            tokenizer=None,
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_fitting_tokens=scheduler.limits.max_tokens_that_fit,
            max_prompt_tokens=scheduler.limits.max_prompt_tokens,
            eos_token_ids=(),
        ),
        OutputProcessor(None),
        ModelInfo(
            served_model_name=MODEL_NAME,
            model="/models/fake",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            max_fitting_tokens=scheduler.limits.max_tokens_that_fit,
            created=1_700_000_000,
            max_num_seqs=8,
            cache_settings={},
        ),
        # Its tokens are bytes, and so are the prompts.
        tokenizer=FakeTokenizer(),
    )


class Traffic:
    """Requests from a few families of prompts, so that prefixes are shared and pools run full."""

    def __init__(self, client: AsyncEngineClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._num_requests = 0
        self._num_done = 0
        self.failures: list[BaseException] = []

    @property
    def is_over(self) -> bool:
        """Whether every sent request has ended."""
        return self._num_done == self._num_requests

    def send(self, prompt: str, max_tokens: int) -> None:
        """Sends a request without waiting for its output."""
        self._num_requests += 1
        name = f"cmpl-{self._num_requests:04d}"
        coroutine = self._run(name, prompt, max_tokens)
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _run(self, name: str, prompt: str, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        try:
            async for _ in self._client.generate(
                list(prompt.encode()), params, request_id=name, stream=False
            ):
                pass
        except Exception as error:
            self.failures.append(error)
        finally:
            self._num_done += 1


@contextlib.contextmanager
def run_server(
    engine: object, config: ServerConfig, *, starts: bool
) -> Iterator[tuple[str, asyncio.AbstractEventLoop]]:
    """The server's address and its loop; with `starts` the engine is started and closed on it."""
    is_ready = threading.Event()
    bound = bind_socket(config)
    found: list[asyncio.AbstractEventLoop] = []
    app = create_app(engine, config)
    server = HttpServer(app, engine, config, on_ready=is_ready.set)

    async def serve() -> None:
        found.append(asyncio.get_running_loop())
        if starts:
            await engine.start()
        try:
            await server.serve(sockets=[bound])
        finally:
            await engine.close(drain_timeout_s=0.0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert is_ready.wait(60)
        yield socket_url(bound), found[0]
    finally:
        start_s = time.monotonic()
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
        # An open page must not hold up the drain, which may take half a minute.
        assert time.monotonic() - start_s < 25
