"""What transformers makes of a config.json: the reference of tests that read one."""

import copy
import json

import pytest


def as_transformers_reads_it(hf_config: dict[str, object], config_class: str) -> dict[str, object]:
    """The config.json that transformers writes for a model whose config.json is `hf_config`.

    It has every field of the configuration class, under the names of transformers 5.
    """
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, config_class).from_dict(copy.deepcopy(hf_config))
    return json.loads(config.to_json_string(use_diff=False))
