"""The list of step features."""

from models import LoadedModel
from models.loading.loaded_draft_model import LoadedDrafter
from paxkv.config.runner_config import RunnerConfig
from paxkv.runner.drafters.burst_draft_pacer import BurstDraftPacer
from paxkv.runner.drafters.depth_pacer import DepthPacer
from paxkv.runner.drafters.draft_pacer import DraftPacer
from paxkv.runner.drafters.drafter_list import make_drafter
from paxkv.runner.features.base import StepFeature
from paxkv.runner.features.burst_head_drafts import BurstHeadDrafts
from paxkv.runner.features.drafts import Drafts
from paxkv.runner.features.expert_load import ExpertLoad
from paxkv.runner.features.head_drafts import HeadDrafts
from paxkv.runner.features.prompt_logprobs import PromptLogprobs
from paxkv.runner.features.target_hidden import make_target_hidden


def make_features(config: RunnerConfig, model: LoadedModel) -> tuple[StepFeature, ...]:
    """Makes the features of an engine, in the order in which the runner calls them.

    Raises:
        ConfigError: A setting asks for a feature that does not fit the model.
    """
    features: list[StepFeature] = [PromptLogprobs(config, vocab_size=model.config.vocab_size)]
    if config.expert_load_window is not None:
        features.append(ExpertLoad(model, config.expert_load_window))
    speculative = config.speculative_config
    # The feature of a drafter with weights comes from `make_head_drafts`.
    if speculative is not None and not speculative.is_on_device:
        are_in_bursts = bool(speculative.drafts_in_bursts)
        clock = model.platform.step_clock
        drafts = Drafts(
            make_drafter(speculative),
            max_drafts=speculative.num_speculative_tokens,
            pacer=DraftPacer(clock) if speculative.adapts else None,
            are_in_bursts=are_in_bursts,
            burst_pacer=BurstDraftPacer(clock) if speculative.adapts and are_in_bursts else None,
        )
        features.append(drafts)
    return tuple(features)


def make_head_drafts(
    config: RunnerConfig,
    model: LoadedModel,
    head: LoadedDrafter,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> HeadDrafts:
    """Makes the feature for the draft head of `config.speculative_config`."""
    speculative = config.speculative_config
    max_drafts = speculative.num_speculative_tokens
    variant = make_target_hidden(
        *(config, model, head),
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    clock = model.platform.step_clock
    pacer = DepthPacer(max_drafts, clock) if speculative.adapts else None
    if not speculative.drafts_in_bursts:
        return HeadDrafts(variant, max_drafts=max_drafts, pacer=pacer)
    return BurstHeadDrafts(
        variant,
        max_drafts=max_drafts,
        pacer=pacer,
        burst_pacer=BurstDraftPacer(clock) if speculative.adapts else None,
    )
