"""Engines with drafters that have weights, on the devices of a mesh."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import jax

from models import load_model
from models.loading.kernel_encoder import KernelEncoder
from models.loading.load_head import load_eagle3_head, load_mtp_head
from models.loading.loaded_draft_model import LoadedDrafter, LoadedDraftModel
from models.loading.loaded_model import LoadedModel
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.generate import CompiledGenerator, GenerateShape
from paxkv.runner import ModelRunner
from paxkv.runner.batch.device_step import DeviceStep
from paxkv.runner.memory.device_mesh import find_mesh
from paxkv.runner.ranks.rank_group import RankGroup
from tests.end_to_end.engine_runs import run
from tests.end_to_end.head_checkpoints import make_llama_checkpoint, make_mtp_checkpoint
from tests.end_to_end.test_drafts import SAMPLED, make_request
from tests.models.drafters.eagle3_checkpoints import write_eagle3_head
from tests.paxkv.runner.shared_runners import make_runner
from tests.paxkv.runner.tiny_model import VOCAB

METHODS = ("eagle3", "draft_model", "mtp")
MAX_DRAFTS = 3
REQUESTS = [
    make_request("greedy", 5, ignore_eos=True),
    make_request("sampled", 9, **SAMPLED, top_k=20),
    make_request("penalties", 7, **SAMPLED, repetition_penalty=1.3),
    make_request("long", 20, ignore_eos=True),
]


def make_drafting_runner(
    method: str, mesh: jax.sharding.Mesh | None, group: RankGroup | None = None
) -> ModelRunner:
    """A runner of a small model and its drafter, with the same weights in each process."""
    folder, head_folder = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
    _write_checkpoints(method, folder, head_folder)
    model, drafter = _load(method, folder, head_folder, mesh)
    speculative = SpeculativeConfig(
        method=method,
        num_speculative_tokens=MAX_DRAFTS,
        model=None if method == "mtp" else str(head_folder),
        adapts_drafts=False,
    )
    config = RunnerConfig(speculative_config=speculative)
    return make_runner(model, runner_config=config, head=drafter, group=group)


def run_with_drafts(
    runner: ModelRunner, method: str
) -> tuple[dict[str, list[int]], list[Mapping[str, list[int]]]]:
    """The tokens of each request, and the drafts after each step."""
    found: list[Mapping[str, list[int]]] = []
    take_drafts = DeviceStep._take_drafts

    def record(step: DeviceStep, sampled_token_ids: list[list[int]]) -> dict[str, list[int]]:
        found.append(take_drafts(step, sampled_token_ids))
        return found[-1]

    with mock.patch.object(DeviceStep, "_take_drafts", record):
        answers, _ = run(
            runner,
            REQUESTS,
            max_drafts=MAX_DRAFTS,
            use_eagle=method != "draft_model",
            caching=True,
        )
    assert sum(len(draft_ids) for drafts in found for draft_ids in drafts.values()) > 30
    return {req_id: answer.token_ids for req_id, answer in answers.items()}, found


def check_state_drafter() -> None:
    """A model with states is always right about itself, if each device keeps its own states."""
    from tests.end_to_end.parity import make_checkpoint

    folder = Path(tempfile.mkdtemp())
    make_checkpoint("mamba2", folder, 1, is_shallow=True, is_sharp=True)
    speculative = {"method": "draft_model", "model": str(folder)}
    speculative["num_speculative_tokens"] = MAX_DRAFTS
    shape = GenerateShape(batch_size=2, max_prompt_len=20, max_new_tokens=13)
    greedy = SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True)
    found = []
    for mesh in (None, find_mesh(2)):
        model = load_model(folder, dtype="float32", mesh=mesh)
        generator = CompiledGenerator(model, shape, speculative_config=speculative)
        requests = generator._process([[7, 8, 9], [*range(5, 25)]], [greedy] * 2, ())
        inputs = generator._make_inputs(requests)
        outputs = generator._generate(model.params, inputs, generator._draft_params)
        # Each step draws four tokens of a row.
        assert outputs.num_steps == 3
        found.append(outputs.token_ids.tolist())
    assert found[0] == found[1]


def _write_checkpoints(method: str, folder: Path, head_folder: Path) -> None:
    if method == "mtp":
        make_mtp_checkpoint(folder, family="deepseek-v3", seed=1, vocab_size=VOCAB)
        return
    make_llama_checkpoint(folder, seed=2, vocab_size=VOCAB, num_layers=2)
    if method == "eagle3":
        write_eagle3_head(head_folder, vocab_size=VOCAB, draft_vocab_size=20, layer_ids=[1, 2])
    else:
        make_llama_checkpoint(head_folder, seed=2, vocab_size=VOCAB, num_layers=1)


def _load(
    method: str, folder: Path, head_folder: Path, mesh: jax.sharding.Mesh | None
) -> tuple[LoadedModel, LoadedDrafter]:
    model = load_model(folder, dtype="float32", mesh=mesh)
    encoder = KernelEncoder(platform=model.platform, num_devices=1 if mesh is None else mesh.size)
    if method == "mtp":
        return model, load_mtp_head(model, folder, encoder=encoder, mesh=mesh)
    if method == "eagle3":
        return model, load_eagle3_head(model, head_folder, encoder=encoder, mesh=mesh)
    draft_model = load_model(head_folder, dtype="float32", mesh=mesh)
    return model, LoadedDraftModel.of_model(draft_model, model)
