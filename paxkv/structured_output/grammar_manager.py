"""`GrammarManager`: compiles and keeps the grammars of an engine's requests."""

import concurrent.futures
import itertools
import logging
import os
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType

import llguidance
import llguidance.numpy
import numpy as np

from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.executor import GrammarBitmask
from paxkv.errors import InvalidRequestError, InvariantError
from paxkv.structured_output.bound_request import BoundRequest, GrammarEnd
from paxkv.structured_output.digit_limit import DigitLimit
from paxkv.structured_output.grammar_compiler import GrammarCompiler
from paxkv.structured_output.thoughts import Thoughts
from paxkv.structured_output.token_limits import TokenLimits

logger = logging.getLogger(__name__)

# Compiling does not need the interpreter's lock, but it needs a processor, as steps do.
_MAX_COMPILING = max(1, min(4, (os.cpu_count() or 2) // 2))
_ANY_TOKEN = -1
_NO_DRAFTS: Mapping[str, Sequence[int]] = MappingProxyType({})
# Kinds of `StructuredOutputsParams` whose whole output is JSON.
_JSON_KINDS = ("json", "json_object")


class GrammarManager:
    """A `GrammarGate`. All methods must be called from the engine's thread.

    A request's matcher has advanced by exactly the output tokens that the host knows. This holds
    after a preemption too, because the tokens of steps in flight are dropped and sampled again.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._pool = concurrent.futures.ThreadPoolExecutor(
            _MAX_COMPILING, thread_name_prefix="paxkv-grammar"
        )
        self._heavy_pool = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="paxkv-heavy-grammar"
        )
        # Has its own threads, so it is made only when two requests have grammars.
        self._executor: llguidance.LLExecutor | None = None
        self._compiling: dict[str, concurrent.futures.Future[BoundRequest]] = {}
        self._bound: dict[str, BoundRequest] = {}
        self._ended: dict[str, GrammarEnd] = {}
        # Requests whose form ends within the drafts of the step in flight: the number of drafts
        # after which no token may follow, and the end. The entry counts only if the step returns
        # more tokens than this number.
        self._ends_after: dict[str, tuple[int, GrammarEnd]] = {}

    @property
    def num_requests(self) -> int:
        """Requests with a grammar, or with an end that `drain_ended` has not returned yet."""
        return len(self._compiling) + len(self._bound) + len(self._ended)

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    def add(self, request: EngineRequest) -> None:
        """Starts to compile a request's grammar."""
        params = request.sampling_params.structured_outputs
        is_long = request.has_heavy_grammar and not self._compiler.is_cached(params)
        pool = self._heavy_pool if is_long else self._pool
        self._compiling[request.request_id] = pool.submit(self._bind, request)

    def _bind(self, request: EngineRequest) -> BoundRequest:
        """Compiles a request's grammar. Runs in a thread of a pool."""
        compiler, params = self._compiler, request.sampling_params.structured_outputs
        matcher = compiler.compile(params)
        thoughts = None
        if params.thoughts != "none":
            thoughts = Thoughts(compiler.thought_tokens(), is_begun=params.thoughts == "begun")
        limits = TokenLimits(request, compiler.num_mask_words)
        digit_limit = None
        if params.kind in _JSON_KINDS:
            digit_limit = DigitLimit(compiler.token_texts(), compiler.num_mask_words)
        return BoundRequest(
            matcher,
            limits,
            form=params,
            token_texts=compiler.token_texts() if limits.has_any else None,
            thoughts=thoughts,
            digit_limit=digit_limit,
            eos_token_ids=compiler.eos_token_ids,
        )

    def is_ready(self, request_id: str) -> bool:
        """See `GrammarGate`."""
        if request_id in self._bound:
            return True
        future = self._compiling.get(request_id)
        if future is None or not future.done():
            return False
        del self._compiling[request_id]
        try:
            self._bound[request_id] = future.result()
        except InvalidRequestError as error:
            # Unexpected, because `InputProcessor` rejects such grammars.
            self._end(request_id, GrammarEnd(error=str(error)))
            return False
        return True

    def drain_ended(self, awaited: Container[str] = ()) -> dict[str, GrammarEnd]:
        """Returns the requests whose grammars have ended, each once, except those in `awaited`."""
        ended = {req_id: end for req_id, end in self._ended.items() if req_id not in awaited}
        for req_id in ended:
            del self._ended[req_id]
        return ended

    def make_bitmask(
        self, request_ids: Sequence[str], drafts: Mapping[str, Sequence[int]] = _NO_DRAFTS
    ) -> GrammarBitmask:
        """Returns the tokens that the grammars of requests allow next.

        A request with drafts has a row for the next token, and a row for the token after each of
        its drafts. If no token is allowed, the row allows all tokens, and the request ends
        (`drain_ended`): its form is complete, or its grammar exceeded a limit, or its own settings
        leave no token.
        """
        rows_of = [1 + len(drafts.get(request_id, ())) for request_id in request_ids]
        bitmask_np = np.full((sum(rows_of), self._compiler.num_mask_words), _ANY_TOKEN, np.int32)
        first_rows = [0, *itertools.accumulate(rows_of)]
        self._fill_next(request_ids, first_rows, bitmask_np)
        for request_id, first_row in zip(request_ids, first_rows, strict=False):
            if drafts.get(request_id) and request_id in self._bound:
                draft_ids = drafts[request_id]
                rows_np = bitmask_np[first_row + 1 :][: len(draft_ids)]
                self._fill_after_drafts(request_id, draft_ids, rows_np)
        req_ids = [
            request_id
            for request_id, num_rows in zip(request_ids, rows_of, strict=True)
            for _ in range(num_rows)
        ]
        return GrammarBitmask(req_ids=req_ids, bitmask_np=bitmask_np)

    def _fill_after_drafts(
        self,
        request_id: str,
        draft_ids: Sequence[int],
        rows_np: np.ndarray,  # i32[len(draft_ids), num_words]
    ) -> None:
        """Fills the row of the token after each draft.

        Stops at the draft that ends the request, or after which no token may follow. Its row and
        the rows after it allow all tokens. `advance` drops the tokens that such rows give.
        """
        bound = self._bound[request_id].copy()
        for num_taken, (draft_id, row_np) in enumerate(zip(draft_ids, rows_np, strict=True), 1):
            end = bound.advance([draft_id])
            if end is None:
                if bound.mask_matcher is not None:
                    llguidance.numpy.fill_next_token_bitmask(bound.mask_matcher, row_np[None], 0)
                end = bound.narrow(row_np)
            if end is not None:
                row_np[:] = _ANY_TOKEN
                self._ends_after[request_id] = (num_taken, end)
                return

    def _fill_next(
        self,
        request_ids: Sequence[str],
        rows: Sequence[int],
        bitmask_np: np.ndarray,  # i32[num_rows, num_words]
    ) -> None:
        """Fills the row of each request's next token."""
        bound_rows, matcher_rows = [], []
        for row, request_id in zip(rows, request_ids, strict=False):
            bound = self._bound.get(request_id)
            if bound is None:
                if request_id not in self._ended:
                    raise InvariantError(f"request {request_id!r} runs without its grammar.")
                continue
            bound_rows.append((bound, row, request_id))
            if bound.mask_matcher is not None:
                matcher_rows.append((bound.mask_matcher, row))
        if len(matcher_rows) == 1:
            ((matcher, row),) = matcher_rows
            llguidance.numpy.fill_next_token_bitmask(matcher, bitmask_np, row)
        elif matcher_rows:
            self._executor = self._executor or llguidance.LLExecutor()
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, matcher_rows, bitmask_np)
        for bound, row, request_id in bound_rows:
            end = bound.narrow(bitmask_np[row])
            if end is not None:
                bitmask_np[row] = _ANY_TOKEN
                self._end(request_id, end)

    def ends_within(self, request_id: str, num_tokens: int) -> bool:
        """Whether a request's form ends before the last of `num_tokens` tokens of a step."""
        return request_id in self._ends_after and num_tokens > self._ends_after[request_id][0]

    def advance(self, request_id: str, token_ids: Sequence[int]) -> int:
        """Advances a request by its new output tokens. They may end its form: see `drain_ended`.

        Returns:
            The number of tokens that belong to the answer. Tokens after the end of the form do not,
            and neither does a token that the grammar rejects.
        """
        bound = self._bound.get(request_id)
        num_kept, end = len(token_ids), None
        if self.ends_within(request_id, num_kept):
            num_kept, end = self._ends_after[request_id]
        self._ends_after.pop(request_id, None)
        if bound is None:
            return num_kept
        for num_taken, token_id in enumerate(token_ids[:num_kept], 1):
            ended = bound.advance([token_id])
            if ended is not None:
                self._end(request_id, ended)
                return num_taken if ended.error is None else num_taken - 1
        if end is not None:
            self._end(request_id, end)
        return num_kept

    def remove(self, request_id: str) -> None:
        """Removes a request; an unknown id is ignored."""
        future = self._compiling.pop(request_id, None)
        if future is not None:
            future.cancel()
        self._bound.pop(request_id, None)
        self._ended.pop(request_id, None)
        self._ends_after.pop(request_id, None)

    def close(self) -> None:
        """Cancels the compilations that have not started."""
        for pool in (self._pool, self._heavy_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _end(self, request_id: str, end: GrammarEnd) -> None:
        self._bound.pop(request_id, None)
        if end.error is not None:
            logger.info("request %r ends: %s", request_id, end.error)
        self._ended[request_id] = end
