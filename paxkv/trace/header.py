"""`TraceHeader`: the inputs from which a scheduler is built, stored in a trace's first line."""

import dataclasses
import secrets
from collections.abc import Mapping
from typing import TypeVar

import msgspec

import paxkv
from paxkv.config.cache_config import CacheConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.kv_cache_spec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from paxkv.errors import ConfigError, TraceFileError
from paxkv.trace.json_errors import JSON_ERRORS

FORMAT = "paxkv-trace"
# Increase it when the content of a trace, or the inputs of a scheduler, change.
VERSION = 8
# Versions that can be replayed. In version 2, requests with changed logits were never in bursts.
# Before version 4, a trace did not name the requests that the runner pooled. Before version 5,
# recurrent states were not saved for prefix hits. Before version 6, they were not saved at regular
# intervals. Before version 7, bursts verified no drafts. Before version 8, dtypes of states
# were fixed.
READ_VERSIONS = (2, 3, 4, 5, 6, 7, VERSION)

SPEC_CLASSES = {
    spec_class.__name__: spec_class
    for spec_class in (
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        ChunkedLocalAttentionSpec,
        MambaSpec,
        CrossAttentionSpec,
        SinkFullAttentionSpec,
    )
}

_ConfigT = TypeVar("_ConfigT")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """The inputs of a recorded scheduler. Equal headers build equal schedulers.

    Args:
        cache_config: `prefix_caching_seed` is set, so that the replay computes the same hashes. The
            seed must stay secret: with it, an attacker can construct prompts with equal hashes.
        is_async: The scheduler is an `AsyncScheduler`.
        num_lookahead_tokens: This and the next two: see `Scheduler`.
        has_connector: The scheduler has a KV connector.
        has_grammar_gate: The scheduler has a grammar gate.
        bursts_change_logits: Requests with changed logits can be in bursts.
    """

    scheduler_config: SchedulerConfig
    cache_config: CacheConfig
    kv_cache_config: KVCacheConfig
    max_model_len: int
    is_async: bool = False
    num_lookahead_tokens: int = 0
    use_eagle: bool = False
    count_common_prefix_blocks: bool = False
    has_connector: bool = False
    has_grammar_gate: bool = False
    bursts_change_logits: bool = True


class _Version(msgspec.Struct):
    format: str
    version: int
    paxkv_version: str


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    layer_names: tuple[str, ...]
    spec_class: str
    spec: msgspec.Raw


class _KVCache(msgspec.Struct, forbid_unknown_fields=True):
    num_blocks: int
    groups: list[_Group]
    kv_sharing_targets: tuple[tuple[str, str], ...]
    hash_block_size: int | None


class _HeaderLine(_Version, forbid_unknown_fields=True):
    scheduler_config: msgspec.Raw
    cache_config: msgspec.Raw
    kv_cache_config: _KVCache
    max_model_len: int
    is_async: bool
    num_lookahead_tokens: int
    use_eagle: bool
    count_common_prefix_blocks: bool
    has_connector: bool
    has_grammar_gate: bool
    bursts_change_logits: bool = False


def with_fixed_seed(cache_config: CacheConfig) -> CacheConfig:
    """Sets `prefix_caching_seed` to a random value if it is None."""
    if cache_config.prefix_caching_seed is not None:
        return cache_config
    return dataclasses.replace(cache_config, prefix_caching_seed=secrets.token_hex(32))


def encode_header(header: TraceHeader) -> bytes:
    """Encodes the header as JSON on one line, without the final newline."""
    kv_cache_config = header.kv_cache_config
    line = _HeaderLine(
        format=FORMAT,
        version=VERSION,
        paxkv_version=paxkv.__version__,
        # A replay records no trace.
        scheduler_config=_encode(dataclasses.replace(header.scheduler_config, trace_file=None)),
        # A replay publishes no KV events; they would accumulate in memory.
        cache_config=_encode(dataclasses.replace(header.cache_config, kv_events_config=None)),
        kv_cache_config=_KVCache(
            num_blocks=kv_cache_config.num_blocks,
            groups=[
                _Group(
                    layer_names=group.layer_names,
                    spec_class=type(group.kv_cache_spec).__name__,
                    spec=_encode(group.kv_cache_spec),
                )
                for group in kv_cache_config.kv_cache_groups
            ],
            kv_sharing_targets=kv_cache_config.kv_sharing_targets,
            hash_block_size=kv_cache_config.hash_block_size,
        ),
        max_model_len=header.max_model_len,
        is_async=header.is_async,
        num_lookahead_tokens=header.num_lookahead_tokens,
        use_eagle=header.use_eagle,
        count_common_prefix_blocks=header.count_common_prefix_blocks,
        has_connector=header.has_connector,
        has_grammar_gate=header.has_grammar_gate,
        bursts_change_logits=header.bursts_change_logits,
    )
    return msgspec.json.encode(line)


def decode_header(line: bytes) -> TraceHeader:
    """Inverse of `encode_header`.

    Raises:
        TraceFileError: The line is not a header, or has an unsupported version.
    """
    try:
        made_by = msgspec.json.decode(line, type=_Version)
    except JSON_ERRORS as error:
        raise TraceFileError(
            f"line 1 is not the header of a trace ({error}). Record one with --trace-file."
        ) from error
    if made_by.format != FORMAT or made_by.version not in READ_VERSIONS:
        raise TraceFileError(
            f"the trace has format {made_by.format!r}, version {made_by.version}, written by paxkv "
            f"{made_by.paxkv_version}; this is paxkv {paxkv.__version__}, which reads format "
            f"{FORMAT!r}, versions {READ_VERSIONS}. Replay it with the version that wrote it."
        )
    absent: dict[str, object] = {}
    if made_by.version < 8:
        absent |= {"mamba_cache_dtype": "auto", "mamba_ssm_cache_dtype": "auto"}
    if made_by.version < 6:
        absent["state_save_interval"] = None
    if made_by.version < 5:
        absent["state_cache_share"] = 0.0
    try:
        header = msgspec.json.decode(line, type=_HeaderLine)
        return TraceHeader(
            scheduler_config=_decode(header.scheduler_config, SchedulerConfig),
            cache_config=_decode(header.cache_config, CacheConfig, absent),
            kv_cache_config=KVCacheConfig(
                num_blocks=header.kv_cache_config.num_blocks,
                kv_cache_groups=tuple(map(_decode_group, header.kv_cache_config.groups)),
                kv_sharing_targets=header.kv_cache_config.kv_sharing_targets,
                hash_block_size=header.kv_cache_config.hash_block_size,
            ),
            max_model_len=header.max_model_len,
            is_async=header.is_async,
            num_lookahead_tokens=header.num_lookahead_tokens,
            use_eagle=header.use_eagle,
            count_common_prefix_blocks=header.count_common_prefix_blocks,
            has_connector=header.has_connector,
            has_grammar_gate=header.has_grammar_gate,
            bursts_change_logits=header.bursts_change_logits,
        )
    except (*JSON_ERRORS, ConfigError) as error:
        raise TraceFileError(f"line 1, the header, cannot be read: {error}.") from error


def _decode_group(group: _Group) -> KVCacheGroupSpec:
    spec_class = SPEC_CLASSES.get(group.spec_class)
    if spec_class is None:
        raise TraceFileError(
            f"line 1 has the unknown KV cache spec {group.spec_class!r}; known specs are "
            f"{', '.join(SPEC_CLASSES)}. Replay the trace with the version that wrote it."
        )
    # Older traces do not have this field, and the scheduler does not depend on it.
    absent = {"num_ranks": 1} if issubclass(spec_class, AttentionSpec) else {}
    return KVCacheGroupSpec(
        layer_names=group.layer_names, kv_cache_spec=_decode(group.spec, spec_class, absent)
    )


def _encode(config: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(config))


def _decode(
    data: msgspec.Raw, config_class: type[_ConfigT], absent: Mapping[str, object] = {}
) -> _ConfigT:
    """Decodes a config. Rejects unknown and missing fields.

    msgspec would drop unknown fields and set missing ones to the current default, and then the
    scheduler would differ from the recorded one.

    Args:
        absent: Values of the fields that the version of the trace does not have.
    """
    fields = {**absent, **msgspec.json.decode(data)}
    got = set(fields)
    expected = {field.name for field in dataclasses.fields(config_class)}
    if got != expected:
        raise TraceFileError(
            f"line 1 has other fields of {config_class.__name__} than this version: unknown "
            f"{sorted(got - expected)}, missing {sorted(expected - got)}. Replay it with the "
            "version that wrote it."
        )
    return msgspec.convert(fields, type=config_class)
