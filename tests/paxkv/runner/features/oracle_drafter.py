"""`OracleDrafter`: a step feature for tests that proposes the tokens which requests will draw."""

import dataclasses
import random

from paxkv.runner.features.base import FeatureStep, StepFeature
from tests.paxkv.runner.tiny_model import VOCAB


@dataclasses.dataclass(frozen=True)
class OracleStep(FeatureStep):
    drafter: "OracleDrafter"
    num_outputs: dict  # request id -> its output tokens before the step
    variant: None = None

    def fill(self, views):
        raise AssertionError("a step without a variant has no fields")

    def finish(self, output, results):
        drafts = {
            req_id: self.drafter.propose(req_id, self.num_outputs[req_id] + len(token_ids))
            for req_id, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=True)
        }
        self.drafter.num_drawn += [len(token_ids) for token_ids in output.sampled_token_ids]
        return dataclasses.replace(output, draft_token_ids={k: v for k, v in drafts.items() if v})


class OracleDrafter(StepFeature):
    """
    Attributes:
        truth: Request id -> the output that it has without drafts.
        wrong_rate: Share of drafts that are replaced by any token.
        num_drawn: Tokens that each request got in each step.
    """

    max_drafts = 3

    def __init__(self):
        self.truth, self.num_drawn = {}, []
        self.wrong_rate, self.rng = 0.0, random.Random(0)
        self._num_outputs = {}

    def variants(self):
        return ()

    def before_step(self, scheduler_output, device):
        for new_req in scheduler_output.scheduled_new_reqs:
            self._num_outputs[new_req.req_id] = 0
        cached = scheduler_output.scheduled_cached_reqs
        self._num_outputs |= zip(cached.req_ids, cached.num_output_tokens, strict=True)

    def plan(self, step):
        return OracleStep(self, {req_id: self._num_outputs[req_id] for req_id in step.req_ids})

    def propose(self, req_id, num_outputs):
        """Proposes tokens after the end of the answer too, which must have no effect."""
        if req_id not in self.truth:
            return []
        rng = self.rng
        right = self.truth[req_id][num_outputs:][: self.max_drafts]
        right += [rng.randrange(VOCAB) for _ in range(self.max_drafts - len(right))]
        return [
            rng.randrange(VOCAB) if rng.random() < self.wrong_rate else token_id
            for token_id in right
        ]
