"""The list of drafters."""

from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.runner.drafters.base import Drafter
from paxkv.runner.drafters.ngram import NgramDrafter
from paxkv.runner.drafters.suffix import SuffixDrafter


def make_drafter(config: SpeculativeConfig) -> Drafter:
    """Makes the drafter of `config.method`."""
    shortest, longest = config.lookup_lengths
    drafters = {
        "ngram": lambda: NgramDrafter(shortest=shortest, longest=longest),
        "suffix": lambda: SuffixDrafter(config.suffix_limits),
    }
    return drafters[config.method]()
