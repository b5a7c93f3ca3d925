"""Compares one program of a family with live transformers: two prompts in one step, and a decode.

The check costs a tenth of `parity`. It covers the weights and the arithmetic of every layer. The
settings of the engine are left to `parity`.

Ops run as their reference bodies, which compile in two thirds of the time. The tests of each op
compare its XLA body with this reference, and `parity` runs the XLA bodies.
"""

import dataclasses
import inspect
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from models import load_model
from tests.end_to_end.parity import largest_difference, make_checkpoint
from tests.oracles.paged_stepper import MAX_MODEL_LEN, PagedStepper

if TYPE_CHECKING:
    import torch

# Longer than the windows and chunks of the checkpoints.
PROMPT_LENS = (39, 42)
_NUM_TOKENS = 88  # of a step; the sum of the prompts with some padding


def forward_share_of_bound(
    family: str, folder: Path, seed: int, *, implementation: str | None = "reference"
) -> float:
    """The largest difference of a logit, as a share of the largest one that is allowed.

    All tokens of both prompts and one more token of each are compared.

    Args:
        implementation: The body of every op, as in `KernelSettings`.
    """
    model = make_checkpoint(family, folder, seed, is_shallow=True, is_sharp=False)
    return share_of_bound(model, folder, family, seed, implementation=implementation)


def share_of_bound(
    model: "torch.nn.Module",
    folder: Path,
    family: str,
    seed: int,
    *,
    implementation: str | None = "reference",
) -> float:
    """As `forward_share_of_bound`, with a model of transformers that was saved in the folder."""
    import torch
    import transformers

    from tests.oracles import families

    vocab = getattr(model.config, "output_vocab_size", families.VOCAB)
    texts = families.prompts(seed, vocab, [length + 1 for length in PROMPT_LENS])
    wanted, errors = [], []
    with torch.no_grad():
        for text in texts:
            uncached = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
            prompt = {"input_ids": torch.tensor([text[:-1]]), "use_cache": True}
            cache = getattr(model(**prompt), "cache", None)
            if cache is None:
                # RecurrentGemma in transformers returns no cache.
                cache = transformers.DynamicCache(config=model.config)
                model(**prompt, cache=cache)
            decoded = model(
                input_ids=torch.tensor([text[-1:]]), cache=cache, **_position(model, len(text) - 1)
            ).logits[0]
            errors.append(float((decoded[0] - uncached[-1]).abs().max() / uncached.abs().max()))
            wanted.append(uncached.float().numpy())
    bound = largest_difference(max(float(np.abs(logits).max()) for logits in wanted), max(errors))

    loaded = load_model(folder, dtype="float32", max_model_len=MAX_MODEL_LEN)
    kernels = dataclasses.replace(loaded.kernels, implementation=implementation)
    loaded = loaded.with_kernels(kernels)
    stepper = PagedStepper(loaded, num_tokens=_NUM_TOKENS)
    prompts = stepper.step({row: text[:-1] for row, text in enumerate(texts)})
    decodes = stepper.step({row: text[-1:] for row, text in enumerate(texts)})
    assert stepper.num_traces == 1
    got = [np.concatenate([prompts[row], decodes[row]]) for row in range(len(texts))]
    differences = [np.abs(ours - theirs).max() for ours, theirs in zip(got, wanted, strict=True)]
    assert max(differences) <= bound, (
        f"{family}: a logit differs by {max(differences):.3g}, the bound is {bound:.3g}"
    )
    return float(max(differences) / bound)


def _position(model: "torch.nn.Module", position: int) -> dict[str, "torch.Tensor"]:
    """The position of a token, for models that take one: a cache of states alone knows none."""
    import torch

    takes_position = "position_ids" in inspect.signature(model.forward).parameters
    return {"position_ids": torch.tensor([[position]])} if takes_position else {}
