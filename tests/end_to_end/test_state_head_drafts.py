"""Drafters with weights run after steps of models with states: no answer changes."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import LoadedModel, load_model
from models.loading.kernel_encoder import KernelEncoder
from models.loading.load_head import load_eagle3_head, load_mtp_head
from models.loading.loaded_draft_model import LoadedDrafter, LoadedDraftModel
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.contracts.scheduler_output import ModelRunnerOutput
from paxkv.runner import ModelRunner
from paxkv.runner.shapes.scheduled_rows import ScheduledRows
from tests.end_to_end.engine_runs import run
from tests.end_to_end.test_state_drafts import check_drafts, make_requests, propose_by
from tests.models.drafters.eagle3_checkpoints import write_eagle3_head
from tests.models.drafters.head_stepper import HeadStepper
from tests.oracles import families
from tests.paxkv.runner.features.oracle_drafter import OracleDrafter, OracleStep
from tests.paxkv.runner.shared_runners import make_runner


@dataclasses.dataclass(frozen=True)
class MixedStep(OracleStep):
    """Keeps some drafts of the random head, and replaces the others by drafts of the oracle.

    Most drafts of the oracle are right.
    """

    def finish(self, output: ModelRunnerOutput, results: Mapping[str, object]) -> ModelRunnerOutput:
        own, rng = output.draft_token_ids, self.drafter.rng
        for req_id, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if token_ids:
                num_outputs = self.num_outputs[req_id] + len(token_ids)
                self.drafter.found.append((req_id, num_outputs, own.get(req_id, [])))
        output = super().finish(output, results)
        mixed = {
            req_id: own.get(req_id, draft_ids) if rng.random() < 0.3 else draft_ids
            for req_id, draft_ids in output.draft_token_ids.items()
        }
        return dataclasses.replace(output, draft_token_ids=mixed)


class MixedDrafter(OracleDrafter):
    """Mixes the drafts of a head and of the oracle (`MixedStep`).

    Attributes:
        found: A request id, its number of output tokens, and the head's own drafts after them, for
            each request of each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = []

    def plan(self, step: ScheduledRows) -> MixedStep:
        return MixedStep(**vars(super().plan(step)))


def make_mtp(folder: Path, model: LoadedModel) -> LoadedDrafter:
    return load_mtp_head(model, folder, encoder=KernelEncoder(platform=model.platform))


def make_eagle3(folder: Path, model: LoadedModel) -> LoadedDrafter:
    folder = folder / "head"
    write_eagle3_head(
        folder,
        vocab_size=families.VOCAB,
        draft_vocab_size=50,
        layer_ids=[1, 2],
        hidden_size=model.config.hidden_size,
        num_attention_heads=4,
    )
    return load_eagle3_head(model, folder, encoder=KernelEncoder(platform=model.platform))


def make_draft_model(folder: Path, model: LoadedModel) -> LoadedDrafter:
    families.make("llama", folder / "smaller", 2)
    return LoadedDraftModel.of_model(load_model(folder / "smaller", dtype="float32"), model)


@pytest.mark.parametrize(
    ("family", "make_drafter"),
    [
        ("qwen3.5", make_mtp),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("qwen3-next", make_mtp),
                ("qwen3.5-moe", make_mtp),
                ("qwen3.5", make_eagle3),
                ("qwen3.5", make_draft_model),
            )
        ),
    ],
)
def test_drafts_change_no_answer(family, make_drafter, tmp_path, monkeypatch):
    families.make_mtp(family, tmp_path, seed=1)
    model = load_model(tmp_path, dtype="float32")
    head = make_drafter(tmp_path, model)
    drafter = MixedDrafter()
    propose_by(drafter, monkeypatch)
    speculative = SpeculativeConfig(
        method=make_drafter.__name__.removeprefix("make_"),
        num_speculative_tokens=MixedDrafter.max_drafts,
        model=None if make_drafter is make_mtp else "not read",
        adapts_drafts=False,
    )
    config = RunnerConfig(speculative_config=speculative)
    runner = make_runner(model, runner_config=config, head=head)
    check_drafts(runner, drafter)
    if head.reads_hidden:
        check_own_drafts(runner, drafter, HeadStepper(model, head, max_tokens=40, width=40))


@pytest.mark.slow
@pytest.mark.parametrize("make_drafter", [make_mtp, make_eagle3])
def test_heads_propose_drafts_in_bursts(make_drafter, tmp_path, monkeypatch):
    """A step of the largest burst computes more tokens than a step with prompts may."""
    families.make_mtp("qwen3.5", tmp_path, seed=1)
    model = load_model(tmp_path, dtype="float32")
    propose_by(None, monkeypatch)
    speculative = SpeculativeConfig(
        method=make_drafter.__name__.removeprefix("make_"),
        num_speculative_tokens=MixedDrafter.max_drafts,
        model=None if make_drafter is make_mtp else "not read",
        drafts_in_bursts=True,
        adapts_drafts=False,
    )
    config = RunnerConfig(speculative_config=speculative)
    runner = make_runner(model, runner_config=config, head=make_drafter(tmp_path, model))
    plain, requests = make_runner(model), make_requests()[:3]
    answers, _ = run(
        runner, requests, max_drafts=MixedDrafter.max_drafts, max_decode_burst=8, is_async=True
    )
    for request in requests:
        wanted = run(plain, [request])[0][request.request_id]
        assert answers[request.request_id].token_ids == wanted.token_ids
    assert sum(answer.num_draft_tokens for answer in answers.values()) > len(requests)


def check_own_drafts(runner: ModelRunner, drafter: MixedDrafter, stepper: HeadStepper) -> None:
    """Compares drafts with those of a head without a paged cache.

    Some drafts before them were accepted, and others rejected. There are no prefix hits: after one,
    a position of the head may have keys and values for another next token.
    """
    requests = {request.request_id: request for request in make_requests()[:3]}
    drafter.found.clear()
    drafter.wrong_rate = 0.3
    run(runner, [*requests.values()], max_drafts=drafter.max_drafts)
    num_whole = 0
    for req_id, num_outputs, draft_ids in drafter.found:
        known = [*requests[req_id].prompt_token_ids, *drafter.truth[req_id][:num_outputs]]
        assert draft_ids == stepper.drafts(known, drafter.max_drafts)[: len(draft_ids)]
        num_whole += len(draft_ids) == drafter.max_drafts
    assert num_whole > len(drafter.found) / 2 > 5
