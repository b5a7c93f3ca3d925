"""`Census`: a step feature for tests that uses every part of the interface."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from paxkv.runner.features.base import FeatureStep, StepFeature
from paxkv.runner.shapes.step_variant import DeviceArray, StepVariant
from tests.paxkv.runner.tiny_model import VOCAB

NUM_CLASSES = 7


def class_of(token_ids):
    """The class of each token; any rule that is not the identity will do."""
    return np.asarray(token_ids) * 3 % NUM_CLASSES


@dataclasses.dataclass(frozen=True)
class CensusVariant(StepVariant):
    """Counts the classes of counted tokens, and replaces the embeddings of some tokens."""

    num_classes: int

    @property
    def has_every_bucket(self):
        return True

    def fields(self, *, num_tokens, num_reqs):
        # Whether the token is counted; the token to embed plus one, or 0 for its own.
        return {"is_counted": (num_tokens,), "other_ids": (num_tokens,)}

    def arrays(self):
        return {
            "class_of": DeviceArray(dims=(VOCAB,), dtype="int32", is_donated=False),
            "counts": DeviceArray(dims=(self.num_classes,), dtype="float32", is_donated=True),
        }

    def results(self, *, num_tokens, num_reqs):
        return {"classes": (num_tokens,)}

    def apply(self, context, part, values):
        other_ids = part.read(part.fields["other_ids"])
        token_ids = jnp.where(other_ids > 0, other_ids - 1, context.batch.token_ids)
        batch = dataclasses.replace(context.batch, token_ids=token_ids)
        return dataclasses.replace(context, batch=batch)

    def update(self, values, outputs, part, logits_of):
        # The step's buffer and the part's batch have the same tokens.
        read = part.read(part.fields["token_ids"])
        counted = values["class_of"][part.batch.token_ids]
        is_counted = part.read(part.fields["is_counted"])
        return {
            "classes": part.write(values["classes"], values["class_of"][read]),
            "counts": values["counts"].at[counted].add(is_counted.astype(jnp.float32)),
        }


@dataclasses.dataclass(frozen=True)
class CensusStep(FeatureStep):
    """Args: spans: Of each request, its tokens in the step, and what is embedded for them."""

    variant: CensusVariant
    spans: dict

    def fill(self, views):
        for places, other_ids in self.spans.values():
            views["is_counted"][places] = 1
            views["other_ids"][places][: len(other_ids)] = np.array(other_ids, np.int32) + 1

    def finish(self, output, results):
        classes = {r: results["classes"][s].tolist() for r, (s, _) in self.spans.items()}
        return dataclasses.replace(output, draft_token_ids=output.draft_token_ids | classes)


class Census(StepFeature):
    """Counts the tokens of `counted` requests; the classes of a step come as draft tokens.

    Attributes:
        counted: Request id -> the prompt to embed in place of its own, or the empty list.
    """

    def __init__(self):
        self.counted = {}
        self.variant = CensusVariant(NUM_CLASSES)

    def allocate(self, sharding):
        super().allocate(sharding)
        classes_np = class_of(range(VOCAB)).astype(np.int32)
        self.arrays["class_of"] = jax.device_put(classes_np, sharding)

    def variants(self):
        return (self.variant,)

    def before_step(self, scheduler_output, device):
        for req_id in scheduler_output.finished_req_ids:
            self.counted.pop(req_id, None)

    def plan(self, step):
        spans = {}
        for req_idx, req_id in enumerate(step.req_ids):
            if req_id in self.counted:
                end, num_tokens = step.ends_np[req_idx], step.num_scheduled_np[req_idx]
                other_ids = self.counted[req_id][step.num_computed_np[req_idx] :][:num_tokens]
                spans[req_id] = (slice(end - num_tokens, end), other_ids)
        return CensusStep(self.variant, spans) if spans else None
