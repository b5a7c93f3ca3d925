"""`Adapters`: a step feature for tests that gives each request low-rank changes of weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from paxkv.runner.features.base import FeatureStep, StepFeature
from paxkv.runner.shapes.step_variant import DeviceArray, StepVariant

# Before the cache, after it, and in the MLP.
ADAPTED = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")
RANK = 2


@dataclasses.dataclass(frozen=True)
class AdaptersVariant(StepVariant):
    """Args: shapes: The name of each changed `Linear`, and the shape of its kernel."""

    num_adapters: int
    num_layers: int
    shapes: tuple[tuple[str, tuple[int, int]], ...]

    @property
    def has_every_bucket(self):
        return True

    @property
    def is_in_bursts(self):
        return True

    def fields(self, *, num_tokens, num_reqs):
        # The adapter of each token plus one, or 0 for none.
        return {"adapter_ids": (num_tokens,)}

    def arrays(self):
        arrays = {}
        for name, (in_features, out_features) in self.shapes:
            for half, dims in (("down", (in_features, RANK)), ("up", (RANK, out_features))):
                arrays[f"{name}.{half}"] = DeviceArray(
                    dims=(self.num_layers, 1 + self.num_adapters, *dims),
                    dtype="float32",
                    is_donated=False,
                )
        return arrays

    def apply(self, context, part, values):
        ids = part.read(part.fields["adapter_ids"])

        def change(name, x, y, context):
            if f"{name}.down" not in values:
                return y
            down, up = (values[f"{name}.{half}"][context.layer_idx] for half in ("down", "up"))
            own = context.of_rows(ids)
            return y + jnp.einsum("ti,tir,tro->to", x, down[own], up[own])

        return context.add_linear_change(change)


@dataclasses.dataclass(frozen=True)
class AdaptersStep(FeatureStep):
    """Args: spans: The tokens of each request with an adapter, and the adapter."""

    variant: AdaptersVariant
    spans: list

    def fill(self, views):
        for places, adapter in self.spans:
            views["adapter_ids"][places] = 1 + adapter

    def finish(self, output, results):
        return output


class Adapters(StepFeature):
    """Random adapters of a model.

    Attributes:
        adapter_of: Request id -> its adapter, in [0, num_adapters).
    """

    def __init__(self, model, num_adapters):
        self.adapter_of = {}
        self.model = model
        params = dict(zip(model.param_names, model.params, strict=True))
        shapes = [(name, params[f"layers.0.{name}.kernel"].shape) for name in ADAPTED]
        self.variant = AdaptersVariant(num_adapters, model.config.num_layers, tuple(shapes))

    def allocate(self, sharding):
        super().allocate(sharding)
        rng = np.random.default_rng(0)
        for name, array in self.variant.arrays().items():
            values_np = rng.standard_normal(array.dims).astype(np.float32) / 4
            values_np[:, 0] = 0  # of requests without an adapter
            self.arrays[name] = jax.device_put(values_np, sharding)

    def merged(self, adapter):
        """The model with the adapter's changes added to its weights."""
        params = []
        for name, param in zip(self.model.param_names, self.model.params, strict=True):
            _, _, local = name.partition(".")
            layer_idx, _, local = local.partition(".")
            if (linear := local.removesuffix(".kernel")) in ADAPTED:
                down_np, up_np = (
                    np.asarray(self.arrays[f"{linear}.{half}"])[int(layer_idx), 1 + adapter]
                    for half in ("down", "up")
                )
                param = jax.device_put(np.asarray(param) + down_np @ up_np)
            params.append(param)
        return dataclasses.replace(self.model, params=tuple(params))

    def variants(self):
        return (self.variant,)

    def before_step(self, scheduler_output, device):
        for req_id in scheduler_output.finished_req_ids:
            self.adapter_of.pop(req_id, None)

    def plan(self, step):
        spans = []
        for req_idx, req_id in enumerate(step.req_ids):
            if req_id in self.adapter_of:
                spans.append((step.rows_of_fields(req_idx), self.adapter_of[req_id]))
        return AdaptersStep(self.variant, spans) if spans else None
