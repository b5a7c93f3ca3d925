"""n completions of a prompt are n engine requests that share its blocks, and one output."""

import pytest

from paxkv.client.output_processor import OutputProcessor, ProcessedOutputs
from paxkv.client.parallel_sampling import make_children
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_output import EngineCoreOutput, SchedulerStats, StepOutputs
from paxkv.contracts.engine_request import EngineRequest
from tests.paxkv.text.small_tokenizers import byte_level_tokenizer


def make_request(prompt: list[int] | None = None, **params: object) -> EngineRequest:
    return EngineRequest(
        request_id="7",
        prompt_token_ids=prompt or [112, 113],
        sampling_params=SamplingParams(**{"n": 3, **params}),
        priority=5,
        cache_salt="salt",
    )


class Parent:
    """An output processor with one request for three completions."""

    def __init__(self, output_kind: str, **params: object) -> None:
        self.processor = OutputProcessor(byte_level_tokenizer())
        self.children = self.processor.add_request(
            make_request(**params), prompt="pq", output_kind=output_kind
        )

    def step(self, *outputs: EngineCoreOutput) -> ProcessedOutputs:
        return self.processor.process(
            StepOutputs(
                outputs=list(outputs), stats=SchedulerStats(), timestamp=0.0, monotonic_s=0.0
            )
        )


def output(index: int, text: str, reason: str | None = None, **fields: object) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=f"{index}_7", new_token_ids=list(text.encode()), finish_reason=reason, **fields
    )


def test_child_0_keeps_its_blocks_and_the_others_fork_from_it() -> None:
    children = make_children(make_request())
    assert [child.request_id for child in children] == ["0_7", "1_7", "2_7"]
    assert [child.keep_blocks for child in children] == [True, False, False]
    assert [child.fork_from for child in children] == [None, "0_7", "0_7"]
    for child in children:
        assert child.sampling_params == SamplingParams(n=1)
        assert (child.priority, child.cache_salt) == (5, "salt")
        assert child.prompt_token_ids == [112, 113]


def test_each_child_has_its_own_seed() -> None:
    def seeds(seed: int | None) -> list[int | None]:
        return [child.sampling_params.seed for child in make_children(make_request(seed=seed))]

    assert seeds(5) == [5, 6, 7]
    # Without one the engine derives it from the id.
    assert seeds(None) == [None, None, None]
    assert seeds(2**63 - 2) == [2**63 - 2, 2**63 - 1, -(2**63)]


def test_single_completion_uses_the_request_unchanged() -> None:
    request = make_request(n=1)
    assert make_children(request) == [request]


@pytest.mark.parametrize("fields", [{"prompt": [112]}, {"skip_reading_prefix_cache": True}])
def test_without_shared_tokens_children_do_not_fork_or_keep_blocks(fields: dict) -> None:
    children = make_children(make_request(**fields))
    assert [child.fork_from for child in children] == [None] * 3
    assert not any(child.keep_blocks for child in children)


def test_final_only_output_comes_after_the_last_child_sorted_by_index() -> None:
    parent = Parent("final_only")
    assert parent.step(output(0, "a", num_cached_tokens=1), output(1, "b")).request_outputs == []
    assert parent.step(output(2, "c", "length"), output(0, "d", "stop")).request_outputs == []
    (answer,) = parent.step(output(1, "e", "length")).request_outputs
    assert (answer.request_id, answer.prompt, answer.finished) == ("7", "pq", True)
    assert answer.prompt_token_ids == [112, 113]
    found = [(c.index, c.text, c.token_ids, c.finish_reason) for c in answer.outputs]
    assert found == [
        (0, "a", [97, 100], "stop"),
        (1, "be", [98, 101], "length"),
        (2, "c", [99], "length"),
    ]
    assert parent.processor.num_unfinished_requests == 0


def test_delta_contains_the_new_part_of_each_completion() -> None:
    parent = Parent("delta")
    (first,) = parent.step(output(2, "c"), output(0, "a")).request_outputs
    assert [(c.index, c.text) for c in first.outputs] == [(0, "a"), (2, "c")]
    (second,) = parent.step(output(0, "b", "length"), output(2, "d", "length")).request_outputs
    assert [(c.index, c.text, c.finished) for c in second.outputs] == [
        (0, "b", True),
        (2, "d", True),
    ]
    assert not second.finished
    (last,) = parent.step(output(1, "e", "length")).request_outputs
    assert [(c.index, c.text) for c in last.outputs] == [(1, "e")]
    assert last.finished


def test_cached_tokens_are_the_count_of_child_0() -> None:
    parent = Parent("final_only")
    parent.step(output(0, "a", "length", num_cached_tokens=16))
    parent.step(output(1, "a", "length", num_cached_tokens=99))
    (answer,) = parent.step(output(2, "a", "length", num_cached_tokens=99)).request_outputs
    assert answer.num_cached_tokens == 16


def test_kept_blocks_are_released_after_all_forks_have_started() -> None:
    # Child 0 ends first: its blocks stay until the last fork has its first token.
    parent = Parent("final_only")
    assert parent.step(output(0, "a", "length")).request_ids_to_abort == []
    assert parent.step(output(1, "b")).request_ids_to_abort == []
    assert parent.step(output(2, "c")).request_ids_to_abort == ["0_7"]
    assert parent.step(output(1, "b", "length")).request_ids_to_abort == []
    # Child 0 ends last, after all forks have started.
    parent = Parent("final_only")
    assert parent.step(*(output(i, "a") for i in range(3))).request_ids_to_abort == []
    assert parent.step(output(1, "b", "length")).request_ids_to_abort == []
    assert parent.step(output(0, "b", "length")).request_ids_to_abort == ["0_7"]


def test_failed_child_does_not_delay_the_others() -> None:
    parent = Parent("final_only")
    processed = parent.step(output(0, "", "error"))
    assert (processed.request_outputs, processed.request_ids_to_abort) == ([], [])
    parent.step(output(1, "a", "length"))
    processed = parent.step(output(2, "b", "length"))
    assert processed.request_ids_to_abort == ["0_7"]
    (answer,) = processed.request_outputs
    assert [c.finish_reason for c in answer.outputs] == ["error", "length", "length"]


def test_stop_string_ends_only_one_completion() -> None:
    parent = Parent("delta", stop=["X"])
    processed = parent.step(output(0, "a"), output(1, "bX"), output(2, "c"))
    assert processed.request_ids_to_abort == ["1_7"]
    (answer,) = processed.request_outputs
    assert [(c.text, c.finish_reason) for c in answer.outputs] == [
        ("a", None),
        ("b", "stop"),
        ("c", None),
    ]
    # A step that was in flight is ignored.
    (answer,) = parent.step(output(0, "a"), output(1, "d")).request_outputs
    assert [c.index for c in answer.outputs] == [0]


def test_abort_ends_every_child_and_returns_the_text_so_far() -> None:
    parent = Parent("final_only")
    parent.step(output(0, "a", "length"), output(1, "b"))
    processed = parent.processor.abort(["7", "0_7"])
    # Child 0 too: its blocks may be kept.
    assert processed.request_ids_to_abort == ["0_7", "1_7", "2_7"]
    (answer,) = processed.request_outputs
    assert [(c.text, c.finish_reason) for c in answer.outputs] == [
        ("a", "length"),
        ("b", "abort"),
        ("", "abort"),
    ]
    assert parent.step(output(1, "c"), output(2, "d")).request_outputs == []
    assert parent.processor.num_unfinished_requests == 0


def test_only_child_0_computes_prompt_logprobs() -> None:
    children = make_children(make_request(prompt_logprobs=2))
    assert [c.sampling_params.prompt_logprobs for c in children] == [2, None, None]
    # The other children still fork from child 0.
    assert [child.fork_from for child in children] == [None, "0_7", "0_7"]
