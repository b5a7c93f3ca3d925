"""The engine's part of a command line, the same for every command that starts an engine process."""

import argparse

from paxkv.config.command_line import config_from_arguments
from paxkv.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RunnerConfig,
    SchedulerConfig,
)

ENGINE_CONFIG_CLASSES = (ModelConfig, CacheConfig, SchedulerConfig, RunnerConfig, ParallelConfig)


def engine_config_from_arguments(namespace: argparse.Namespace) -> EngineConfig:
    """The engine's settings that the flags describe.

    Raises:
        ConfigError: A value cannot work.
    """
    return EngineConfig(
        model=config_from_arguments(ModelConfig, namespace),
        cache=config_from_arguments(CacheConfig, namespace),
        scheduler=config_from_arguments(SchedulerConfig, namespace),
        runner=config_from_arguments(RunnerConfig, namespace),
        parallel=config_from_arguments(ParallelConfig, namespace),
    )
