"""The list of step features."""

from models import LoadedModel
from paxkv.config.engine_config import RunnerConfig
from paxkv.runner.features.base import StepFeature
from paxkv.runner.features.prompt_logprobs import PromptLogprobs


def make_features(config: RunnerConfig, model: LoadedModel) -> tuple[StepFeature, ...]:
    """The features of an engine, in the order in which they are called."""
    return (PromptLogprobs(config, vocab_size=model.config.vocab_size),)
