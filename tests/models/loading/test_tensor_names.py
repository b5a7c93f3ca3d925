"""Tensors are found under the names that the classes of transformers and PyTorch give them."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from models.errors import WeightMismatchError
from models.loading.safetensors_reader import SafetensorsCheckpoint
from models.loading.tensor_names import match_tensor_names, name_weights

NORM, LAYER, HEAD = "model.norm.weight", "model.layers.10.mlp.up_proj.weight", "lm_head.weight"
WANTED = (NORM, LAYER, HEAD)


@pytest.mark.parametrize(
    ("outer", "head"),
    [
        ("model.", "lm_head.weight"),
        # Saved from the base class.
        ("", "lm_head.weight"),
        # Multimodal classes, in the order in which transformers had them.
        ("language_model.model.", "language_model.lm_head.weight"),
        ("language_model.", "lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("model.language_model.model.", "model.language_model.lm_head.weight"),
        ("model.text_model.", "model.lm_head.weight"),
        # PEFT, and PyTorch's wrappers.
        ("base_model.model.model.", "base_model.model.lm_head.weight"),
        ("module.model.", "module.lm_head.weight"),
        ("_orig_mod.model.", "_orig_mod.lm_head.weight"),
        ("module._orig_mod.model.", "module._orig_mod.lm_head.weight"),
    ],
)
def test_outer_modules_make_no_difference(outer, head):
    stored = [f"{outer}norm.weight", f"{outer}layers.10.mlp.up_proj.weight", head]
    assert match_tensor_names(stored, WANTED) == dict(zip(stored, WANTED, strict=True))


def test_wrappers_of_single_layers_make_no_difference():
    stored = (
        "model.layers.10._checkpoint_wrapped_module.mlp.up_proj.weight",
        "model.layers.10._fsdp_wrapped_module.mlp._orig_mod.up_proj.weight",
    )
    assert set(match_tensor_names(stored, WANTED).values()) == {LAYER}


def test_other_tensors_get_the_name_that_rules_would_have():
    """So a family can ignore layers for multi-token prediction in every kind of checkpoint."""
    stored = ["layers.46.enorm.weight", "language_model.model.layers.46.enorm.weight"]
    assert set(match_tensor_names(stored, WANTED).values()) == {"model.layers.46.enorm.weight"}
    assert match_tensor_names(["norm.bias"], WANTED) == {"norm.bias": "model.norm.bias"}
    # A module of another name around it may hold another model.
    assert (
        match_tensor_names(["vision.model.norm.weight"], WANTED)["vision.model.norm.weight"] != NORM
    )


def test_the_base_module_is_the_one_that_the_rules_have():
    wanted = ("transformer.h.0.attn.c_attn.weight", "transformer.wte.weight", "lm_head.weight")
    names = match_tensor_names(["h.0.attn.c_attn.weight", "wte.weight"], wanted)
    assert tuple(names.values()) == wanted[:2]


def checkpoint_of(folder, *names):
    weights = {name: np.full(1, idx, np.float32) for idx, name in enumerate(names)}
    save_file(weights, folder / "model.safetensors")
    return SafetensorsCheckpoint(folder)


def test_renamed_weights_are_read_under_their_new_names(tmp_path):
    checkpoint = checkpoint_of(tmp_path, "norm.weight", "lm_head.weight", "vision.norm.weight")
    name_weights(checkpoint, WANTED)
    assert sorted(checkpoint.weights) == [HEAD, NORM, "model.vision.norm.weight"]
    assert checkpoint.read(NORM).tolist() == [0.0]
    assert checkpoint.weights["model.vision.norm.weight"].name == "vision.norm.weight"


def test_family_names_tensors_of_the_hub_within_any_outer_modules(tmp_path):
    checkpoint = checkpoint_of(tmp_path, "module.layers.20.mixer.up_proj.weight", NORM, HEAD)
    name_weights(
        checkpoint, WANTED, of_family=lambda name: name.replace("layers.20.mixer", "layers.10.mlp")
    )
    assert sorted(checkpoint.weights) == sorted(WANTED)
    assert checkpoint.read(LAYER).tolist() == [0.0]


def test_tensors_under_both_names_of_a_family_are_refused(tmp_path):
    checkpoint = checkpoint_of(tmp_path, NORM, "model.final.weight", HEAD)
    with pytest.raises(WeightMismatchError, match="1 tensors have two names"):
        name_weights(checkpoint, WANTED, of_family=lambda name: name.replace("final", "norm"))


def test_two_names_of_one_tensor_are_refused(tmp_path):
    checkpoint = checkpoint_of(tmp_path, "norm.weight", "model.norm.weight", "lm_head.weight")
    with pytest.raises(
        WeightMismatchError, match=r"1 tensors have two names.*model\.norm\.weight and norm\.weight"
    ):
        name_weights(checkpoint, WANTED)


def test_two_names_of_a_tensor_that_is_not_needed_are_kept(tmp_path):
    names = ("layers.0.rotary_emb.inv_freq", "model.layers.0.rotary_emb.inv_freq")
    checkpoint = checkpoint_of(tmp_path, NORM, *names)
    name_weights(checkpoint, WANTED)
    assert sorted(checkpoint.weights) == [*names, NORM]
