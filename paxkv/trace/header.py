"""TraceHeader: everything a scheduler is built from, as the first line of a trace."""

import dataclasses
import secrets
from typing import TypeVar

import msgspec

import paxkv
from paxkv.config.engine_config import CacheConfig, SchedulerConfig
from paxkv.contracts.kv_cache_spec import (
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
# Raise it with every change of what a trace says or of what a scheduler is built from.
VERSION = 3
# Traces of these versions can be replayed. In version 2, bursts changed no logits.
READ_VERSIONS = (2, VERSION)

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
    """What a recorded scheduler was built from; equal headers build equal schedulers.

    Args:
        cache_config: Its `prefix_caching_seed` is not None: hashes are the same at replay. So a
            trace holds what keeps strangers from preparing prompts that collide.
        is_async: The scheduler is an `AsyncScheduler`.
        num_lookahead_tokens: This and the next two: see `Scheduler`.
        has_connector: It was built with a KV connector.
        has_grammar_gate: It was built with a grammar gate.
        bursts_change_logits: Whether requests with changed logits could be in bursts.
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
    """The config with a random seed written out, where the engine would draw it unseen."""
    if cache_config.prefix_caching_seed is not None:
        return cache_config
    return dataclasses.replace(cache_config, prefix_caching_seed=secrets.token_hex(32))


def encode_header(header: TraceHeader) -> bytes:
    """The header as one JSON line, without the line's end."""
    kv_cache_config = header.kv_cache_config
    line = _HeaderLine(
        format=FORMAT,
        version=VERSION,
        paxkv_version=paxkv.__version__,
        # A copy of the trace may lie elsewhere, and replaying it records nothing.
        scheduler_config=_encode(dataclasses.replace(header.scheduler_config, trace_file=None)),
        # Nor does it publish: events would pile up.
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
        TraceFileError: The line is no header, or one of another version.
    """
    try:
        made_by = msgspec.json.decode(line, type=_Version)
    except JSON_ERRORS as error:
        raise TraceFileError(
            f"line 1 is not the header of a trace ({error}). Record one with --trace-file."
        ) from error
    if made_by.format != FORMAT or made_by.version not in READ_VERSIONS:
        raise TraceFileError(
            f"line 1 says format {made_by.format!r}, version {made_by.version}, written by paxkv "
            f"{made_by.paxkv_version}; this is paxkv {paxkv.__version__}, which reads format "
            f"{FORMAT!r}, versions {READ_VERSIONS}. Replay it with the version that wrote it."
        )
    try:
        header = msgspec.json.decode(line, type=_HeaderLine)
        return TraceHeader(
            scheduler_config=_decode(header.scheduler_config, SchedulerConfig),
            cache_config=_decode(header.cache_config, CacheConfig),
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
            f"line 1 has KV cache spec {group.spec_class!r}; known are {', '.join(SPEC_CLASSES)}."
        )
    return KVCacheGroupSpec(
        layer_names=group.layer_names, kv_cache_spec=_decode(group.spec, spec_class)
    )


def _encode(config: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(config))


def _decode(data: msgspec.Raw, config_class: type[_ConfigT]) -> _ConfigT:
    """The config in `data`, which must name each of its fields and no other.

    A field that is not known would be dropped, and one that is missing would get today's default:
    either way the scheduler would not be the recorded one.
    """
    got = set(msgspec.json.decode(data, type=dict[str, msgspec.Raw]))
    wanted = {field.name for field in dataclasses.fields(config_class)}
    if got != wanted:
        raise TraceFileError(
            f"line 1 gives {config_class.__name__} other settings than this version has: "
            f"unknown {sorted(got - wanted)}, missing {sorted(wanted - got)}. Replay it with the "
            "version that wrote it."
        )
    return msgspec.json.decode(data, type=config_class)
