"""`GrammarManager`: the matchers of an engine's requests, from their compilation to their end."""

import concurrent.futures
import logging
import os
from collections.abc import Sequence

import llguidance
import llguidance.numpy
import numpy as np

from paxkv.contracts.grammar_bitmask import GrammarBitmask
from paxkv.errors import InvalidRequestError, InvariantError
from paxkv.structured_output.grammar_compiler import GrammarCompiler
from paxkv.structured_outputs_params import StructuredOutputsParams

logger = logging.getLogger(__name__)

# Compiling takes no interpreter, but a processor that steps need too.
_MAX_COMPILING = max(1, min(4, (os.cpu_count() or 2) // 2))
_ANY_TOKEN = -1


class GrammarManager:
    """Not safe for threads but inside: the engine's own calls everything. It is a `GrammarGate`.

    A matcher has taken exactly the output tokens that its request is known to have, also over a
    preemption: tokens on their way to a preempted request are dropped, and drawn again.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._pool = concurrent.futures.ThreadPoolExecutor(
            _MAX_COMPILING, thread_name_prefix="paxkv-grammar"
        )
        # Has threads of its own, so it is made when two requests have grammars.
        self._executor: llguidance.LLExecutor | None = None
        self._compiling: dict[str, concurrent.futures.Future[llguidance.LLMatcher]] = {}
        self._matchers: dict[str, llguidance.LLMatcher] = {}
        self._failed: dict[str, str] = {}

    @property
    def num_requests(self) -> int:
        """Requests with a grammar, or whose failure nobody has been told of."""
        return len(self._compiling) + len(self._matchers) + len(self._failed)

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    def add(self, request_id: str, params: StructuredOutputsParams) -> None:
        """Begins to compile a request's grammar."""
        self._compiling[request_id] = self._pool.submit(self._compiler.compile, params)

    def is_ready(self, request_id: str) -> bool:
        """See `GrammarGate`."""
        if request_id in self._matchers:
            return True
        future = self._compiling.get(request_id)
        if future is None or not future.done():
            return False
        del self._compiling[request_id]
        try:
            self._matchers[request_id] = future.result()
        except InvalidRequestError as error:
            # `InputProcessor` should have refused it.
            self._fail(request_id, str(error))
            return False
        return True

    def take_failed(self) -> dict[str, str]:
        """Requests that cannot go on, each with the reason; each is told of once."""
        failed, self._failed = self._failed, {}
        return failed

    def make_bitmask(self, request_ids: Sequence[str]) -> GrammarBitmask:
        """What the grammars of requests allow next.

        A request whose grammar grew over its limits may draw anything, and is among `take_failed`.
        """
        bitmask_np = np.full(
            (len(request_ids), self._compiler.num_mask_words), _ANY_TOKEN, np.int32
        )
        rows = []
        for row, request_id in enumerate(request_ids):
            matcher = self._matchers.get(request_id)
            if matcher is None:
                if request_id not in self._failed:
                    raise InvariantError(f"request {request_id!r} runs without its grammar.")
                continue
            rows.append((matcher, row))
        if len(rows) == 1:
            llguidance.numpy.fill_next_token_bitmask(rows[0][0], bitmask_np, rows[0][1])
        elif rows:
            self._executor = self._executor or llguidance.LLExecutor()
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, rows, bitmask_np)
        for matcher, row in rows:
            if matcher.is_error():
                bitmask_np[row] = _ANY_TOKEN
                self._fail(request_ids[row], matcher.get_error())
        return GrammarBitmask(req_ids=list(request_ids), bitmask_np=bitmask_np)

    def advance(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Takes a request's new output tokens; one that its grammar has no place for ends it."""
        matcher = self._matchers.get(request_id)
        if matcher is not None and not matcher.consume_tokens(list(token_ids)):
            self._fail(request_id, matcher.get_error() or "a token has no place in it")

    def remove(self, request_id: str) -> None:
        """Forgets a request; unknown ones are ignored."""
        future = self._compiling.pop(request_id, None)
        if future is not None:
            future.cancel()
        self._matchers.pop(request_id, None)
        self._failed.pop(request_id, None)

    def close(self) -> None:
        """Compiles nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fail(self, request_id: str, reason: str) -> None:
        logger.warning("the grammar of request %r cannot go on: %s", request_id, reason)
        self._matchers.pop(request_id, None)
        self._failed[request_id] = f"the grammar cannot go on: {' '.join(reason.split())[:400]}"
