"""Kernels in fewer bits: near the model's own logits, and everything else as it was."""

import importlib.resources
from pathlib import Path
from random import Random

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from models import KernelSettings, LoadedModel, load_model
from models.demo.data import sample_conversation
from models.demo.packing import encode_conversations
from models.errors import ModelError
from models.loading.kernel_encoder import KernelEncoder
from models.platforms import CPU, Platform
from models.stored_kernels.bits16 import Bits16Kernel
from models.stored_kernels.rounded_int8 import RoundedInt8Kernel
from models.stored_kernels.use_kernel import as_stored_kernel, multiply
from tests import on_device
from tests.oracles.paged_stepper import PagedStepper

DEMO = Path(str(importlib.resources.files("models.demo") / "checkpoint"))
# Largest difference over the norm of the logits, as in docs/guide/tuning.md, and what none has.
WORST_ERROR = {"bfloat16": 0.01, "int8": 0.05}
LEAST_ERROR = 1e-5
# Quantization and group size -> increase of the perplexity, and largest error of a logit over the
# largest logit; as in docs/guide/tuning.md.
QUANTIZED = {
    ("int8", 128): (0.01, 0.02),
    ("fp8", 128): (0.01, 0.06),
    ("int4", 128): (0.02, 0.2),
    ("int4", 32): (0.02, 0.2),
}
MAX_TOKENS = 48  # of a conversation, as of the stepper's requests


@pytest.fixture(scope="module")
def own_model():
    return load_model(DEMO)


@pytest.fixture(scope="module")
def own_stepper(own_model):
    return PagedStepper(own_model)


@pytest.mark.parametrize("product_dtype", WORST_ERROR)
def test_logits_are_as_near_as_stated(own_model, own_stepper, product_dtype):
    rounded = load_model(DEMO, product_dtype=product_dtype)
    prompts = np.random.default_rng(0).integers(3, own_model.config.vocab_size, (3, 16))
    # The trained model's own kind of text, and a decode step of fewer rows than products take.
    chunks = [{row: prompt.tolist() for row, prompt in enumerate(prompts)}, {0: [5]}]
    own_stepper.reset()
    steppers = own_stepper, PagedStepper(rounded)
    for chunk in chunks:
        truth, got = (stepper.step(chunk) for stepper in steppers)
        for row in chunk:
            error = np.linalg.norm(got[row] - truth[row]) / np.linalg.norm(truth[row])
            assert LEAST_ERROR < error < WORST_ERROR[product_dtype]


@pytest.mark.parametrize(
    ("product_dtype", "kernel_dtype"), [("bfloat16", jnp.bfloat16), ("int8", jnp.int8)]
)
def test_kernels_alone_are_rounded(own_model, product_dtype, kernel_dtype):
    rounded = load_model(DEMO, product_dtype=product_dtype)
    assert rounded.parameters.keys() - {"lm_head.kernel"} == own_model.parameters.keys()
    num_tokens = own_model.config.vocab_size
    for name, own in own_model.parameters.items():
        value = rounded.parameters[name]
        if name == "embed_tokens.embedding":
            # The head of `own_model` is its embedding, whose layout depends on the processor.
            own, value = (table if len(table) == num_tokens else table.T for table in (own, value))
        assert value.shape == own.shape
        if name.endswith(".kernel"):
            assert as_stored_kernel(value).product_dtype == kernel_dtype
        else:
            assert np.array_equal(value, own)


def test_columns_keep_255_steps_of_their_own():
    values_np = np.random.default_rng(0).standard_normal((48, 20), np.float32)
    rounded = RoundedInt8Kernel.of(on_device.array(values_np))
    numbers_np, scales_np = np.asarray(rounded.numbers).T, np.asarray(rounded.scales)
    assert numbers_np.dtype == np.int8
    assert np.abs(numbers_np).max(axis=0).tolist() == [127] * 20
    difference_np = numbers_np * scales_np - values_np
    assert (np.abs(difference_np) <= scales_np * 0.5001).all()


def test_unknown_dtype_is_refused_by_name():
    with pytest.raises(
        ModelError, match=r"product_dtype is 'int4'; expected one of auto, bfloat16"
    ):
        load_model(DEMO, product_dtype="int4")


def test_token_of_zeros_has_a_product_of_zeros():
    kernel = RoundedInt8Kernel.of(on_device.ones((16, 24)))
    assert np.array_equal(
        multiply(on_device.zeros((2, 16)), kernel, KernelSettings()), np.zeros((2, 24))
    )


def scored_conversations(model: LoadedModel) -> tuple[float, np.ndarray]:
    """The perplexity of answers of the demo model's training, and the logits of all tokens."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    rng = Random(0)
    drawn = [sample_conversation(rng, is_long=False) for _ in range(200)]
    encoded = encode_conversations(tokenizer, drawn)
    short = [one for one in encoded if len(one.token_ids) <= MAX_TOKENS][:60]
    stepper = PagedStepper(model, num_tokens=3 * MAX_TOKENS)
    losses, logits = [], []
    for start in range(0, len(short), 3):
        texts = short[start : start + 3]
        stepper.reset()
        of_rows = stepper.step({row: text.token_ids for row, text in enumerate(texts)})
        for row, text in enumerate(texts):
            # The logits of a token score the next one.
            own = of_rows[row][:-1].astype(np.float64)
            log_sums = np.log(np.exp(own - own.max(axis=1, keepdims=True)).sum(axis=1))
            log_sums += own.max(axis=1)
            targets, is_answer = text.token_ids[1:], np.array(text.is_answer[1:])
            losses += (log_sums - own[np.arange(len(own)), targets])[is_answer].tolist()
            logits.append(own)
    return float(np.exp(np.mean(losses))), np.concatenate(logits)


@pytest.mark.slow
def test_perplexity_and_logits_are_as_near_as_stated(own_model):
    perplexity, logits = scored_conversations(own_model)
    print(f"\nfloat32: perplexity {perplexity:.4f}, largest logit {np.abs(logits).max():.2f}")
    for (quantization, group_size), (worst_increase, worst_error) in QUANTIZED.items():
        model = load_model(DEMO, quantization=quantization, quantization_group_size=group_size)
        own_perplexity, own_logits = scored_conversations(model)
        increase = own_perplexity / perplexity - 1
        error = np.abs(own_logits - logits).max() / np.abs(logits).max()
        norm = np.linalg.norm(own_logits - logits) / np.linalg.norm(logits)
        num_bytes = sum(param.nbytes for param in model.params)
        print(
            f"{quantization} {group_size}: perplexity {own_perplexity:.4f} ({increase:+.2%}), "
            f"largest error {error:.2%} of the largest logit, norm {norm:.2%}, {num_bytes:,} bytes"
        )
        assert abs(increase) < worst_increase
        assert LEAST_ERROR < error < worst_error


@pytest.mark.parametrize("product_dtype", ["bfloat16", "int8"])
def test_routers_and_other_layouts_are_not_rounded(product_dtype):
    encoder = KernelEncoder(platform=Platform(), product_dtype=product_dtype, panel_width=None)
    array = on_device.ones((16, 24))
    assert encoder.encode(array, "matrix", is_router=True) is array
    for layout in ("table", "experts", "heads", "vector"):
        assert encoder.encode(array, layout, is_router=False) is array
    assert encoder.encode(array, "matrix", is_router=False) is not array


def test_a_cpu_keeps_experts_of_16_bits_as_integers():
    platform = CPU(num_threads=1, instruction_sets=frozenset())
    encoder = KernelEncoder(platform=platform, product_dtype="auto", panel_width=None)
    values = on_device.array(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.bfloat16)
    stored = encoder.encode(values, "experts", is_router=False)
    assert isinstance(stored, Bits16Kernel)
    np.testing.assert_array_equal(np.asarray(stored.bits), np.asarray(values).view(np.uint16))


def test_matrices_and_experts_are_quantized_and_routers_are_not():
    encoder = KernelEncoder(platform=Platform(), quantization="int4", group_size=64)
    matrix, stack = on_device.ones((96, 24)), on_device.ones((3, 96, 24))
    for array, layout in ((matrix, "matrix"), (stack, "experts")):
        kernel = encoder.encode(array, layout, is_router=False)
        assert (kernel.shape, kernel.scales.shape[-2]) == (array.shape, 3)  # groups of 32
    assert encoder.encode(matrix, "matrix", is_router=True) is matrix
    for layout in ("table", "heads", "vector"):
        assert encoder.encode(matrix, layout, is_router=False) is matrix
    # Groups of 8 inputs would take more memory for scales than they save.
    narrow = on_device.ones((40, 24))
    assert encoder.encode(narrow, "matrix", is_router=False) is narrow


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization": "int8", "product_dtype": "int8"}, "kernels have one encoding"),
        ({"group_size": 48}, "quantization_group_size is 48; expected one of 32, 64, 128"),
    ],
)
def test_settings_that_contradict_are_refused(fields, message):
    with pytest.raises(ModelError, match=message):
        KernelEncoder(platform=Platform(), **fields)
