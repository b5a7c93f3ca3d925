"""Limits of the scheduler that cannot work are refused, with what is allowed."""

import pytest

from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: SchedulerConfig(enable_chunked_prefill=1), "enable_chunked_prefill"),
        (lambda: SchedulerConfig(max_num_seqs=0), "max_num_seqs"),
        (lambda: SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=4), "max_num_seqs=8"),
        (lambda: SchedulerConfig(policy="lottery"), "fcfs, priority"),
    ],
)
def test_the_error_names_the_invalid_setting(make, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make()
