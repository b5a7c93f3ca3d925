"""`BlockKeeper`: a step feature for tests that keeps blocks of finished requests on the host.

It is also the worker half of a connector that loads these blocks for other requests.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from paxkv.contracts.scheduler_output import KVConnectorOutput
from paxkv.runner.features.base import FeatureStep, StepFeature
from paxkv.runner.shapes.own_program import OwnProgram


@dataclasses.dataclass(frozen=True)
class ReadBlocks(OwnProgram):
    """Copies blocks out of the cache. Padding ids lie past its end."""

    num_blocks: int

    def lower(self, model, params, pages, sharding):
        ids = jax.ShapeDtypeStruct((self.num_blocks,), jnp.int32, sharding=sharding)
        return jax.jit(pallas_kernels.block_gather).lower(pages, ids)


@dataclasses.dataclass(frozen=True)
class WriteBlocks(OwnProgram):
    """Writes what `ReadBlocks` returned into the cache."""

    num_blocks: int

    def lower(self, model, params, pages, sharding):
        ids = jax.ShapeDtypeStruct((self.num_blocks,), jnp.int32, sharding=sharding)
        dims = (pages.shape[0], self.num_blocks, *pages.shape[2:])
        values = jax.ShapeDtypeStruct(dims, pages.dtype, sharding=sharding)
        write = jax.jit(pallas_kernels.block_scatter, donate_argnums=0)
        return write.lower(pages, values, ids)


@dataclasses.dataclass(frozen=True)
class KeeperStep(FeatureStep):
    keeper: "BlockKeeper"
    variant: None = None

    def fill(self, views):
        raise AssertionError("a step without a variant has no fields")

    def finish(self, output, results):
        return self.keeper.finish_empty(output)


class BlockKeeper(StepFeature):
    """Copies blocks to the host when their request ends, and writes them into other blocks.

    Attributes:
        blocks_of: Request id -> blocks to keep when it ends.
        kept: Request id -> what its blocks held.
        to_write: (request id, blocks): the kept content of the request is written to these blocks
            before the next step.
        num_steps: Steps that were started.
        source_of: Request id -> the request whose kept blocks a connector's load writes.
    """

    handles = frozenset({"kv_connector_metadata"})

    def __init__(self, num_blocks):
        self.reads, self.writes = ReadBlocks(num_blocks), WriteBlocks(num_blocks)
        self.blocks_of, self.kept, self.to_write = {}, {}, []
        self.num_steps = 0
        self.source_of, self.loaded = {}, set()

    def variants(self):
        return ()

    def programs(self):
        return (self.reads, self.writes)

    def before_step(self, scheduler_output, device):
        for req_id in scheduler_output.finished_req_ids & self.blocks_of.keys():
            ids = self._padded(self.blocks_of.pop(req_id), device)
            self.kept[req_id] = np.asarray(device.program(self.reads)(device.pages, ids))
        metadata = scheduler_output.kv_connector_metadata
        for load in () if metadata is None else metadata.loads:
            self.to_write.append((self.source_of[load.request_id], load.block_ids[0]))
            self.loaded.add(load.request_id)
        for req_id, blocks in self.to_write:
            values = device.put(self.kept[req_id])
            ids = self._padded(blocks, device)
            device.pages = device.program(self.writes)(device.pages, values, ids)
        self.to_write.clear()

    def after_step(self, device):
        self.num_steps += 1

    def plan(self, step):
        # Always: while a burst repeats, `plan` is not called after it returned None.
        return KeeperStep(self)

    def finish_empty(self, output):
        if not self.loaded:
            return output
        loaded, self.loaded = frozenset(self.loaded), set()
        return dataclasses.replace(
            output, kv_connector_output=KVConnectorOutput(finished_recving=loaded)
        )

    def _padded(self, blocks, device):
        ids_np = np.full(self.reads.num_blocks, device.pages.shape[1], np.int32)
        ids_np[: len(blocks)] = blocks
        return device.put(ids_np)
