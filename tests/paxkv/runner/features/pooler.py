"""`Pooler`: a step feature for tests that returns the last hidden state of pooled requests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from paxkv.runner.features.base import FeatureStep, StepFeature
from paxkv.runner.shapes.step_variant import StepVariant


@dataclasses.dataclass(frozen=True)
class PoolerVariant(StepVariant):
    hidden_size: int

    def results(self, *, num_tokens, num_reqs):
        return {"hidden_bits": (num_tokens, self.hidden_size)}

    def wants(self, wants):
        return dataclasses.replace(wants, hidden="all")

    def update(self, values, outputs, part, logits_of):
        bits = jax.lax.bitcast_convert_type(outputs.hidden.astype(jnp.float32), jnp.int32)
        return {"hidden_bits": part.write(values["hidden_bits"], bits)}


@dataclasses.dataclass(frozen=True)
class PoolerStep(FeatureStep):
    variant: PoolerVariant
    places: dict  # request id -> index in the step of its last token

    def fill(self, views):
        pass

    def finish(self, output, results):
        hidden_np = results["hidden_bits"].view(np.float32)
        pooled = {req_id: hidden_np[place].tolist() for req_id, place in self.places.items()}
        return dataclasses.replace(output, pooler_output=output.pooler_output | pooled)


class Pooler(StepFeature):
    handles = frozenset({"is_pooled"})

    def __init__(self, hidden_size):
        self.variant = PoolerVariant(hidden_size)
        self._prompt_lens = {}

    def variants(self):
        return (self.variant,)

    def before_step(self, scheduler_output, device):
        for req_id in scheduler_output.finished_req_ids:
            self._prompt_lens.pop(req_id, None)
        for new_req in scheduler_output.scheduled_new_reqs:
            if new_req.is_pooled:
                self._prompt_lens[new_req.req_id] = len(new_req.prompt_token_ids)

    def plan(self, step):
        ends_np = step.num_computed_np + step.num_scheduled_np
        places = {
            req_id: int(step.ends_np[req_idx]) - 1
            for req_idx, req_id in enumerate(step.req_ids)
            if self._prompt_lens.get(req_id) == ends_np[req_idx]
        }
        return PoolerStep(self.variant, places) if places else None
