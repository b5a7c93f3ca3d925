"""`Images`: a step feature for tests with an encoder, whose rows replace embeddings of tokens."""

import dataclasses

import jax
import jax.numpy as jnp

from models.forward.layer_context import ReplacedEmbeddings
from paxkv.runner.features.base import FeatureStep, StepFeature
from paxkv.runner.shapes.own_program import OwnProgram
from paxkv.runner.shapes.step_variant import DeviceArray, StepVariant

MAX_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Encode(OwnProgram):
    """Writes rows of the embedding table, in reverse order, into the array of encoded rows."""

    num_tokens: int
    table_idx: int

    def lower(self, model, params, pages, sharding):
        def encode(params, rows, token_ids):
            return rows.at[: self.num_tokens].set(params[self.table_idx][token_ids[::-1]])

        hidden = params[self.table_idx].shape[1]
        rows = jax.ShapeDtypeStruct((MAX_ROWS, hidden), jnp.float32, sharding=sharding)
        ids = jax.ShapeDtypeStruct((self.num_tokens,), jnp.int32, sharding=sharding)
        return jax.jit(encode, donate_argnums=1).lower(params, rows, ids)


@dataclasses.dataclass(frozen=True)
class ImagesVariant(StepVariant):
    hidden_size: int

    @property
    def has_every_bucket(self):
        return True

    def fields(self, *, num_tokens, num_reqs):
        # Of each token, its encoded row plus one, or 0 for none.
        return {"image_rows": (num_tokens,)}

    def arrays(self):
        dims = (MAX_ROWS, self.hidden_size)
        return {"encoded": DeviceArray(dims=dims, dtype="float32", is_donated=False)}

    def apply(self, context, part, values):
        row = part.read(part.fields["image_rows"])
        rows = values["encoded"][jnp.maximum(row - 1, 0)]
        return dataclasses.replace(
            context, embeddings=ReplacedEmbeddings(rows=rows, is_replaced=row > 0)
        )


@dataclasses.dataclass(frozen=True)
class ImagesStep(FeatureStep):
    variant: ImagesVariant
    rows: dict  # place in the step -> encoded row

    def fill(self, views):
        for place, row in self.rows.items():
            views["image_rows"][place] = 1 + row

    def finish(self, output, results):
        return output


class Images(StepFeature):
    """One image at a time.

    Attributes:
        images: Request id -> (position of its first token, what the image shows: token ids).
    """

    def __init__(self, model, num_tokens):
        self.images = {}
        self.table_idx = model.param_names.index("embed_tokens.embedding")
        self.model = model
        self.variant = ImagesVariant(model.config.hidden_size)
        self.encode = Encode(num_tokens, self.table_idx)

    def variants(self):
        return (self.variant,)

    def programs(self):
        return (self.encode,)

    def before_step(self, scheduler_output, device):
        for new_req in scheduler_output.scheduled_new_reqs:
            if new_req.req_id in self.images:
                _, shown_np = self.images[new_req.req_id]
                program = device.program(self.encode)
                rows, ids = self.arrays["encoded"], device.put(shown_np)
                self.arrays["encoded"] = program(self.model.params, rows, ids)

    def plan(self, step):
        rows = {}
        for place, (req_idx, position) in enumerate(
            zip(step.req_of_token_np, step.positions_np, strict=True)
        ):
            if step.req_ids[req_idx] in self.images:
                start, shown_np = self.images[step.req_ids[req_idx]]
                if 0 <= position - start < len(shown_np):
                    rows[place] = int(position - start)
        return ImagesStep(self.variant, rows) if rows else None
