"""A header builds an equal scheduler, or is rejected with the reason."""

import dataclasses
import inspect

import msgspec
import pytest

from paxkv.config.cache_config import CacheConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts import kv_cache_spec
from paxkv.contracts.kv_cache_spec import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from paxkv.errors import TraceFileError
from paxkv.trace.header import (
    SPEC_CLASSES,
    VERSION,
    TraceHeader,
    decode_header,
    encode_header,
    with_fixed_seed,
)

ATTENTION = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": "bfloat16"}
ARGUMENTS = {
    "FullAttentionSpec": ATTENTION | {"sliding_window": 7, "head_size_v": 4},
    "MLAAttentionSpec": ATTENTION,
    "SlidingWindowSpec": ATTENTION | {"sliding_window": 40},
    "ChunkedLocalAttentionSpec": ATTENTION | {"attention_chunk_size": 64},
    "MambaSpec": {
        "block_size": 16,
        "page_bytes": 64,
        "state_bytes": 100,
        "blocks_per_state": 2,
        "num_parts": 3,
    },
    "CrossAttentionSpec": ATTENTION | {"max_encoder_tokens": 100},
    "SinkFullAttentionSpec": ATTENTION | {"sink_len": 16},
}


def make_header() -> TraceHeader:
    groups = tuple(
        KVCacheGroupSpec(layer_names=(name, name + "'"), kv_cache_spec=SPEC_CLASSES[name](**given))
        for name, given in ARGUMENTS.items()
    )
    return TraceHeader(
        scheduler_config=SchedulerConfig(policy="priority", max_num_seqs=3),
        cache_config=CacheConfig(prefix_caching_seed="é", prefix_caching_hash_algo="xxhash"),
        kv_cache_config=KVCacheConfig(
            num_blocks=11,
            kv_cache_groups=groups,
            kv_sharing_targets=(("a", "b"),),
            hash_block_size=8,
        ),
        max_model_len=99,
        is_async=True,
        num_lookahead_tokens=3,
        use_eagle=True,
        count_common_prefix_blocks=True,
        has_connector=True,
        has_grammar_gate=True,
    )


def changed(line: bytes, **changes: object) -> bytes:
    return msgspec.json.encode(msgspec.json.decode(line) | changes)


def test_header_with_every_spec_decodes_to_an_equal_header() -> None:
    header = make_header()
    assert decode_header(encode_header(header)) == header


def test_version_2_header_excludes_changed_logits_from_bursts() -> None:
    fields = msgspec.json.decode(encode_header(make_header())) | {"version": 2}
    del fields["bursts_change_logits"]
    header = decode_header(msgspec.json.encode(fields))
    assert header == dataclasses.replace(make_header(), bursts_change_logits=False)


def test_version_4_header_saves_no_states() -> None:
    fields = msgspec.json.decode(encode_header(make_header())) | {"version": 4}
    del fields["cache_config"]["state_cache_share"]
    assert decode_header(msgspec.json.encode(fields)).cache_config.state_cache_share == 0.0
    with pytest.raises(TraceFileError, match=r"missing \['state_cache_share'\]"):
        decode_header(msgspec.json.encode(fields | {"version": VERSION}))


def test_version_5_header_has_no_interval_of_saved_states() -> None:
    fields = msgspec.json.decode(encode_header(make_header())) | {"version": 5}
    del fields["cache_config"]["state_save_interval"]
    assert decode_header(msgspec.json.encode(fields)) == make_header()
    with pytest.raises(TraceFileError, match=r"missing \['state_save_interval'\]"):
        decode_header(msgspec.json.encode(fields | {"version": VERSION}))


def test_version_7_header_has_the_usual_dtypes_of_states() -> None:
    fields = msgspec.json.decode(encode_header(make_header())) | {"version": 7}
    for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype"):
        del fields["cache_config"][name]
    assert decode_header(msgspec.json.encode(fields)) == make_header()


def test_every_kv_cache_spec_can_be_decoded() -> None:
    concrete = {
        name
        for name, spec in inspect.getmembers(kv_cache_spec, inspect.isclass)
        if issubclass(spec, KVCacheSpec) and name not in ("KVCacheSpec", "AttentionSpec")
    }
    assert concrete == set(SPEC_CLASSES) == set(ARGUMENTS)


def test_header_does_not_contain_the_trace_file() -> None:
    header = make_header()
    config = dataclasses.replace(header.scheduler_config, trace_file="/somewhere/else")
    line = encode_header(dataclasses.replace(header, scheduler_config=config))
    assert decode_header(line) == header


def test_random_seed_replaces_only_a_missing_seed() -> None:
    first, second = with_fixed_seed(CacheConfig()), with_fixed_seed(CacheConfig())
    assert first.prefix_caching_seed is not None
    assert first.prefix_caching_seed != second.prefix_caching_seed
    assert with_fixed_seed(first) is first


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"not JSON", "not the header"),
        (b"[1]", "not the header"),
        (b'{"calls":[]}', "not the header"),
        (
            changed(encode_header(make_header()), version=VERSION + 1),
            f"version {VERSION + 1}, written by paxkv",
        ),
        (changed(encode_header(make_header()), format="other"), "format 'other'"),
        (changed(encode_header(make_header()), max_model_len="x"), "max_model_len"),
        (changed(encode_header(make_header()), surprise=1), "surprise"),
    ],
)
def test_other_formats_and_versions_are_rejected(line: bytes, message: str) -> None:
    with pytest.raises(TraceFileError, match=message):
        decode_header(line)


def test_specs_of_older_traces_have_one_rank() -> None:
    line = encode_header(make_header())
    config = msgspec.json.decode(line)["kv_cache_config"]
    del config["groups"][0]["spec"]["num_ranks"]
    assert decode_header(changed(line, kv_cache_config=config)) == make_header()


@pytest.mark.parametrize("block_size", [0, -16, 2**32])
def test_impossible_pools_are_rejected(block_size: int) -> None:
    line = encode_header(make_header())
    config = msgspec.json.decode(line)["kv_cache_config"]
    with pytest.raises(TraceFileError, match="num_blocks must be below"):
        decode_header(changed(line, kv_cache_config=config | {"num_blocks": 2**31}))
    config["groups"][0]["spec"]["block_size"] = block_size
    # Otherwise, the page's padding would be rejected first.
    config["groups"][0]["spec"]["page_size_padded"] = None
    with pytest.raises(TraceFileError, match=f"block_size={block_size} must be in"):
        decode_header(changed(line, kv_cache_config=config))


def test_unknown_and_missing_settings_are_rejected() -> None:
    """An unknown setting would be dropped, and a missing one would get the current default."""
    line = encode_header(make_header())
    config = msgspec.json.decode(line)["scheduler_config"]
    with pytest.raises(TraceFileError, match=r"unknown \['new_rule'\], missing \[\]"):
        decode_header(changed(line, scheduler_config=config | {"new_rule": True}))
    del config["policy"]
    with pytest.raises(TraceFileError, match=r"unknown \[\], missing \['policy'\]"):
        decode_header(changed(line, scheduler_config=config))


def test_invalid_value_of_a_setting_is_rejected() -> None:
    line = encode_header(make_header())
    config = msgspec.json.decode(line)["scheduler_config"] | {"max_num_seqs": 0}
    with pytest.raises(TraceFileError, match="max_num_seqs"):
        decode_header(changed(line, scheduler_config=config))


def test_unknown_kv_cache_spec_is_rejected() -> None:
    line = encode_header(make_header()).replace(b"MambaSpec", b"OtherSpec")
    with pytest.raises(TraceFileError, match="'OtherSpec'; known specs are FullAttentionSpec"):
        decode_header(line)
