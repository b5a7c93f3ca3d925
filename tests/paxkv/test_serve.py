"""The command line: one flag per setting, one line per mistake, a banner when ready."""

import argparse
import asyncio
import dataclasses
import logging
import re
import socket

import pytest

from paxkv import asgi, serve
from paxkv.config.cache_config import CacheConfig
from paxkv.config.model_config import ModelConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_defaults import GenerationConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.config.server_config import ServerConfig
from paxkv.contracts.engine_output import SchedulerStats
from paxkv.errors import ConfigError, EngineDeadError
from tests.paxkv.server.fake_engine import FakeEngine

CONFIG_CLASSES = (ModelConfig, CacheConfig, SchedulerConfig, RunnerConfig, ServerConfig)


def _config(config_class, *arguments):
    return serve.config_from_arguments(config_class, serve.make_parser().parse_args(arguments))


def test_no_flag_means_the_defaults():
    for config_class in CONFIG_CLASSES:
        assert _config(config_class) == config_class()


# Of an encoder, which no model has yet.
HIDDEN_FLAGS = ("--max-num-encoder-input-tokens", "--encoder-cache-size")


def test_every_field_has_a_flag_with_its_help_except_the_hidden_ones():
    text = re.sub(r"\s+", " ", serve.make_parser().format_help())
    for config_class in CONFIG_CLASSES:
        for field in dataclasses.fields(config_class):
            flag = f"--{field.name.replace('_', '-')}"
            if flag in HIDDEN_FLAGS:
                assert flag not in text
                continue
            assert flag in text
            # Line breaks of the help may cut words at hyphens, so only the start is compared.
            assert field.metadata["help"][:15] in text


def test_flags_set_fields_of_every_type():
    assert _config(ModelConfig, "--model", "a/b", "--dtype", "bfloat16").dtype == "bfloat16"
    assert _config(ModelConfig, "--max-model-len", "128").max_model_len == 128
    assert _config(CacheConfig, "--gpu-memory-utilization", "0.5").gpu_memory_utilization == 0.5
    assert not _config(CacheConfig, "--no-enable-prefix-caching").enable_prefix_caching
    assert _config(CacheConfig, "--enable-prefix-caching").enable_prefix_caching
    assert _config(SchedulerConfig, "--policy", "priority").policy == "priority"
    assert _config(SchedulerConfig, HIDDEN_FLAGS[0], "9").max_num_encoder_input_tokens == 9
    assert _config(SchedulerConfig, HIDDEN_FLAGS[1], "9").encoder_cache_size == 9
    assert _config(ServerConfig, "--port", "0", "--host", "::1").host == "::1"
    assert _config(ModelConfig, "--generation-config", "vllm").generation_config == "vllm"
    config = _config(ModelConfig, "--override-generation-config", '{"top_k": 5, "min_p": null}')
    assert config.override_generation_config == GenerationConfig(top_k=5, min_p=0.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-num-seqs", "many"],
        ["--dtype", "int3"],
        ["--max-num", "3"],
        ["--nothing"],
        ["--override-generation-config", '{"top_q": 1}'],
        ["--override-generation-config", '{"top_p": "wide"}'],
        ["--override-generation-config", "top_p"],
        ["x", "y"],
    ],
)
def test_malformed_flag_is_a_usage_error(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        serve.main(arguments)
    assert raised.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("paxkv serve: error: ")
    # What is wrong is not hidden under the usage, which is longer than a screen.
    assert lines[1:] == ["paxkv serve --help lists all flags."]


def _fail_with(error):
    def build(*_, **__):
        raise error

    return build


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["--port", "70000"], None, "port must be in"),
        (["--block-size", "7"], None, "block_size must be"),
        (["--host", "300.0.0.1"], None, "cannot listen on 300.0.0.1:0"),
        ([], ConfigError("too big"), "too big"),
        ([], ConfigError("no\nsuch model"), "no such model"),
        ([], EngineDeadError("it ended"), "it ended"),
    ],
)
def test_mistake_is_one_line_and_exit_code_1(monkeypatch, capsys, arguments, error, words):
    monkeypatch.setattr(serve, "build_async_client", _fail_with(error or AssertionError()))
    assert serve.main(["--port", "0", *arguments]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("paxkv: error: ")
    assert words in output.err
    assert output.err.count("\n") == 1


def test_what_the_engine_says_about_its_memory_is_shown(monkeypatch, caplog):
    def build(*_, **__):
        logging.getLogger("paxkv.entrypoints.build").info("KV cache: 7 blocks")
        raise ConfigError("enough")

    caplog.set_level(logging.NOTSET, logger="paxkv")  # put back after the test
    monkeypatch.setattr(serve, "build_async_client", build)
    assert serve.main(["--port", "0"]) == 1
    assert "KV cache: 7 blocks" in caplog.text


def test_taken_port_is_known_before_the_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(serve, "build_async_client", _fail_with(AssertionError("was built")))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert serve.main(["--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


class StartableEngine(FakeEngine):
    """Looks at the port while it starts, and asks the server to end once it serves."""

    def __init__(self):
        super().__init__()
        self.address = None
        self.was_closed = False

    async def start(self):
        self.end = asyncio.get_running_loop().create_future()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(self.address, timeout=1).close()

    async def wait_until_ended(self):
        return await self.end

    async def close(self, *, drain_timeout_s):
        self.was_closed = True


def test_banner_names_the_port_that_was_picked_and_opens_after_the_start(monkeypatch, capsys):
    engine = StartableEngine()

    async def run():
        config = ServerConfig(port=0)
        with serve.bind_socket(config) as bound:
            engine.address = bound.getsockname()
            serving = asyncio.ensure_future(serve.serve(engine, config, bound))
            while not (out := capsys.readouterr().out):
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection(*engine.address)
            writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        return out

    out = asyncio.run(asyncio.wait_for(run(), 60))
    assert f"ready at http://127.0.0.1:{engine.address[1]}/v1\n" in out
    assert "org/fake (max_model_len 512)" in out
    assert "blocks, 10000 tokens" in out
    assert engine.was_closed


def test_application_gets_the_settings_of_the_engine(monkeypatch, capsys):
    class StartedEngine(StartableEngine):
        async def start(self):
            pass

    def create_app(engine, config, engine_config):
        assert engine_config.cache.block_size == 32
        raise ConfigError("seen")

    monkeypatch.setattr(serve, "build_async_client", lambda *_, **__: StartedEngine())
    monkeypatch.setattr(asgi, "create_app", create_app)
    assert serve.main(["--port", "0", "--block-size", "32"]) == 1
    assert capsys.readouterr().err == "paxkv: error: seen\n"


@pytest.mark.parametrize("is_logged", [True, False])
def test_what_runs_is_logged_unless_it_is_turned_off(is_logged, caplog, capsys):
    class BusyEngine(StartableEngine):
        latest_stats = SchedulerStats(num_running_reqs=3)

    caplog.set_level(logging.INFO, logger="paxkv.server.metrics.stats_log")
    engine = BusyEngine()

    async def run():
        config = ServerConfig(port=0, log_stats_interval_s=0.001, disable_log_stats=not is_logged)
        with serve.bind_socket(config) as bound:
            engine.address = bound.getsockname()
            serving = asyncio.ensure_future(serve.serve(engine, config, bound))
            while not capsys.readouterr().out:
                await asyncio.sleep(0.01)
            while is_logged and not caplog.messages:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.02)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert any("running 3, " in line for line in caplog.messages) == is_logged


def test_server_ends_with_its_engine(capsys):
    engine = StartableEngine()

    async def run():
        config = ServerConfig(port=0)
        with serve.bind_socket(config) as bound:
            engine.address = bound.getsockname()
            serving = asyncio.ensure_future(serve.serve(engine, config, bound))
            while not capsys.readouterr().out:
                await asyncio.sleep(0.01)
            engine.end.set_result("pulled the plug")
            await serving

    with pytest.raises(EngineDeadError, match="pulled the plug"):
        asyncio.run(asyncio.wait_for(run(), 60))
    assert engine.was_closed


def test_namespace_needs_no_foreign_fields():
    names = [field.name for field in dataclasses.fields(ServerConfig)]
    fields = {name: getattr(ServerConfig(port=1), name) for name in names}
    namespace = argparse.Namespace(**fields, other=3)
    assert serve.config_from_arguments(ServerConfig, namespace) == ServerConfig(port=1)
