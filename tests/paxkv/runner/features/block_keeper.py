"""`BlockKeeper`: a step feature for tests that keeps blocks of finished requests on the host."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from paxkv.runner.features.base import StepFeature
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


class BlockKeeper(StepFeature):
    """Brings blocks to the host when their request ends, and writes them into other blocks.

    Attributes:
        blocks_of: Request id -> blocks to keep when it ends.
        kept: Request id -> what its blocks held.
        to_write: (request id, blocks): what was kept of the request goes into these blocks before
            the next step.
        num_steps: Steps that were started.
    """

    def __init__(self, num_blocks):
        self.reads, self.writes = ReadBlocks(num_blocks), WriteBlocks(num_blocks)
        self.blocks_of, self.kept, self.to_write = {}, {}, []
        self.num_steps = 0

    def variants(self):
        return ()

    def programs(self):
        return (self.reads, self.writes)

    def before_step(self, scheduler_output, device):
        for req_id in scheduler_output.finished_req_ids & self.blocks_of.keys():
            ids = self._padded(self.blocks_of.pop(req_id), device)
            self.kept[req_id] = np.asarray(device.program(self.reads)(device.pages, ids))
        for req_id, blocks in self.to_write:
            values = device.put(self.kept[req_id])
            ids = self._padded(blocks, device)
            device.pages = device.program(self.writes)(device.pages, values, ids)
        self.to_write.clear()

    def after_step(self, device):
        self.num_steps += 1

    def plan(self, step):
        return None

    def _padded(self, blocks, device):
        ids_np = np.full(self.reads.num_blocks, device.pages.shape[1], np.int32)
        ids_np[: len(blocks)] = blocks
        return device.put(ids_np)
