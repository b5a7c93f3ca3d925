"""SlowScheduler: the rules of scheduling on a SlowKVCache, one request after the other."""

from tests.slow_model import slow_states
from tests.slow_model.slow_kv_cache import SlowKVCache
from tests.slow_model.slow_request import Prediction


class SlowScheduler:
    """Predicts each step of the scheduler. `running` and `waiting` are plain lists."""

    def __init__(
        self,
        kinds,
        num_blocks,
        *,
        max_model_len,
        caching,
        policy,
        max_num_seqs,
        budget,
        chunked,
        threshold,
        must_fit,
        lookahead=0,
        use_eagle=False,
        is_async=False,
        has_connector=False,
        state_share=1,
        state_interval=0,
    ):
        self.kv = SlowKVCache(
            kinds,
            num_blocks,
            max_model_len=max_model_len,
            caching=caching,
            use_eagle=use_eagle,
            state_share=state_share,
            state_interval=state_interval,
        )
        self.max_model_len = max_model_len
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        self.max_budget = budget
        self.chunked = chunked
        self.threshold = threshold
        self.must_fit = must_fit
        self.lookahead = lookahead
        # Whether a step may be scheduled before the tokens of the previous one are known.
        self.is_async = is_async
        # A state does not include drafts, so the next step computes them again.
        self.goes_back = any(kind.name == "state" for kind in kinds)
        # While the last step proposed drafts, no step is scheduled before its tokens are known.
        self.waits_for_drafts = lookahead > 0
        # A connector that saves what each step wrote must see every step.
        self.may_burst = not has_connector
        self.in_flight = []
        self.running = []
        self.waiting = []
        # Ended requests whose blocks are kept for forks, or are still being loaded into.
        self.kept = {}
        self.loading_after_end = {}
        # Ids of requests preempted between steps: by a reset, or by a result without tokens.
        self.preempted_by_reset = []

    def add(self, request):
        if request.fork_from is not None:
            request.source = self.find(request.fork_from)
        self.waiting.append(request)
        self.sort_waiting()

    def sort_waiting(self):
        if self.policy == "priority":
            self.waiting.sort(key=lambda request: request.order)

    def schedule(self, max_decode_steps=1):
        self.budget = self.max_budget
        self.step = Prediction({}, {}, {}, [], [], [])
        self.schedule_running()
        # Preempted requests come first: none is admitted in a step that preempts.
        if not self.step.preempted:
            self.schedule_waiting()
        self.make_burst(max_decode_steps)
        self.kv.finish_step()
        self.step.preempted += self.preempted_by_reset
        self.preempted_by_reset = []
        for request in self.running:
            req_id = request.request_id
            if req_id in self.step.num_scheduled:
                self.step.computed_before[req_id] = request.num_computed
                request.num_computed += self.step.num_scheduled[req_id]
                self.step.wanted[req_id] = request
                num_sure = len(request.tokens) + request.num_placeholders
                if self.is_async and self.step.num_decode_steps > 1:
                    request.num_placeholders += self.step.num_scheduled[req_id]
                elif (
                    self.is_async and not self.waits_for_drafts and request.num_computed == num_sure
                ):
                    request.num_placeholders += 1
        self.in_flight.append(self.step)
        return self.step

    def make_burst(self, max_decode_steps):
        """Makes the step a burst if every scheduled request decodes and no request waits.

        Blocks are never taken from a request for it: if they are short, the steps are halved.
        """
        step = self.step
        scheduled = [r for r in self.running if r.request_id in step.num_scheduled]
        is_quiet = not (self.waiting or step.new or step.resumed or step.preempted or step.drafts)
        if not (self.may_burst and is_quiet and scheduled) or self.waits_for_drafts:
            return
        if any(r.num_computed + 1 != len(r.tokens) + r.num_placeholders for r in scheduled):
            return
        # A request's last token is sampled but never computed.
        most = {r.request_id: r.max_tokens - r.num_computed - 1 for r in scheduled}
        num_steps = min(max_decode_steps, max(most.values()))
        while num_steps > 1:
            ends = [r.num_computed + min(num_steps, most[r.request_id]) for r in scheduled]
            if self.kv.extend(scheduled, ends):
                step.num_decode_steps = num_steps
                step.num_scheduled = {
                    r.request_id: min(num_steps, most[r.request_id]) for r in scheduled
                }
                for request, end in zip(scheduled, ends, strict=True):
                    position = self.kv.switch(request, end)
                    if position is not None:
                        step.slot_switches[request.request_id] = position
                return
            if not self.kv.free_spare():
                num_steps = num_steps // 2

    def schedule_running(self):
        for request in list(self.running):
            if self.budget == 0:
                break
            if request not in self.running:
                continue
            num_new = len(request.tokens) + len(request.drafts) - request.num_computed
            num_new += request.num_placeholders
            num_new = self.within_threshold(num_new)
            num_new = min(num_new, self.budget)
            # Its last token is sampled but never computed, so neither is position max_model_len - 1
            # nor a draft that could not be kept.
            num_new = min(num_new, request.max_tokens - 1 - request.num_computed)
            if num_new <= 0:
                continue
            num_new = self.cut(request, request.num_computed, num_new, len(request.drafts))
            while request in self.running:
                if self.kv.allocate(request, num_new, lookahead=self.lookahead):
                    self.give(request, num_new)
                    break
                is_alone = len(self.running) == 1
                if not self.release_oldest_kept() and not (
                    is_alone and self.drop_last_loaded(request)
                ):
                    self.preempt(self.victim())

    def cut(self, request, computed, num_new, num_drafts=0):
        for states in self.kv.states.values():
            num_new = slow_states.cut(
                *(request, computed, num_new),
                *(states.block_size, self.kv.saves_states, states.interval, num_drafts),
            )
        return num_new

    def within_threshold(self, num_new):
        return min(num_new, self.threshold) if self.threshold else num_new

    def give(self, request, num_new):
        self.step.num_scheduled[request.request_id] = num_new
        self.budget -= num_new
        end = request.num_computed + num_new
        num_drafts = max(0, end - len(request.tokens) - request.num_placeholders)
        if num_drafts:
            self.step.drafts[request.request_id] = request.drafts[:num_drafts]
        request.drafts = []

    def victim(self):
        if self.policy == "priority":
            return max(self.running, key=lambda request: request.order)
        return self.running[-1]

    def preempt(self, victim):
        self.return_to_waiting(victim)
        self.step.preempted.append(victim.request_id)
        self.budget += self.step.num_scheduled.pop(victim.request_id, 0)
        self.step.drafts.pop(victim.request_id, None)

    def return_to_waiting(self, victim):
        """Preempts a running request: it frees its blocks and waits in front of the others."""
        self.running.remove(victim)
        self.discard_loads_in_flight(victim)
        self.kv.free(victim)
        victim.status = "preempted"
        victim.num_computed = 0
        victim.is_loaded = False
        victim.drafts = []
        self.drop_tokens_in_flight(victim)
        self.waiting.insert(0, victim)
        self.sort_waiting()

    def discard_loads_in_flight(self, request):
        """A load in flight may fail, so the blocks it fills must not stay cached without it."""
        for step in self.in_flight:
            if step.wanted.get(request.request_id) is request:
                first = step.loads.get(request.request_id, request.num_computed)
                request.num_computed = min(request.num_computed, first)

    def drop_tokens_in_flight(self, request):
        request.num_placeholders = 0
        for step in self.in_flight:
            if step.wanted.get(request.request_id) is request:
                del step.wanted[request.request_id]

    def schedule_waiting(self):
        """Admits waiting requests from the front until one must stop the scan.

        A request that waits for its own load, source or connector is skipped.
        """
        for request in list(self.waiting):
            if self.budget == 0 or len(self.running) == self.max_num_seqs:
                return
            if not self.try_to_admit(request):
                return

    def try_to_admit(self, request):
        """False if the scan ends at this request."""
        if request.status == "remote":
            if not request.is_loaded:
                return True
            self.use_loaded(request)
        hits, num_hit, external, is_async = None, 0, 0, False
        forked = None
        # If it has computed tokens, its blocks were loaded while it waited.
        if request.num_computed == 0:
            if self.waits_for_source(request):
                return True
            hits, num_hit = self.kv.get_computed(request)
            request.save_at = self.kv.state_to_save(request, num_hit)
            forked = self.forked(request, num_hit)
            if forked is not None:
                hits, num_hit = forked
            else:
                external = self.external_tokens(request, num_hit)
                if external is None:
                    return True
                is_async = external > 0 and request.is_async
        computed = request.num_computed + num_hit + external
        num_new = 0
        if not is_async:
            num_new = self.within_threshold(len(request.tokens) - computed)
            # More tokens than the budget of a step are always split, or it would wait forever.
            may_split = self.chunked or num_new > self.max_budget
            if num_new > self.budget and not may_split:
                return False
            num_new = self.cut(request, computed, min(num_new, self.budget))
        while not self.kv.allocate(
            request,
            num_new,
            num_hit=num_hit,
            hits=hits,
            lookahead=self.admission_lookahead(request),
            external=external,
            delay=is_async,
            # This check protects running requests.
            must_fit=self.must_fit and bool(self.running),
        ):
            # No running request is preempted for it, but kept and loaded blocks are freed.
            if self.release_oldest_kept():
                continue
            if self.running:
                return False
            if self.drop_last_loaded(request):
                continue
            if forked is None:
                return False
            # All other blocks are free, but the copy of a shared block does not fit.
            request.source = None
            return self.try_to_admit(request)
        if is_async:
            request.status = "remote"
            request.num_loading = computed
            return True
        request.num_computed = computed
        if external > 0:
            self.step.loads[request.request_id] = num_hit
        self.admit(request, num_new)
        return True

    def admission_lookahead(self, request):
        return self.lookahead if request.num_computed else 0

    def admit(self, request, num_new):
        self.waiting.remove(request)
        self.running.append(request)
        if request.has_run:
            self.step.resumed.append(request.request_id)
        else:
            self.step.new.append(request.request_id)
            request.num_cached = request.num_computed
        request.has_run = True
        request.source = None
        request.status = "running"
        self.give(request, num_new)

    def external_tokens(self, request, num_hit):
        """Tokens that the connector has beyond the hits, never the last token of the request.

        None while the connector does not know.
        """
        if request.external is None:
            return None
        return max(0, min(request.external, len(request.tokens) - 1) - num_hit)

    def waits_for_source(self, request):
        """Whether a fork should wait; drops a source that is not worth waiting for."""
        source = request.source
        if source is None or (source.status == "finished" and source in self.kept.values()):
            return False
        if source.status in ("finished", "preempted"):
            request.source = None
            return False
        # The blocks it hit may be written in this step, after a fork's copies.
        if source.request_id in self.step.new + self.step.resumed:
            return True
        return source.num_computed < self.num_shared(request)

    def num_shared(self, request):
        """Number of leading tokens equal to the source's, never the fork's last token."""
        if request.skips_reading or request.scope != request.source.scope:
            return 0
        num_shared = 0
        for mine, theirs in zip(request.tokens[:-1], request.source.tokens, strict=False):
            if mine != theirs:
                break
            num_shared += 1
        return num_shared

    def forked(self, request, num_hit):
        """Blocks and number of tokens shared with the source; None if not more than the hit."""
        if request.source is None:
            return None
        num_shared = min(self.num_shared(request), request.source.num_computed)
        if num_shared <= num_hit:
            return None
        source = request.source
        blocks = self.kv.forked(
            source.request_id, num_shared, source.num_computed, is_final=source.has_final_state
        )
        return None if blocks is None else (blocks, num_shared)

    def find(self, request_id):
        for request in [*self.running, *self.waiting, *self.kept.values()]:
            if request.request_id == request_id:
                return request
        return None

    def loaded(self, request_ids):
        """The connector has loaded these requests' blocks."""
        for request_id in list(self.loading_after_end):
            if request_id in request_ids:
                self.kv.free(self.loading_after_end.pop(request_id))
        for request in self.waiting:
            if request.request_id in request_ids:
                request.is_loaded = True

    def use_loaded(self, request):
        """Loaded tokens count as computed, and are cached, once the scan reaches the request."""
        request.status = "preempted" if request.has_run else "waiting"
        request.num_computed = request.num_loading
        if self.kv.caching:
            self.kv.register(request, request.num_computed)

    def update(self, sampled, proposals):
        """Takes the sampled tokens of the oldest step in flight, in the runner's order.

        Returns:
            request id -> (tokens kept, "stop", "length" or None).
        """
        step = self.in_flight[0]
        results = {}
        for req_id, tokens in sampled.items():
            request = step.wanted.get(req_id)
            if request is None:
                continue
            num_drafts = len(step.drafts.get(req_id, []))
            if not tokens:
                if num_drafts:
                    self.preempted_by_reset.append(req_id)
                    self.return_to_waiting(request)
                continue
            if num_drafts:
                num_accepted = 0 if self.goes_back else len(tokens) - 1
                request.num_computed -= num_drafts - num_accepted
            num_awaited = len(tokens) if step.num_decode_steps > 1 else 1
            request.num_placeholders = max(0, request.num_placeholders - num_awaited)
            kept, reason = [], None
            for token in tokens:
                request.tokens.append(token)
                kept.append(token)
                reason = self.reason_to_end(request)
                if reason is not None:
                    break
            results[req_id] = (kept, reason)
            if reason is not None and step.num_decode_steps == 1:
                request.has_final_state = request.num_computed == len(request.tokens) - 1
            if reason is None and self.is_async and self.kv.caching:
                # Caches blocks that were full before their last token was known.
                self.kv.register(request, min(request.num_computed, len(request.tokens)))
            if step.num_decode_steps > 1 and reason is not None:
                # Its last token and all after it may not have been computed.
                request.num_computed = min(request.num_computed, len(request.tokens) - 1)
            if step.num_decode_steps > 1 and self.kv.caching:
                # The same in a burst.
                self.kv.register(request, min(request.num_computed, len(request.tokens)))
            if reason is None and request.num_computed < len(request.tokens):
                request.drafts = list(proposals.get(req_id, []))
        if results and self.lookahead:
            self.waits_for_drafts = bool(proposals)
        self.in_flight.pop(0)
        for req_id, (_, reason) in results.items():
            if reason is not None:
                self.end(step.wanted[req_id])
        return results

    def reason_to_end(self, request):
        num_output = len(request.tokens) - request.num_prompt
        if num_output >= request.min_output and request.tokens[-1] in request.stop_at:
            return "stop"
        return "length" if len(request.tokens) >= request.max_tokens else None

    def end(self, request):
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        if request.request_id in self.preempted_by_reset:
            self.preempted_by_reset.remove(request.request_id)
        is_loading = request.status == "remote" and not request.is_loaded
        if any(
            step.num_decode_steps > 1 and step.wanted.get(request.request_id) is request
            for step in self.in_flight
        ):
            # The rest of the burst may not compute its last token.
            request.num_computed = min(request.num_computed, len(request.tokens) - 1)
        self.discard_loads_in_flight(request)
        self.drop_tokens_in_flight(request)
        request.status = "finished"
        if is_loading:
            self.loading_after_end[request.request_id] = request
        elif request.keep_blocks:
            # A step may have been scheduled for drafts past its end.
            request.num_computed = min(request.num_computed, len(request.tokens))
            self.kept[request.request_id] = request
        else:
            self.kv.free(request)

    def reset(self, reset_running):
        """Empties the cache if no request holds a block, or if its holders may be preempted."""
        loaded = self.loaded_requests()
        if self.loading_after_end or any(r.status == "remote" for r in self.waiting):
            return False
        if (self.running or loaded) and not reset_running:
            return False
        for request in reversed(loaded):
            self.drop_loaded(request)
        for request in reversed(list(self.running)):
            self.preempted_by_reset.append(request.request_id)
            self.return_to_waiting(request)
        while self.release_oldest_kept():
            pass
        return self.kv.pool.reset()

    def release_oldest_kept(self):
        if self.kv.free_spare():
            return True
        if not self.kept:
            return False
        oldest = next(iter(self.kept))
        self.kv.free(self.kept.pop(oldest))
        return True

    def loaded_requests(self):
        """Waiting requests whose load has finished; they hold blocks."""
        return [request for request in self.waiting if request.is_loaded]

    def drop_last_loaded(self, spared):
        loaded = [request for request in self.loaded_requests() if request is not spared]
        if not loaded:
            return False
        self.drop_loaded(loaded[-1])
        return True

    def drop_loaded(self, request):
        if request.status == "remote":
            request.status = "preempted" if request.has_run else "waiting"
        self.kv.free(request)
        request.num_computed = 0
        request.is_loaded = False

    def abort(self, request_id):
        request = self.find(request_id)
        if request is None:
            return
        request.keep_blocks = False
        self.kept.pop(request_id, None)
        self.end(request)
