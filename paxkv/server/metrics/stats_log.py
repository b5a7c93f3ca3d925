"""`StatsLog`: regularly logs how much the engine computes."""

import asyncio
import logging

from paxkv.contracts.engine_output import SchedulerStats
from paxkv.server.engine_protocol import EngineClient

logger = logging.getLogger(__name__)


class StatsLog:
    """Logs the work of each interval in which a request ran or waited:

    prompts 1519.2 tokens/s, generation 804.0 tokens/s, running 8, waiting 0, KV cache 12.5 %,
    prefix cache hits 61.0 %

    Args:
        interval_s: Must be above 0.
    """

    def __init__(self, engine: EngineClient, interval_s: float) -> None:
        self._engine = engine
        self._interval_s = interval_s
        self._tokens = engine.token_totals
        self._num_steps = engine.latest_stats.num_steps
        self._num_draft_tokens = engine.latest_stats.num_draft_tokens
        self._num_accepted_tokens = engine.latest_stats.num_accepted_tokens

    async def run(self) -> None:
        """Logs until it is cancelled."""
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        while True:
            await asyncio.sleep(self._interval_s)
            # A busy loop may wake this task late.
            end_s = loop.time()
            self.log(end_s - begin_s)
            begin_s = end_s

    def log(self, took_s: float) -> None:
        """Logs the work since the last call, which was `took_s` seconds ago."""
        stats, tokens, before = self._engine.latest_stats, self._engine.token_totals, self._tokens
        # A restarted engine has other counts, and 0 steps until it has run.
        has_run = stats.num_steps not in (0, self._num_steps) or tokens != before
        self._tokens, self._num_steps = tokens, stats.num_steps
        if not (has_run or stats.num_running_reqs or stats.num_waiting_reqs):
            return
        num_prompt_tokens = tokens.num_computed_prompt_tokens - before.num_computed_prompt_tokens
        num_generation_tokens = tokens.num_generation_tokens - before.num_generation_tokens
        logger.info(
            "prompts %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, "
            "KV cache %.1f %%, prefix cache hits %.1f %%%s",
            num_prompt_tokens / took_s,
            num_generation_tokens / took_s,
            stats.num_running_reqs,
            stats.num_waiting_reqs,
            100 * stats.kv_cache_usage,
            100 * stats.prefix_cache_hit_rate,
            self._describe_drafts(stats, took_s),
        )

    def _describe_drafts(self, stats: SchedulerStats, took_s: float) -> str:
        """Describes the drafts since the last call; empty if there were none."""
        num_drafts = stats.num_draft_tokens - self._num_draft_tokens
        num_accepted = stats.num_accepted_tokens - self._num_accepted_tokens
        self._num_draft_tokens = stats.num_draft_tokens
        self._num_accepted_tokens = stats.num_accepted_tokens
        # The counts of a restarted engine begin at 0.
        if num_drafts <= 0 or num_accepted < 0:
            return ""
        rate, share = num_drafts / took_s, num_accepted / num_drafts
        return f", drafts {rate:.1f} tokens/s, accepted {100 * share:.1f} %"
