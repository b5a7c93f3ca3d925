"""The list of step features."""

from models import LoadedModel
from paxkv.config.engine_config import RunnerConfig
from paxkv.runner.drafters.draft_pacer import DraftPacer
from paxkv.runner.drafters.drafter_list import make_drafter
from paxkv.runner.features.base import StepFeature
from paxkv.runner.features.drafts import Drafts
from paxkv.runner.features.expert_load import ExpertLoad
from paxkv.runner.features.prompt_logprobs import PromptLogprobs


def make_features(config: RunnerConfig, model: LoadedModel) -> tuple[StepFeature, ...]:
    """Makes the features of an engine, in the order in which the runner calls them.

    Raises:
        ConfigError: A setting asks for a feature that does not fit the model.
    """
    features: list[StepFeature] = [PromptLogprobs(config, vocab_size=model.config.vocab_size)]
    if config.expert_load_window is not None:
        features.append(ExpertLoad(model, config.expert_load_window))
    speculative = config.speculative_config
    # A drafter with weights is no feature: the runner runs it after each step.
    if speculative is not None and not speculative.is_on_device:
        max_drafts = speculative.num_speculative_tokens
        pacer = DraftPacer() if speculative.adapts else None
        features.append(Drafts(make_drafter(speculative), max_drafts=max_drafts, pacer=pacer))
    return tuple(features)
