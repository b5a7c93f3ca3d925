"""Chunked attention in some layers answers as transformers does with masks of chunks.

This is a Llama with other masks: chunks are all that it has of Llama 4.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from models import registry
from models.families.llama import LlamaConfig, LlamaForCausalLM
from tests.end_to_end.parity import NUM_NEW_TOKENS, ParityEngine, Reference
from tests.oracles import families

CHUNK_SIZE = 20  # no multiple of the block size
FULL_LAYER = 1  # of three
# Long enough for the small pool of one of the settings.
PROMPT_LENS = (45, 61, 80, 90)


class ChunkedLlama(LlamaForCausalLM):
    """A Llama in which all layers but one see chunks."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LlamaConfig:
        config = LlamaForCausalLM.read_config(hf_config)
        attention = [
            dataclasses.replace(layer, chunk_size=None if layer_idx == FULL_LAYER else CHUNK_SIZE)
            for layer_idx, layer in enumerate(config.attention)
        ]
        return dataclasses.replace(config, attention=tuple(attention))


def see_chunks(layer, args, kwargs):
    """A hook of a layer of transformers: its mask hides other chunks, and later tokens."""
    position = torch.arange(args[0].shape[1])
    query, key = position[:, None], position[None, :]
    is_seen = (key <= query) & (key // CHUNK_SIZE == query // CHUNK_SIZE)
    mask = torch.where(is_seen, 0.0, torch.finfo(torch.float32).min)
    return args, kwargs | {"attention_mask": mask[None, None]}


def make_reference(folder: Path) -> Reference:
    model, _ = families.make("llama", folder, 1)
    for layer_idx, layer in enumerate(model.model.layers):
        if layer_idx != FULL_LAYER:
            layer.register_forward_pre_hook(see_chunks, with_kwargs=True)
    prompts = families.prompts(1, lengths=PROMPT_LENS)
    answers = [
        families.greedy(model, prompt, NUM_NEW_TOKENS, use_cache=False) for prompt in prompts
    ]
    return Reference(
        prompts=prompts,
        token_ids=[token_ids for token_ids, _, _ in answers],
        logits=[logits.numpy() for _, _, logits in answers],
        relative_error=0.0,
    )


def test_layers_see_chunks_under_every_setting(tmp_path, monkeypatch):
    reference = make_reference(tmp_path)
    monkeypatch.setitem(registry.FAMILIES, "LlamaForCausalLM", f"{__name__}:ChunkedLlama")
    ParityEngine(tmp_path, has_every_size=False, has_every_kind=True).compare(reference)
