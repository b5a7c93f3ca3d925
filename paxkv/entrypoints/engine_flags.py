"""The engine's settings from a command line, for all commands that start an engine process."""

import argparse

from paxkv.config.cache_config import CacheConfig
from paxkv.config.command_line import config_from_arguments
from paxkv.config.engine_config import EngineConfig
from paxkv.config.model_config import ModelConfig
from paxkv.config.parallel_config import ParallelConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.scheduler_config import SchedulerConfig

ENGINE_CONFIG_CLASSES = (ModelConfig, CacheConfig, SchedulerConfig, RunnerConfig, ParallelConfig)


def engine_config_from_arguments(namespace: argparse.Namespace) -> EngineConfig:
    """Builds the engine's settings from parsed flags.

    Raises:
        ConfigError: A value is invalid.
    """
    return EngineConfig(
        model=config_from_arguments(ModelConfig, namespace),
        cache=config_from_arguments(CacheConfig, namespace),
        scheduler=config_from_arguments(SchedulerConfig, namespace),
        runner=config_from_arguments(RunnerConfig, namespace),
        parallel=config_from_arguments(ParallelConfig, namespace),
    )
