"""Decode bursts: several decode steps of the same requests, computed by one program."""

from paxkv.contracts.protocols import KVConnector
from paxkv.errors import InvariantError
from paxkv.kv_cache.manager import KVCacheBlocks, KVCacheManager
from paxkv.scheduler.request import Request
from paxkv.scheduler.request_queue import RequestQueue
from paxkv.scheduler.step_plan import StepPlan


class DecodeBursts:
    """Turns steps in which every request decodes into bursts.

    Args:
        connector: Prevents bursts, because it must save after every step what the step has written.
        may_change_logits: Whether the runner can change logits within a burst. False when traces
            of version 2 or below are replayed.

    Attributes:
        are_possible: False with a connector.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        connector: KVConnector | None,
        *,
        may_change_logits: bool = True,
    ) -> None:
        self._manager = manager
        self._may_change_logits = may_change_logits
        self.are_possible = connector is None

    def extend(self, plan: StepPlan, waiting: RequestQueue, max_decode_steps: int) -> None:
        """Turns the step into a burst, if every request decodes one token and no request waits.

        The burst has up to `max_decode_steps` steps. It is shortened until the free blocks suffice,
        because no request is preempted for a burst. Each request gets one slot per step, or fewer
        if it reaches its maximum length in the burst.
        """
        if max_decode_steps <= 1 or not self.are_possible or waiting:
            return
        if plan.new or plan.resumed or plan.spec_decode_tokens or plan.preempted_req_ids:
            return
        requests = list(plan.running.values())
        if not requests or not all(map(_decodes_last_token, requests)):
            return
        if any(request.needs_single_steps for request in requests):
            return
        if not self._may_change_logits and any(request.changes_logits for request in requests):
            return
        # The last token of a request is sampled but never computed.
        num_left = [
            request.max_num_tokens - 1 - request.num_computed_tokens for request in requests
        ]
        num_steps = min(max_decode_steps, max(num_left))
        while num_steps > 1 and not self._has_room(requests, num_left, num_steps):
            if not self._manager.free_spare_slot():
                num_steps //= 2
        if num_steps > 1:
            plan.num_decode_steps = num_steps
            for request, num_left_tokens in zip(requests, num_left, strict=True):
                self._give_slots(plan, request, min(num_steps, num_left_tokens))
            for request in requests:
                self._save_state(plan, request)

    def finish_burst(self, request: Request, num_sampled_tokens: int, num_wanted: int) -> None:
        """Caches the blocks that a request filled in a burst, now that its tokens are known.

        Raises:
            InvariantError: The request continues, but got fewer tokens than were scheduled. Its
                next step would need a token that was not sampled.
        """
        if not request.is_finished and num_sampled_tokens != num_wanted:
            raise InvariantError(
                f"{request!r} got {num_sampled_tokens} tokens from a burst and did not end; "
                f"{num_wanted} were scheduled."
            )
        if request.is_finished:
            # The device may not have computed the tokens after the one that ended the request.
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        num_known_tokens = min(request.num_computed_tokens, request.num_tokens)
        self._manager.cache_blocks(request, num_known_tokens)
        request.set_tokens_before_allocate(self._manager.get_max_tokens_before_allocate(request))

    def _has_room(self, requests: list[Request], num_left: list[int], num_steps: int) -> bool:
        num_blocks = 0
        for request, num_left_tokens in zip(requests, num_left, strict=True):
            num_tokens = request.num_computed_tokens + min(num_steps, num_left_tokens)
            if num_tokens > request.max_tokens_before_allocate:
                num_blocks += self._manager.get_num_blocks_to_reserve(request, num_tokens)
        return num_blocks <= self._manager.block_pool.get_num_free_blocks()

    def _give_slots(self, plan: StepPlan, request: Request, num_new_tokens: int) -> None:
        req_id = request.request_id
        plan.num_scheduled_tokens[req_id] = num_new_tokens
        num_tokens = request.num_computed_tokens + num_new_tokens
        if num_tokens <= request.max_tokens_before_allocate:
            return
        new_blocks = self._manager.reserve_slots(request, num_tokens)
        if new_blocks.is_empty():
            return
        num_tokens = self._manager.get_max_tokens_before_allocate(request, is_step_decided=True)
        request.set_tokens_before_allocate(num_tokens)
        self._add_blocks(plan, req_id, new_blocks)

    def _save_state(self, plan: StepPlan, request: Request) -> None:
        """Saves the request's state in the middle of the burst, if the pool has room for it."""
        req_id = request.request_id
        num_tokens = request.num_computed_tokens + plan.num_scheduled_tokens[req_id]
        switch = self._manager.switch_slot(request, num_tokens)
        if switch is not None:
            plan.slot_switches[req_id], new_slot = switch
            self._add_blocks(plan, req_id, new_slot)

    def _add_blocks(self, plan: StepPlan, req_id: str, new_blocks: KVCacheBlocks) -> None:
        # `schedule_running` may have allocated a block in this step already.
        first = plan.blocks.get(req_id, self._manager.empty_kv_cache_blocks)
        plan.blocks[req_id] = KVCacheBlocks(
            tuple(
                (*of_first, *new) if of_first and new else of_first or new
                for of_first, new in zip(first.blocks, new_blocks.blocks, strict=True)
            )
        )


def _decodes_last_token(request: Request) -> bool:
    """Whether the token scheduled now is the request's last one, so the step samples the next."""
    num_known_or_sure = request.num_tokens + request.num_output_placeholders
    return request.num_computed_tokens + 1 == num_known_or_sure
