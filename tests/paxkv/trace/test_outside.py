"""A trace contains the scheduler's questions to other components, and a replay the answers."""

from pathlib import Path

import pytest

from paxkv.contracts.scheduler_output import KVConnectorMetadata, KVTransfer
from paxkv.entrypoints.build_scheduler import make_scheduler, record_scheduler
from paxkv.errors import InvariantError
from paxkv.trace.calls import ScheduleCall
from paxkv.trace.header import TraceHeader
from paxkv.trace.outside import (
    Question,
    QuestionLog,
    RecordedAnswers,
    RecordingConnector,
    RecordingGrammarGate,
)
from paxkv.trace.replayer import replay
from paxkv.trace.trace_file import TraceReader, TraceWriter
from tests.paxkv.trace.small_traces import answer, make_header, make_request, run_to_end

TRANSFER = KVTransfer(request_id="r", block_ids=([3],), start_token_idx=0, num_tokens=8)
METADATA = KVConnectorMetadata(loads=[TRANSFER], saves=[])


class FakeConnector:
    """Loads 8 tokens of every request synchronously, and keeps no blocks of ended requests."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 8, False

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        pass

    def build_connector_meta(self, num_computed_tokens_after_step):
        return METADATA

    def request_finished(self, request, block_ids):
        return False


class SlowGate:
    """Ready at the third call."""

    def __init__(self) -> None:
        self.num_asked = 0

    def is_ready(self, request_id: str) -> bool:
        self.num_asked += 1
        return self.num_asked > 2


def test_questions_and_answers_are_recorded_in_order() -> None:
    log, request = QuestionLog(), make_request("r")
    connector = RecordingConnector(FakeConnector(), log)
    assert connector.get_num_new_matched_tokens(request, 3) == (8, False)
    connector.update_state_after_alloc(request, ([1, 2],), 8)
    assert connector.build_connector_meta({"r": 9}) == METADATA
    assert connector.request_finished(request, ([1],)) is False
    assert RecordingGrammarGate(SlowGate(), log).is_ready("r") is False
    assert log.drain() == [
        Question("get_num_new_matched_tokens", "r", [3], [], (8, False)),
        Question("update_state_after_alloc", "r", [8], [[1, 2]], None),
        Question("build_connector_meta", "", {"r": 9}, [], METADATA),
        Question("request_finished", "r", [], [[1]], False),
        Question("is_ready", "r", [], [], False),
    ]
    assert log.drain() == []


def test_recorded_answers_are_replayed() -> None:
    answers, request = RecordedAnswers(), make_request("r")
    answers.expect(
        [
            Question("get_num_new_matched_tokens", "r", [3], [], (None, False)),
            Question("request_finished", "r", [], [[1]], True),
            Question("is_ready", "q", answer=True),
        ]
    )
    assert answers.get_num_new_matched_tokens(request, 3) == (None, False)
    assert answers.request_finished(request, ([1],)) is True
    assert answers.is_ready("q") is True
    with pytest.raises(InvariantError, match="recorded None"):
        answers.is_ready("q")


def test_question_that_differs_from_the_recording_is_an_error() -> None:
    answers = RecordedAnswers()
    answers.expect([Question("is_ready", "q", answer=True)])
    with pytest.raises(InvariantError, match="'other'.*'q'"):
        answers.is_ready("other")


def record_with_outside(file: Path) -> TraceHeader:
    scheduler = record_scheduler(
        make_header(), file, connector=FakeConnector(), grammar_gate=SlowGate()
    )
    request = make_request("r", 12)
    object.__setattr__(request, "needs_grammar", True)
    scheduler.add_request(request)
    for _ in range(2):
        output = scheduler.schedule()
        assert not output.num_scheduled_tokens
        scheduler.update_from_output(output, answer(scheduler, output))
    run_to_end(scheduler)
    return TraceReader.open(file).header


def test_run_with_connector_and_grammar_gate_replays_without_them(tmp_path: Path) -> None:
    header = record_with_outside(tmp_path / "t")
    assert header.has_connector and header.has_grammar_gate
    summary = replay(TraceReader.open(tmp_path / "t"), make_scheduler)
    # 2 empty steps; 4 of 12 tokens, as 8 are loaded, and a token; the last token; the end.
    assert (summary.num_steps, summary.num_hit_tokens, summary.difference) == (5, 8, None)


def test_replay_finds_a_changed_answer(tmp_path: Path) -> None:
    """The scheduler follows the changed answer, so its decision differs."""
    header = record_with_outside(tmp_path / "t")
    calls = [c for line in TraceReader.open(tmp_path / "t").lines() for c in line.calls]
    writer = TraceWriter(tmp_path / "t", header)
    for call in calls:
        if isinstance(call, ScheduleCall) and call.questions:
            for idx, question in enumerate(call.questions):
                if question.answer == (8, False):
                    call.questions[idx] = Question(question.method, "r", [0], [], (0, False))
        writer.write(call)
    writer.close()
    summary = replay(TraceReader.open(tmp_path / "t"), make_scheduler)
    assert summary.difference_at == "step 3, schedule"
    assert "asked" in summary.difference.got
