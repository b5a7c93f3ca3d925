"""`Worker`: the device half of a runner. It owns everything that stays on the devices."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from models import Pages
from paxkv.runner.features.base import StepFeature
from paxkv.runner.features.feature_device import FeatureDevice
from paxkv.runner.features.head_drafts import HeadDrafts
from paxkv.runner.features.head_memory import head_memory_of
from paxkv.runner.features.target_hidden import target_hidden_of
from paxkv.runner.features.traced_features import FeatureValues, split_arrays
from paxkv.runner.memory.zeros import put_zeros
from paxkv.runner.programs.step import Params
from paxkv.runner.programs.step_sampler import StepSampler
from paxkv.runner.programs.warmup import StepPrograms
from paxkv.runner.ranks.rank_message import Call, HostArray
from paxkv.runner.shapes.program_shapes import BurstShape, CopyShape, DrafterShape, StepShape


class Worker:
    """Calls the programs of steps. Everything runs on the devices in the order of calls.

    Each method takes only host arrays and shapes, and keeps what the next calls need. If an engine
    has several processes, the leader's worker sends each call before it makes it, and the workers
    of the followers repeat it. So all processes start the same programs in the same order.

    Args:
        send: Sends a call to the followers. None: the engine has no followers, or this worker is a
            follower's.
        kv_cache: The pages, filled with zeros.
        head_drafts: The feature whose array the draft head reads; None without a draft head.

    Attributes:
        kv_cache: The next call overwrites it.
        params: The model's parameters. `head_params` are the parameters of the draft head.
    """

    def __init__(
        self,
        programs: StepPrograms,
        *,
        params: Params,
        head_params: Params,
        kv_cache: Pages,
        features: Sequence[StepFeature],
        head_drafts: HeadDrafts | None,
        vocab_size: int,
        max_num_seqs: int,
        sharding: NamedSharding,
        send: Callable[[Call], None] | None = None,
    ) -> None:
        self._send = send
        self._shapes = programs.buckets.largest_first
        self._shape_idx = {shape: idx for idx, shape in enumerate(self._shapes)}
        self.kv_cache = kv_cache
        self.programs = programs
        self.sampler = StepSampler(programs, vocab_size=vocab_size, sharding=sharding)
        self.params, self.head_params = params, head_params
        self._feature_of = {v: feature for feature in features for v in feature.variants()}
        self._head_drafts = head_drafts
        self._sharding = sharding
        for feature in features:
            feature.allocate(sharding)
        self._slot_blocks = [
            put_zeros(shape.dims, jnp.int32, sharding) for shape in programs.buckets.slot_shapes
        ]
        self._prev_tokens = put_zeros((max_num_seqs,), jnp.int32, sharding)
        # Of the last step, for the sampler and the draft head.
        self._step: tuple[StepShape, np.ndarray] | None = None
        self._sampling: jax.Array | None = None
        self._read_tokens = self._prev_tokens
        self._result: jax.Array | None = None

    @contextlib.contextmanager
    def feature_device(self) -> Iterator[FeatureDevice]:
        """Lends the KV cache to features, and takes back the pages that they return."""
        device = FeatureDevice(self.kv_cache, sharding=self._sharding, program=self.programs.get)
        yield device
        self.kv_cache = device.pages

    def write_row(self, packed_np: np.ndarray) -> None:
        """Writes a row of `pack_row`."""
        if self._send is not None:
            self._send(Call("write_row", array=HostArray.of(packed_np)))
        with _host_arrays():
            self.sampler.write_row(packed_np, self.kv_cache)

    def write_slots(
        self,
        table_idx: int,
        packed_np: np.ndarray,  # i32[`SlotShape.packed_dims`]
    ) -> None:
        """Writes the blocks of slots of a table of states; `table_idx` counts such tables."""
        if self._send is not None:
            array = HostArray.of(packed_np)
            self._send(Call("write_slots", array=array, table_idx=table_idx))
        shape = self.programs.buckets.slot_shapes[table_idx]
        with _host_arrays():
            self._slot_blocks[table_idx] = self.programs.get(shape, self.kv_cache)(
                self._slot_blocks[table_idx], packed_np
            )

    def copy_blocks(
        self,
        copies_np: np.ndarray,  # i32[2, num_copies]
    ) -> None:
        if self._send is not None:
            self._send(Call("copy_blocks", array=HostArray.of(copies_np)))
        program = self.programs.get(CopyShape(num_copies=copies_np.shape[1]), self.kv_cache)
        with _host_arrays():
            self.kv_cache = program(self.kv_cache, copies_np)

    def run_step(
        self,
        shape: StepShape,
        packed_np: np.ndarray,  # i32[num_words]
    ) -> FeatureValues:
        """Computes a step without its tokens, which `draw` samples.

        Returns:
            The results of each of the shape's features.
        """
        if self._send is not None:
            self._send(Call("run_step", self._shape_idx[shape], HostArray.of(packed_np)))
        self._step = shape, packed_np
        outputs = self._run(shape, packed_np)
        self.kv_cache, self.sampler.logits, self._sampling, results, donated = outputs
        self._update_features(shape, donated)
        return results

    def run_burst(
        self,
        shape: BurstShape,
        packed_np: np.ndarray,  # i32[num_words]
        *,
        leaves_logits: bool,
    ) -> jax.Array | None:  # i32[max_steps, num_reqs, RESULT_WIDTH or 1 more]
        """Computes a burst and returns its result; None if `draw` must sample after it."""
        if self._send is not None:
            idx, array = self._shape_idx[shape], HostArray.of(packed_np)
            self._send(Call("run_burst", idx, array, leaves_logits))
        sampler = self.sampler
        outputs = self._run(shape, packed_np, sampler.row_state)
        self.kv_cache, sampler.logits, sampler.row_state, self._sampling, *outputs = outputs
        result, next_tokens, donated = outputs
        self._update_features(shape, donated)
        if leaves_logits:
            return None
        self._prev_tokens = next_tokens
        return result

    def draw(
        self,
        mask_np: np.ndarray | None,  # i32[mask_dims]
    ) -> jax.Array:  # i32[max_draws, num_reqs, RESULT_WIDTH]
        """Samples the tokens of the last step."""
        if self._send is not None:
            mask = None if mask_np is None else HostArray.of(mask_np)
            self._send(Call("draw", array=mask))
        self._read_tokens = self._prev_tokens
        with _host_arrays():
            drawn = self.sampler.draw(self._sampling, mask_np, self.kv_cache)
        self._result, self._prev_tokens = drawn
        return self._result

    def draft(
        self,
        following_ids_np: np.ndarray,  # i32[num_reqs]
        *,
        num_proposed: int,
    ) -> jax.Array:  # i32[num_reqs, num_drafts]
        """Runs the draft head for the last step, whose tokens were drawn.

        Args:
            num_proposed: Drafts of each request.
        """
        if self._send is not None:
            array_np = np.append(following_ids_np, np.int32(num_proposed))
            self._send(Call("draft", array=HostArray.of(array_np)))
        shape, packed_np = self._step
        program = self.programs.get(self.programs.buckets.draft_shape_for(shape), self.kv_cache)
        arrays = self._head_drafts.arrays
        with _host_arrays():
            self.kv_cache, drafts, memory = program(
                self.params,
                self.head_params,
                self.kv_cache,
                packed_np,
                self._read_tokens,
                target_hidden_of(arrays),
                self._result,
                following_ids_np,
                np.int32(num_proposed),
                head_memory_of(arrays),
                tuple(self._slot_blocks),
            )
        arrays.update(memory)
        return drafts

    def repeat(self, call: Call) -> None:
        """Repeats a call of the leader.

        Waits until the step before the last one has been computed, and raises an error of that
        step. The wait also bounds the work that is queued.
        """
        array_np = None if call.array is None else call.array.array_np
        shape = self._shapes[call.shape_idx]
        before = self._prev_tokens
        match call.name:
            case "write_row":
                self.write_row(array_np)
            case "write_slots":
                self.write_slots(call.table_idx, array_np)
            case "copy_blocks":
                self.copy_blocks(array_np)
            case "run_step":
                self.run_step(shape, array_np)
            case "run_burst":
                self.run_burst(shape, array_np, leaves_logits=call.leaves_logits)
            case "draw":
                self.draw(array_np)
            case "draft":
                self.draft(array_np[:-1], num_proposed=int(array_np[-1]))
        if self._prev_tokens is not before:
            before.block_until_ready()

    def _run(
        self, shape: StepShape | BurstShape, packed_np: np.ndarray, *state: object
    ) -> tuple[object, ...]:
        program = self.programs.get(shape, self.kv_cache)
        features = [self._feature_of[variant] for variant in shape.features]
        arrays = split_arrays(shape.features, [feature.arrays for feature in features])
        drafts = isinstance(shape, BurstShape) and isinstance(shape.drafts, DrafterShape)
        head_params = (self.head_params,) if drafts else ()
        with _host_arrays():
            return program(
                self.params,
                self.kv_cache,
                packed_np,
                self._prev_tokens,
                self.sampler.logits,
                *state,
                *arrays,
                tuple(self._slot_blocks),
                *head_params,
            )

    def _update_features(self, shape: StepShape | BurstShape, donated: FeatureValues) -> None:
        """Gives features the arrays that replace those which they donated to the step."""
        for variant, written in zip(shape.features, donated, strict=True):
            self._feature_of[variant].arrays.update(written)


def _host_arrays() -> contextlib.AbstractContextManager[None]:
    """Lets programs take host arrays, which they transfer faster than `device_put`."""
    return jax.transfer_guard_host_to_device("allow")
