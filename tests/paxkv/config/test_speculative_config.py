"""`SpeculativeConfig`: vLLM's JSON object, its defaults, and errors that name the mistake."""

import argparse

import pytest

from paxkv.config.command_line import add_config_flags, config_from_arguments
from paxkv.config.engine_config import EngineConfig
from paxkv.config.model_config import ModelConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.errors import ConfigError

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
MTP = {"method": "mtp", "num_speculative_tokens": 1}
SUFFIX = {"method": "suffix"}
EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("limits", "lengths"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": None}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_unset_limits_have_vllms_defaults(limits, lengths):
    assert SpeculativeConfig.from_fields(NGRAM | limits).lookup_lengths == lengths


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"method": "eagle", "model": "m"},
            "'eagle' has no drafter yet; methods are ngram, suffix",
        ),
        (MTP | {"model": "m"}, "method 'mtp' takes no model, got 'm'"),
        (MTP | {"prompt_lookup_max": 3}, "for method 'ngram', got method 'mtp'"),
        ({"model": "m", "num_speculative_tokens": 3}, "needs method"),
        (MTP | {"method": "draft_model"}, "method 'draft_model' needs model"),
        (MTP | {"method": "draft_model", "model": ""}, "model must be a folder or .*, got ''"),
        (MTP | {"method": "eagle3", "model": 3}, "model must be a folder or .*, got 3"),
        (
            {"method": "ngrams", "num_speculative_tokens": 3},
            "must be one of ngram, suffix, mtp, eagle3, draft_model, got",
        ),
        (NGRAM | {"draft_tensor_parallel_size": 1}, "got draft_tensor_parallel_size"),
        ({"num_speculative_tokens": 3}, "needs method; got"),
        ({"method": "ngram"}, "needs num_speculative_tokens"),
        (NGRAM | {"num_speculative_tokens": 0}, r"in \[1, 64\], got 0"),
        (NGRAM | {"num_speculative_tokens": True}, r"in \[1, 64\], got True"),
        (NGRAM | {"drafts_in_bursts": 1}, "drafts_in_bursts must be true or false, got 1"),
        (SUFFIX | {"drafts_in_bursts": True}, "does not work with method 'suffix'"),
        (NGRAM | {"prompt_lookup_min": 0}, "prompt_lookup_min must be an integer of at least 1"),
        (NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 2}, "prompt_lookup_min=4 must be"),
        ({"method": "suffix", "prompt_lookup_min": 2}, "for method 'ngram', got method 'suffix'"),
        (NGRAM | {"suffix_decoding_max_tree_depth": 9}, "for method 'suffix', got method 'ngram'"),
        (SUFFIX | {"suffix_decoding_max_tree_depth": 1}, "max_tree_depth must be an integer of at"),
        (SUFFIX | {"suffix_decoding_max_cached_requests": -1}, "max_cached_requests must be an"),
        (SUFFIX | {"suffix_decoding_max_spec_factor": 0}, "max_spec_factor must be .* above 0"),
        (SUFFIX | {"suffix_decoding_max_spec_factor": 0.01}, "max_spec_factor=0.01 allows no dra"),
        (SUFFIX | {"suffix_decoding_max_spec_factor": float("inf")}, "a finite number above 0"),
        (SUFFIX | {"suffix_decoding_min_token_prob": "x"}, r"min_token_prob must be .*\[0, 1\]"),
        ([], "must be a JSON object"),
    ],
)
def test_the_error_names_the_mistake(fields, message):
    with pytest.raises(ConfigError, match=f"speculative_config.*{message}"):
        SpeculativeConfig.from_fields(fields)


def parse(*words):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_config_flags(parser, RunnerConfig)
    return config_from_arguments(RunnerConfig, parser.parse_args(words))


def test_flag_reads_the_object():
    config = parse("-sc", '{"method": "ngram", "num_speculative_tokens": 2}')
    assert config.speculative_config == SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    assert parse("--speculative-config", "{}").speculative_config is None
    with pytest.raises(argparse.ArgumentError, match="'medusa' has no drafter"):
        parse("--speculative-config", '{"method": "medusa"}')


def test_suffix_needs_no_number_of_drafts():
    """It is the largest number that the other limits allow."""
    config = SpeculativeConfig.from_fields(SUFFIX)
    assert config.num_speculative_tokens == config.suffix_limits.max_drafts == 12
    few = SUFFIX | {"suffix_decoding_max_tree_depth": 10, "suffix_decoding_max_spec_factor": 0.25}
    assert SpeculativeConfig.from_fields(few).num_speculative_tokens == 2
    many = SUFFIX | {"suffix_decoding_max_tree_depth": 1000}
    assert SpeculativeConfig.from_fields(many).num_speculative_tokens == 64
    assert SpeculativeConfig.from_fields(SUFFIX | {"num_speculative_tokens": 3}) == (
        SpeculativeConfig(method="suffix", num_speculative_tokens=3)
    )


@pytest.mark.parametrize(("fields", "is_on_device"), [(NGRAM, False), (SUFFIX, False), (MTP, True)])
def test_drafts_adapt_by_default(fields, is_on_device):
    adapting = SpeculativeConfig.from_fields(fields)
    assert adapting.adapts and not adapting.prevents_bursts
    always = SpeculativeConfig.from_fields(fields | {"adapts_drafts": False})
    assert not always.adapts and always.prevents_bursts == is_on_device


def test_only_the_demo_model_has_a_head_of_its_own():
    runner = RunnerConfig(speculative_config=SpeculativeConfig.from_fields(EAGLE3))
    assert EngineConfig(runner=runner).runner == runner
    with pytest.raises(ConfigError, match="method 'eagle3' needs model"):
        EngineConfig(runner=runner, model=ModelConfig(model="other"))


def test_an_unparsed_object_is_rejected():
    with pytest.raises(ConfigError, match="must be a SpeculativeConfig"):
        RunnerConfig(speculative_config=NGRAM)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"scheduler": SchedulerConfig(max_decode_burst=1)}, "max_decode_burst=1"),
        ({"runner": {"batch_invariant": True}}, "batch_invariant"),
    ],
)
def test_drafts_in_bursts_need_bursts(parts, why):
    speculative = SpeculativeConfig.from_fields(NGRAM | {"drafts_in_bursts": True})
    runner = RunnerConfig(speculative_config=speculative, **parts.pop("runner", {}))
    with pytest.raises(ConfigError, match=f"needs bursts, and {why} prevents them"):
        EngineConfig(runner=runner, **parts)


def test_a_step_has_room_for_all_drafts_of_a_request_in_bursts():
    speculative = SpeculativeConfig.from_fields(NGRAM | {"drafts_in_bursts": True})
    runner = RunnerConfig(speculative_config=speculative)
    EngineConfig(runner=runner, scheduler=SchedulerConfig(max_num_batched_tokens=5, max_num_seqs=1))
    with pytest.raises(ConfigError, match="5 tokens of a request .* is 4. Set a larger"):
        EngineConfig(
            runner=runner, scheduler=SchedulerConfig(max_num_batched_tokens=4, max_num_seqs=1)
        )
