"""Every family answers as live transformers does.

The normal suite compares the families of `EVERY_SETTING` under all settings of `parity`, with few
layers and few programs: one of steps and one of bursts, since compiling takes most of the time.
Together these families have every kind of KV cache. The families of `EVERY_KIND` also run
batch-invariant programs and `CompiledGenerator`. Every other family has the cheap check of
`forward_check`, unless it uses the decoder of a family that has this check.

`pytest -m slow` runs three seeds of every family with all its layers, every size of program, and
programs of every kind. It does the same for the language models of `wholes`.
"""

import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import load_model
from models.registry import family_class
from tests.end_to_end.forward_check import forward_share_of_bound
from tests.end_to_end.parity import (
    TABLE_HEAD,
    ParityEngine,
    Reference,
    make_checkpoint,
    make_reference,
    table_line,
)
from tests.oracles import wholes
from tests.oracles.test_families import DECODERS, LOADED, architecture_of

# `test_serving_matches_transformers` runs a llama, full attention and a gated MLP.
EVERY_SETTING = (
    "gemma4-ple",  # windows and full attention, layers that share keys and values
    "llama4",  # chunks, layers without positions, experts
    "deepseek-v3",  # latents, experts in groups, and a layer without experts
    "glm5-dsa",  # an index, and a layer that uses the choice of another
    "qwen3-next",  # states of Gated DeltaNet, and gated attention
)
EVERY_KIND = ("qwen3-next",)
# The check of these families runs the XLA bodies, because no family above has their ops or options:
# the scans of Mamba and Mamba2, attention with sinks and values narrower than keys, and ALiBi.
XLA_BODIES = ("mamba", "bamba", "mimo-v2-flash-dense", "bloom")
# Their classes only read config.json and name weights otherwise than the family that they derive
# from. `test_dense_config.py` and its neighbours compare what they read with transformers.
SAME_DECODER = (
    *("mistral-window", "qwen2", "seed-oss", "smollm3", "cwm"),  # Llama's
    "qwen3.5-moe",
    "glm4-moe-lite",
    "cohere2",
    "granite-swa",
    "olmo3",
    *("granite-moe-swa", "granite-moe-shared"),
    "gpt-bigcode",
    "apertus1.5",
    "gemma4-unified-text",
)
# Second configs of a family that run no line that the others do not run.
SAME_LINES = (
    *("ministral3-far", "llama3-rope", "hyperclovax-prenorm", "granite-moe-tied", "doge-window"),
    *("qwen4-exp-odd", "zaya-skips"),
)
OTHERS = [family for family in LOADED if family not in {*EVERY_SETTING, *SAME_DECODER, *SAME_LINES}]


@pytest.mark.parametrize("family", OTHERS)
def test_forward_pass_has_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    start = time.process_time()
    implementation = None if family in XLA_BODIES else "reference"
    share = forward_share_of_bound(family, tmp_path, 1, implementation=implementation)
    seconds = time.process_time() - start
    print(f"\n{family:20} {share:8.3f} of bound, {seconds:4.1f} s of CPU time")


@pytest.mark.parametrize("family", SAME_DECODER)
def test_family_without_a_decoder_of_its_own_loads(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, 1, is_shallow=True, is_sharp=False)
    loaded = load_model(tmp_path, dtype="float32")
    own_class = family_class(loaded.config.architecture)
    own = {
        name
        for name, value in vars(own_class).items()
        if callable(getattr(value, "__func__", value))
    }
    assert own <= {"read_config", "weight_rules"}
    compared = {
        family_class(architecture_of(DECODERS[name]())) for name in (*OTHERS, *EVERY_SETTING)
    }
    assert own_class.__mro__[1] in compared


@pytest.mark.parametrize("family", EVERY_SETTING)
def test_family_answers_as_transformers_does(family: str, tmp_path: Path) -> None:
    reference = make_reference(family, tmp_path, 1, is_shallow=True)
    engine = ParityEngine(tmp_path, has_every_size=False, has_every_kind=family in EVERY_KIND)
    print(f"\n{TABLE_HEAD}")
    compare(engine, family, 1, reference)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*LOADED, *wholes.LOADED])
def test_other_weights_answer_so_too_with_the_same_programs(family: str, tmp_path: Path) -> None:
    engine, num_programs = None, None
    print(f"\n{TABLE_HEAD}")
    for seed in (1, 2, 3):
        checkpoint = tmp_path / str(seed)
        reference = make_reference(family, checkpoint, seed)
        if engine is None:
            engine = ParityEngine(checkpoint, has_every_size=True, has_every_kind=True)
        else:
            engine.load(checkpoint)
        compare(engine, family, seed, reference)
        if num_programs is None:
            num_programs = engine.num_programs
        assert engine.num_programs == num_programs > 0


def compare(engine: ParityEngine, family: str, seed: int, reference: Reference) -> None:
    """Prints the rows of one seed."""
    for name, row in engine.compare(reference).items():
        print(table_line(family, seed, name, row, reference))
