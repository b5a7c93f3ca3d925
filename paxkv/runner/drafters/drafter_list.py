"""The list of drafters."""

from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.runner.drafters.base import Drafter
from paxkv.runner.drafters.ngram import NgramDrafter


def make_drafter(config: SpeculativeConfig) -> Drafter:
    """Makes the drafter of `config.method`."""
    shortest, longest = config.lookup_lengths
    drafters = {"ngram": lambda: NgramDrafter(shortest=shortest, longest=longest)}
    return drafters[config.method]()
