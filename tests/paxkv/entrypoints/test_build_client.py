"""A server of two processes: every way in which one of them can end."""

import contextlib
import dataclasses
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from paxkv.config.engine_config import EngineConfig
from paxkv.config.model_config import ModelConfig
from paxkv.config.parallel_config import ParallelConfig
from paxkv.config.sampling_defaults import GenerationConfig, SamplingDefaults
from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.config.server_config import ServerConfig
from paxkv.entrypoints import build_client
from paxkv.entrypoints.build_client import (
    load_text_parts,
    log_sampling_defaults,
    start_engines,
)
from paxkv.errors import ChatTemplateError, ConfigError
from paxkv.fleet.engine_supervisor import RestartPolicy
from tests.paxkv.client.test_async_client import collect, in_loop
from tests.paxkv.fake_build import save_tokenizer, started_fake
from tests.paxkv.fake_server import (
    FakeServer,
    fake_servers,
    only_child,
    running_fake_server,
    start_process,
)
from tests.paxkv.fleet.test_engine_process import wait_for_end

TIMEOUT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def servers():
    with fake_servers():
        yield


def wait_for_health(server: FakeServer, status: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while server.health() != status:
        assert time.monotonic() < deadline, f"/health never became {status}"
        time.sleep(0.05)


def wait_for_requests(server: FakeServer, num_requests: int) -> None:
    """Waits until this number of requests run in the engine."""
    wanted = f'vllm:num_requests_running{{engine="0",model_name="fake"}} {float(num_requests)}'
    deadline = time.monotonic() + TIMEOUT_S
    while wanted not in (text := httpx.get(f"{server.url}/metrics", timeout=TIMEOUT_S).text):
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


def wait_for_closed_port(server: FakeServer) -> None:
    """Waits until the port is closed, because then the drain has begun."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            server.health()
        except httpx.ConnectError:
            return
        except httpx.TransportError:
            pass  # it came in with the signal
        assert time.monotonic() < deadline


def wait_for_only_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + TIMEOUT_S
    # Until it runs its own command, the child is a copy of its parent, which waits for it.
    while not children.read_text() or command_of(only_child(pid)) == command_of(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return only_child(pid)


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_text_of_a_model_is_read_without_its_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    empty = load_text_parts(ModelConfig(), tmp_path)
    assert (empty.tokenizer, empty.chat_template) == (None, None)
    assert "no tokenizer.json" in caplog.text
    save_tokenizer(tmp_path, chat_template="{{ bos_token }}{{ messages[0].content }}")
    text = load_text_parts(ModelConfig(), tmp_path)
    assert text.chat_template.render([{"role": "user", "content": "a"}]) == "<s>a"
    assert text.tokenizer.encode("a", add_special_tokens=False) == [97]


def test_broken_chat_template_is_logged_once_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tokenizer(tmp_path, chat_template="{% for %}")
    text = load_text_parts(ModelConfig(), tmp_path)
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}: the model's chat template (")
    assert "cannot be compiled" in message
    for _ in range(2):
        with pytest.raises(ChatTemplateError):
            text.chat_template.render([{"role": "user", "content": "a"}])
    assert caplog.messages == [message]
    # The operator's template replaces it.
    caplog.clear()
    load_text_parts(ModelConfig(chat_template="{{ messages }}"), tmp_path)
    assert caplog.messages == []


@in_loop
async def test_unset_max_tokens_is_the_models_default() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            build_client, "start_engines", lambda *_, **__: started_fake(max_new_tokens=5)
        )
        client = build_client.build_async_client(EngineConfig(), ServerConfig())
    await client.start()
    (output,) = await collect(client, [97], SamplingParams(max_tokens=None), "r", stream=False)
    assert len(output.outputs[0].token_ids) == 5
    params = BeamSearchParams(beam_width=1, max_tokens=None)
    (output,) = [o async for o in client.beam_search([97], params, request_id="s")]
    assert len(output.outputs[0].token_ids) == 5
    await client.close(drain_timeout_s=0)


def test_request_that_never_fits_the_pool_gets_status_400() -> None:
    # 8 usable blocks hold 64 tokens, fewer than max_model_len.
    with running_fake_server(num_blocks=9) as server:
        refused = server.complete([97] * 50, 50)
        assert refused.status_code == 400
        assert "context length is 65 tokens" in refused.json()["error"]["message"]
        assert server.complete([97] * 50, 15).status_code == 200
        server.process.terminate()
        assert server.wait()[0] == 0


def test_killed_engine_gives_an_error_then_503_until_it_is_replaced() -> None:
    with running_fake_server(step_s=0.05) as server, ThreadPoolExecutor(8) as pool:
        assert server.complete([97, 98], 3).json()["usage"]["completion_tokens"] == 3
        answers = [pool.submit(server.complete, [97], 250) for _ in range(8)]
        wait_for_requests(server, 8)
        engine_pid = server.engine_pid
        os.kill(engine_pid, signal.SIGKILL)
        for answer in answers:
            response = answer.result()
            assert response.status_code == 503
            error = response.json()["error"]
            assert (error["code"], error["type"]) == ("engine_dead", "server_error")
            assert "SIGKILL" in error["message"]
        refused = server.complete([97], 1)
        # The restart may already be complete.
        assert refused.status_code == 200 or int(refused.headers["Retry-After"]) >= 1
        wait_for_health(server, 200)
        assert server.engine_pid != engine_pid
        assert server.complete([97, 98], 3).status_code == 200
        wait_for_requests(server, 0)
        server.process.terminate()
        assert server.wait()[0] == 0


def test_hanging_engine_gives_503_and_is_replaced() -> None:
    flags = ("--execute-model-timeout-s", "2")
    with running_fake_server(*flags, hangs_at_step=2) as server:
        engine_pid = server.engine_pid
        refused = server.complete([97], 9)
        assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1
        error = refused.json()["error"]
        assert error["code"] == "engine_dead" and "2 seconds" in error["message"]
        wait_for_health(server, 200)
        assert server.complete([97, 98], 2).status_code == 200
        assert server.engine_pid != engine_pid
        server.process.terminate()
        assert server.wait()[0] == 0


def test_health_fails_while_a_step_hangs_and_holds_during_a_long_prompt() -> None:
    flags = ("--max-step-seconds", "2", "--execute-model-timeout-s", "0")
    # A prompt of 240 tokens takes four steps of 0.6 s. The next request hangs.
    with (
        running_fake_server(*flags, step_s=0.6, hangs_at_step=5) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        began_s = time.monotonic()
        answer = pool.submit(server.complete, [97] * 240, 1)
        while not answer.done():
            assert server.health() == 200
            time.sleep(0.1)
        assert answer.result().status_code == 200
        assert time.monotonic() - began_s > 2.0
        pool.submit(server.complete, [97], 9)
        wait_for_health(server, 503)
        error = httpx.get(f"{server.url}/health", timeout=TIMEOUT_S).json()["error"]
        assert error["code"] == "engine_stalled"
        assert error["message"].startswith(
            "1 unfinished requests, and no step has completed for 2 seconds"
        )
        # The metrics and the list of models do not wait for the engine.
        assert httpx.get(f"{server.url}/metrics", timeout=TIMEOUT_S).status_code == 200
        assert httpx.get(f"{server.url}/v1/models", timeout=TIMEOUT_S).status_code == 200
        os.killpg(server.process.pid, signal.SIGKILL)


def test_health_fails_only_when_all_engines_hang() -> None:
    flags = ("--max-step-seconds", "1", "--data-parallel-size", "2")
    with running_fake_server(*flags, hangs_at_step=1) as server, ThreadPoolExecutor(2) as pool:
        pool.submit(server.complete, [97], 9)
        time.sleep(1.5)
        assert server.health() == 200
        pool.submit(server.complete, [97], 9)
        wait_for_health(server, 503)
        message = httpx.get(f"{server.url}/health", timeout=TIMEOUT_S).json()["error"]["message"]
        assert message.startswith("2 unfinished requests, and replica 0: no step has completed")
        assert "replica 1: no step has completed" in message
        os.killpg(server.process.pid, signal.SIGKILL)


def test_server_ends_with_its_engine_if_restarts_are_disabled() -> None:
    with running_fake_server("--max-engine-restarts", "0", fails_at_step=2) as server:
        assert server.complete([97], 9).status_code == 503
        code, said = server.wait()
        assert code == 1
        last_line = said.splitlines()[-1]
        assert (
            last_line == "paxkv: error: the engine has ended: RuntimeError: the device is on fire"
        )


def test_server_ends_if_its_engine_cannot_be_restarted(tmp_path: Path) -> None:
    flags = ("--max-engine-restarts", "1")
    with running_fake_server(*flags, healthy_file=str(tmp_path / "f")) as server:
        os.kill(server.engine_pid, signal.SIGKILL)
        code, said = server.wait()
        assert code == 1
        assert said.splitlines()[-1].endswith(
            "it could not be started again: the second start fails"
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_all_processes_drains_requests(number: signal.Signals, tmp_path: Path) -> None:
    slow_file = tmp_path / "slow"
    slow_file.touch()
    settings = {"step_s": 0.1, "slow_file": str(slow_file)}
    with running_fake_server(**settings) as server, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(server.complete, [97], 120) for _ in range(4)]
        wait_for_requests(server, 4)
        engine_pid = server.engine_pid
        os.killpg(server.process.pid, number)
        wait_for_closed_port(server)
        slow_file.unlink()
        assert server.wait()[0] == 0
        for answer in answers:
            assert answer.result().json()["usage"]["completion_tokens"] == 120
        wait_for_end(engine_pid)


def test_drain_timeout_ends_requests_and_a_second_signal_ends_immediately() -> None:
    flags = ("--shutdown-timeout-s", "0.2")
    with running_fake_server(*flags, step_s=0.05) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, [97], 250)
        wait_for_requests(server, 1)
        server.process.terminate()
        assert server.wait()[0] == 0
        assert answer.result().status_code == 503
    with running_fake_server(step_s=0.4) as server, ThreadPoolExecutor(1) as pool:
        # This request takes 100 s.
        answer = pool.submit(server.complete, [97], 250)
        wait_for_requests(server, 1)
        engine_pid = server.engine_pid
        server.process.send_signal(signal.SIGINT)
        # Otherwise, both signals might arrive as one.
        wait_for_closed_port(server)
        start = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.wait()[0] == 0
        assert time.monotonic() - start < 60
        wait_for_end(engine_pid)
        with pytest.raises(httpx.HTTPError):
            answer.result()


def test_engine_ends_when_its_server_is_killed() -> None:
    with running_fake_server(step_s=0.05) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.complete, [97], 250)
        wait_for_requests(server, 1)
        engine_pid = server.engine_pid
        server.process.kill()
        wait_for_end(engine_pid)


def test_both_processes_killed_together_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running_fake_server() as server:
        engine_pid = server.engine_pid
        os.killpg(server.process.pid, signal.SIGKILL)
        wait_for_end(engine_pid)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"mistake": "no such\nmodel"}, "paxkv: error: no such model\n"),
        (
            {"exit_code": 3},
            "paxkv: error: the engine ended before it was ready: it exited with code 3; its log "
            "says more.\n",
        ),
    ],
)
def test_failed_start_prints_one_line_with_exit_code_1(
    settings: dict[str, object], error: str
) -> None:
    with start_process(**settings) as process:
        out, said = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, out, said) == (1, "", error)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_interrupted_start_leaves_no_engine_and_no_file(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with start_process(start_s=3600) as process:
        engine_pid = wait_for_only_child(process.pid)
        os.killpg(process.pid, number)
        _, said = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == code
        assert "Traceback" not in said
        wait_for_end(engine_pid)
        assert list(tmp_path.iterdir()) == []


def test_sigterm_during_the_start_ends_the_engine_before_the_server() -> None:
    with start_process(start_s=3600) as process:
        engine_pid = wait_for_only_child(process.pid)
        # The stopped engine cannot notice that the server has ended.
        os.kill(engine_pid, signal.SIGSTOP)
        try:
            process.terminate()
            assert process.wait(TIMEOUT_S) == -signal.SIGTERM
            wait_for_end(engine_pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine_pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("environment", "wanted"), [({"NPROC": "1"}, (65, 256)), ({"CUDA_VISIBLE_DEVICES": "0"}, None)]
)
def test_engines_on_one_cpu_have_the_size_of_the_first(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], wanted: tuple[int, int] | None
) -> None:
    """On a CPU, the first engine takes its share of the free memory; each GPU has its own."""
    started = []
    fake = started_fake()
    stats = msgspec.structs.replace(fake.ready.stats, num_blocks=65)
    ready = dataclasses.replace(fake.ready, stats=stats)

    class Supervisor:
        def __init__(self, config: EngineConfig, policy: RestartPolicy, **_: object) -> None:
            started.append((config.cache.num_gpu_blocks_override, config.model.max_model_len))

        def wait_until_ready(self, on_model_found: object) -> object:
            if len(started) == 1:
                on_model_found(Path("nowhere"))
            return ready

    monkeypatch.setattr(build_client, "EngineSupervisor", Supervisor)
    monkeypatch.setattr(build_client, "load_text_parts", lambda *_: fake.text)
    monkeypatch.setattr(build_client, "replica_environments", lambda num, _: [environment] * num)
    config = EngineConfig(parallel=ParallelConfig(data_parallel_size=3))
    start_engines(config, RestartPolicy(max_restarts=0, window_s=1.0))
    later = wanted or (None, None)
    assert started == [(None, None), later, later]


def test_sampling_defaults_that_change_answers_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    generation_config = GenerationConfig(top_k=1, top_p=1.0, max_new_tokens=12)
    model_info = dataclasses.replace(
        started_fake().ready.model_info,
        sampling_defaults=SamplingDefaults(generation_config=generation_config),
    )
    with caplog.at_level("INFO"):
        log_sampling_defaults(model_info)
    assert "are top_k=1, max_new_tokens=12, from the model's" in caplog.text


def test_only_host_0_has_a_client() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, nnodes=2, node_rank=1)
    policy = RestartPolicy(max_restarts=0, window_s=1.0)
    with pytest.raises(ConfigError, match="node_rank is 1, but only host 0 has a client"):
        start_engines(EngineConfig(parallel=parallel), policy)
