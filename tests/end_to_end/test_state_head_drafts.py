"""Drafters with weights run after steps of models with states: no answer changes."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import LoadedModel, load_model
from models.loading.kernel_encoder import KernelEncoder
from models.loading.load_head import load_eagle3_head
from models.loading.loaded_draft_model import LoadedDrafter, LoadedDraftModel
from paxkv.config.engine_config import RunnerConfig
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.contracts.scheduler_output import ModelRunnerOutput
from paxkv.runner.shapes.scheduled_rows import ScheduledRows
from tests.end_to_end.parity import make_checkpoint
from tests.end_to_end.test_state_drafts import check_drafts, propose_by
from tests.models.drafters.eagle3_checkpoints import write_eagle3_head
from tests.oracles import families
from tests.paxkv.runner.features.oracle_drafter import OracleDrafter, OracleStep
from tests.paxkv.runner.shared_runners import make_runner


@dataclasses.dataclass(frozen=True)
class MixedStep(OracleStep):
    """Keeps some drafts of the head. Most others are right, unlike those of a random head."""

    def finish(self, output: ModelRunnerOutput, results: Mapping[str, object]) -> ModelRunnerOutput:
        own, rng = output.draft_token_ids, self.drafter.rng
        output = super().finish(output, results)
        mixed = {
            req_id: own.get(req_id, draft_ids) if rng.random() < 0.3 else draft_ids
            for req_id, draft_ids in output.draft_token_ids.items()
        }
        self.drafter.num_own += sum(map(len, own.values()))
        return dataclasses.replace(output, draft_token_ids=mixed)


class MixedDrafter(OracleDrafter):
    """
    Attributes:
        num_own: Drafts of the head.
    """

    num_own = 0

    def plan(self, step: ScheduledRows) -> MixedStep:
        return MixedStep(**vars(super().plan(step)))


def make_eagle3(folder: Path, model: LoadedModel) -> LoadedDrafter:
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
    families.make("llama", folder, 2)
    return LoadedDraftModel.of_model(load_model(folder, dtype="float32"), model)


@pytest.mark.parametrize(
    ("method", "make_drafter"),
    [
        ("eagle3", make_eagle3),
        pytest.param("draft_model", make_draft_model, marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_answer(method, make_drafter, tmp_path, monkeypatch):
    make_checkpoint("qwen3.5", tmp_path, 1, is_shallow=True, is_sharp=True)
    model = load_model(tmp_path, dtype="float32")
    head = make_drafter(tmp_path / "drafter", model)
    drafter = MixedDrafter()
    propose_by(drafter, monkeypatch)
    speculative = SpeculativeConfig(
        method=method,
        num_speculative_tokens=MixedDrafter.max_drafts,
        model="not read",
        adapts_drafts=False,
    )
    config = RunnerConfig(speculative_config=speculative)
    check_drafts(make_runner(model, runner_config=config, head=head), drafter)
    assert drafter.num_own > 100
