"""Apertus 1.5 (text): Apertus with a vocabulary head for the leading tokens of the vocabulary."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from models.config.dense_config import DenseConfig
from models.config.fields import read_count, with_defaults
from models.errors import ModelConfigError
from models.families.apertus import ApertusForCausalLM
from models.weight_rule import Source, WeightRule

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"max_position_embeddings": 65_536}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Apertus1p5Config(DenseConfig):
    """The config of Apertus 1.5. `vocab_size` is the number of tokens that the head scores."""

    stored_vocab_size: int  # rows of the stored embedding; those past `vocab_size` are not text


class Apertus1p5TextForCausalLM(ApertusForCausalLM):
    """Tokens that the head does not score are images and audio, which are not served.

    Source: huggingface.co/docs/transformers/model_doc/apertus1p5.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Apertus1p5Config:
        fields = with_defaults(hf_config, _DEFAULTS)
        stored = read_count(fields, "vocab_size")
        scored = read_count(fields, "output_vocab_size", stored)
        if scored > stored:
            raise ModelConfigError(
                f"config.json: output_vocab_size={scored} is larger than vocab_size={stored}; the "
                "head can only score tokens of the vocabulary."
            )
        config = super().read_config({**fields, "vocab_size": scored})
        return Apertus1p5Config(
            **{field.name: getattr(config, field.name) for field in dataclasses.fields(config)},
            stored_vocab_size=stored,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """The embedding is the start of the stored one."""
        rules = super().weight_rules()
        config = self.config
        stored = (config.stored_vocab_size, config.hidden_size)

        def leading_rows(arrays: Sequence[np.ndarray]) -> np.ndarray:
            return arrays[0][: config.vocab_size]

        for name, rule in rules.items():
            (source, *others) = rule.sources
            if not others and source.name == "model.embed_tokens.weight":
                whole = Source(name=source.name, shape=stored)
                rules[name] = dataclasses.replace(rule, sources=(whole,), combine=leading_rows)
        return rules
