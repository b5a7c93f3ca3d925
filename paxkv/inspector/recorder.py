"""`InspectionRecorder`: records an engine's changes while a client polls for them."""

import secrets
import time
from collections.abc import Sequence

from paxkv.contracts.engine_output import EngineCoreOutput
from paxkv.contracts.observation import BlockDetails, Inspection
from paxkv.errors import InvalidRequestError
from paxkv.inspector.frame_maker import FrameMaker
from paxkv.inspector.inspected_scheduler import InspectedScheduler

# The recording ends this long after the last poll, so closed pages cost nothing.
LEASE_S = 3.0


class InspectionRecorder:
    """Makes frames of an engine's state. Records changes only while a client polls."""

    def __init__(self, scheduler: InspectedScheduler) -> None:
        self._scheduler = scheduler
        # None while no recording runs.
        self._frames: FrameMaker | None = None
        self._lease_end_s = 0.0
        # Starts at a random number, so that a restarted engine does not continue an old sequence.
        self._seq = secrets.randbits(32)

    @property
    def is_active(self) -> bool:
        return self._frames is not None

    def on_arrival(self, request_id: str, arrival_time: float) -> None:
        """Records that a request was added."""
        if self._frames is not None:
            self._frames.meter.on_arrival(request_id, arrival_time)

    def on_step(
        self,
        outputs: Sequence[EngineCoreOutput],
        *,
        took_s: float,
        wait_s: float,
        is_one_token_each: bool = False,
        is_empty: bool = False,
    ) -> None:
        """Records that a step has ended; see `StepMeter.on_step`."""
        if self._frames is None:
            return
        self._frames.meter.on_step(
            outputs,
            took_s=took_s,
            wait_s=wait_s,
            now_s=time.time(),
            is_one_token_each=is_one_token_each,
            is_empty=is_empty,
        )
        if time.monotonic() > self._lease_end_s:
            self._frames.close()
            self._frames = None

    def inspect(
        self, after_seq: int, wants_snapshot: bool, keeps_tokens: bool = False
    ) -> Inspection:
        """Returns the changes since the call that returned `after_seq`, or a snapshot.

        The first call, and a call after a missed answer, return a snapshot. Each call continues the
        recording for `LEASE_S`.

        Args:
            keeps_tokens: Store the tokens of blocks that are cached from the first call on, so that
                `inspect_block` returns them after the requests that held the blocks have ended.
        """
        start_s = time.thread_time()
        is_next = self._frames is not None and after_seq == self._seq
        self._seq += 1
        self._lease_end_s = time.monotonic() + LEASE_S
        if self._frames is None:
            self._frames = FrameMaker(self._scheduler, keeps_tokens=keeps_tokens)
        now_s = time.time()
        delta = self._frames.make_delta(now_s) if is_next else None
        snapshot = None
        if wants_snapshot or not is_next:
            snapshot = self._frames.make_snapshot(now_s)
        return Inspection(
            seq=self._seq,
            took_s=time.thread_time() - start_s,
            snapshot=snapshot,
            delta=delta,
        )

    def inspect_block(self, block_id: int, holder_key: int, with_tokens: bool) -> BlockDetails:
        """Describes the current state of a block; see `FrameMaker.describe_block`.

        Raises:
            InvalidRequestError: There is no such block, or no recording runs.
        """
        if self._frames is None:
            raise InvalidRequestError(
                "no inspector page is open, so the engine records nothing about its blocks. Open "
                "/inspector first."
            )
        return self._frames.describe_block(block_id, holder_key, with_tokens=with_tokens)
