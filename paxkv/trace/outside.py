"""Records a scheduler's questions to the KV connector and the grammar gate, and replays answers."""

from collections import deque
from typing import Literal

import msgspec

from paxkv.contracts.protocols import CacheRequest, GrammarGate, KVConnector
from paxkv.contracts.scheduler_output import KVConnectorMetadata
from paxkv.errors import InvariantError

Answer = tuple[int | None, bool] | bool | KVConnectorMetadata | None


class Question(msgspec.Struct, array_like=True, frozen=True):
    """A question and its answer: `[method, request, numbers, blocks, answer]`.

    Args:
        request_id: Empty for a question about the whole step.
        numbers: The token counts in the arguments.
        block_ids: The block ids in the arguments, by group.
    """

    method: Literal[
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "request_finished",
        "is_ready",
    ]
    request_id: str
    numbers: list[int] | dict[str, int] = []
    block_ids: list[list[int]] = []
    answer: Answer = None


class QuestionLog:
    """Collects questions with their answers."""

    def __init__(self) -> None:
        self._questions: list[Question] = []

    def record(self, question: Question) -> None:
        self._questions.append(question)

    def drain(self) -> list[Question]:
        """Returns and removes the questions since the last call."""
        questions, self._questions = self._questions, []
        return questions


class RecordingConnector:
    """A `KVConnector` that forwards calls to another one and records them."""

    def __init__(self, connector: KVConnector, log: QuestionLog) -> None:
        self._connector = connector
        self._log = log

    def get_num_new_matched_tokens(
        self, request: CacheRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        answer = self._connector.get_num_new_matched_tokens(request, num_computed_tokens)
        self._log.record(_matched_tokens(request, num_computed_tokens, answer))
        return answer

    def update_state_after_alloc(
        self, request: CacheRequest, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        self._connector.update_state_after_alloc(request, block_ids, num_external_tokens)
        self._log.record(_after_alloc(request, block_ids, num_external_tokens))

    def build_connector_meta(
        self, num_computed_tokens_after_step: dict[str, int]
    ) -> KVConnectorMetadata:
        answer = self._connector.build_connector_meta(num_computed_tokens_after_step)
        self._log.record(_meta(num_computed_tokens_after_step, answer))
        return answer

    def request_finished(self, request: CacheRequest, block_ids: tuple[list[int], ...]) -> bool:
        answer = self._connector.request_finished(request, block_ids)
        self._log.record(_finished(request, block_ids, answer))
        return answer


class RecordingGrammarGate:
    """A `GrammarGate` that forwards calls to another one and records them."""

    def __init__(self, grammar_gate: GrammarGate, log: QuestionLog) -> None:
        self._grammar_gate = grammar_gate
        self._log = log

    def is_ready(self, request_id: str) -> bool:
        answer = self._grammar_gate.is_ready(request_id)
        self._log.record(Question("is_ready", request_id, answer=answer))
        return answer


class RecordedAnswers:
    """A `KVConnector` and a `GrammarGate` that give recorded answers.

    Raises:
        InvariantError: A question differs from the recorded one.
    """

    def __init__(self) -> None:
        self._recorded: deque[Question] = deque()

    def expect(self, questions: list[Question]) -> None:
        """Sets the questions that the scheduler must ask in its next call."""
        self._recorded = deque(questions)

    def get_num_new_matched_tokens(
        self, request: CacheRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._answer(_matched_tokens(request, num_computed_tokens))

    def update_state_after_alloc(
        self, request: CacheRequest, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        self._answer(_after_alloc(request, block_ids, num_external_tokens))

    def build_connector_meta(
        self, num_computed_tokens_after_step: dict[str, int]
    ) -> KVConnectorMetadata:
        return self._answer(_meta(num_computed_tokens_after_step))

    def request_finished(self, request: CacheRequest, block_ids: tuple[list[int], ...]) -> bool:
        return self._answer(_finished(request, block_ids))

    def is_ready(self, request_id: str) -> bool:
        return self._answer(Question("is_ready", request_id))

    def _answer(self, question: Question) -> Answer:
        recorded = self._recorded.popleft() if self._recorded else None
        if recorded is None or msgspec.structs.replace(recorded, answer=None) != question:
            raise InvariantError(
                f"the scheduler asked {question}, but the trace recorded {recorded} here."
            )
        return recorded.answer


def _matched_tokens(
    request: CacheRequest, num_computed_tokens: int, answer: Answer = None
) -> Question:
    name, req_id = "get_num_new_matched_tokens", request.request_id
    return Question(name, req_id, [num_computed_tokens], answer=answer)


def _after_alloc(
    request: CacheRequest, block_ids: tuple[list[int], ...], num_external_tokens: int
) -> Question:
    name, req_id = "update_state_after_alloc", request.request_id
    return Question(name, req_id, [num_external_tokens], list(block_ids))


def _meta(num_computed_tokens_after_step: dict[str, int], answer: Answer = None) -> Question:
    return Question("build_connector_meta", "", num_computed_tokens_after_step, answer=answer)


def _finished(
    request: CacheRequest, block_ids: tuple[list[int], ...], answer: Answer = None
) -> Question:
    return Question("request_finished", request.request_id, [], list(block_ids), answer)
