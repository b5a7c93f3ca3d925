"""InspectionRecorder: what an engine does, as frames, while somebody asks for them."""

import secrets
import time
from collections.abc import Sequence

from paxkv.contracts.engine_output import EngineCoreOutput
from paxkv.contracts.observation import BlockDetails, Inspection
from paxkv.errors import InvalidRequestError
from paxkv.inspector.frame_maker import FrameMaker
from paxkv.inspector.inspected_scheduler import InspectedScheduler

# Without a question for so long, nobody looks any more: a page that vanished costs nothing.
LEASE_S = 3.0


class InspectionRecorder:
    """Answers who looks at an engine; collects nothing while nobody does."""

    def __init__(self, scheduler: InspectedScheduler) -> None:
        self._scheduler = scheduler
        # None while nobody looks.
        self._frames: FrameMaker | None = None
        self._lease_end_s = 0.0
        # A frame of an engine that was built anew must not look like the next one of the old.
        self._seq = secrets.randbits(32)

    @property
    def is_active(self) -> bool:
        return self._frames is not None

    def on_arrival(self, request_id: str, arrival_time: float) -> None:
        """A request was taken in."""
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
        """A step came home; see `StepMeter.on_step`."""
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
        """What changed since the call that answered `after_seq`, or everything.

        Whoever asks first, or missed an answer, gets a snapshot. Collecting goes on for
        `LEASE_S` after each call.

        Args:
            keeps_tokens: So that `inspect_block` knows them also of blocks that nobody holds, and
                that were cached since the first call.
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
        """One block as it is now; see `FrameMaker.describe_block`.

        Raises:
            InvalidRequestError: There is no such block, or nobody looks.
        """
        if self._frames is None:
            raise InvalidRequestError(
                "nobody looks at this engine: blocks are described while an inspector page is open."
            )
        return self._frames.describe_block(block_id, holder_key, with_tokens=with_tokens)
