"""Algorithms that compute block hashes."""

import hashlib
import os
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import cbor2
import xxhash

from paxkv.config.cache_config import PrefixCachingHashAlgo
from paxkv.kv_cache.hashing.extra_keys import ExtraKey

_SEED_PREFIX = b"paxkv block hashes"
_TOKEN_BYTES = 4


class HashAlgorithm(Protocol):
    """Hashes blocks in a chain: a hash covers the parent's hash, the tokens and the extra keys."""

    def root_hash(self, seed: str | None, block_size: int) -> bytes:
        """The parent hash of every first block; random if `seed` is None."""
        ...

    def hash_chain(
        self,
        parent_hash: bytes,
        token_ids: Sequence[int],
        block_size: int,
        extra_keys: Sequence[tuple[ExtraKey, ...]] | None,
    ) -> list[bytes]:
        """Hashes of consecutive blocks.

        Args:
            token_ids: The blocks' tokens, each in [0, 2**31). Their number is a multiple of
                `block_size`.
            extra_keys: One tuple per block; None if no block has extra keys.
        """
        ...


class PackedBytesAlgorithm:
    """A digest of packed bytes. It is fast, but the format is paxkv's own.

        parent hash | tokens, 4 bytes each, little-endian | extra keys, each with its length

    The root hash covers the block size, so all blocks of a chain have the same size. Therefore the
    tokens end at a known byte, and different inputs have different bytes.
    """

    def __init__(self, digest: Callable[[bytes], bytes]) -> None:
        self._digest = digest

    def root_hash(self, seed: str | None, block_size: int) -> bytes:
        if seed is None:
            return os.urandom(len(self._digest(b"")))
        return self._digest(_SEED_PREFIX + struct.pack("<I", block_size) + _encode_text(seed))

    def hash_chain(
        self,
        parent_hash: bytes,
        token_ids: Sequence[int],
        block_size: int,
        extra_keys: Sequence[tuple[ExtraKey, ...]] | None,
    ) -> list[bytes]:
        # A C int has 4 bytes and is little-endian on every platform that JAX supports.
        data = array("i", token_ids).tobytes()
        digest, num_bytes = self._digest, block_size * _TOKEN_BYTES
        hashes: list[bytes] = []
        if extra_keys is None:
            for start in range(0, len(data), num_bytes):
                parent_hash = digest(parent_hash + data[start : start + num_bytes])
                hashes.append(parent_hash)
            return hashes
        last_keys: tuple[ExtraKey, ...] = ()
        suffix = b""
        for start, keys in zip(range(0, len(data), num_bytes), extra_keys, strict=True):
            if keys is not last_keys:
                last_keys, suffix = keys, b"".join(map(_encode_key, keys))
            parent_hash = digest(parent_hash + data[start : start + num_bytes] + suffix)
            hashes.append(parent_hash)
        return hashes


class CborAlgorithm:
    """SHA-256 of canonical CBOR (RFC 8949), which other programs can compute too.

    A block is encoded as `[parent hash, [tokens], extra keys]`. The extra keys are an array of
    arrays such as `["salt", "tenant-1"]`, or null if there are none. The root hash is the hash of
    the seed's text.
    """

    def root_hash(self, seed: str | None, block_size: int) -> bytes:
        if seed is None:
            return os.urandom(32)
        return hashlib.sha256(cbor2.dumps(_cbor_value(seed), canonical=True)).digest()

    def hash_chain(
        self,
        parent_hash: bytes,
        token_ids: Sequence[int],
        block_size: int,
        extra_keys: Sequence[tuple[ExtraKey, ...]] | None,
    ) -> list[bytes]:
        hashes: list[bytes] = []
        for block_idx in range(len(token_ids) // block_size):
            tokens = tuple(token_ids[block_idx * block_size : (block_idx + 1) * block_size])
            keys = extra_keys[block_idx] if extra_keys is not None else ()
            values = tuple(tuple(map(_cbor_value, key)) for key in keys)
            message = cbor2.dumps((parent_hash, tokens, values or None), canonical=True)
            parent_hash = hashlib.sha256(message).digest()
            hashes.append(parent_hash)
        return hashes


def get_hash_algorithm(name: PrefixCachingHashAlgo) -> HashAlgorithm:
    """The algorithm that a setting names."""
    return _ALGORITHMS[name]


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


# The hashes have 32, 32 and 16 bytes.
_ALGORITHMS: dict[PrefixCachingHashAlgo, HashAlgorithm] = {
    "sha256": PackedBytesAlgorithm(_sha256),
    "sha256_cbor": CborAlgorithm(),
    "xxhash": PackedBytesAlgorithm(xxhash.xxh3_128_digest),
}


def _encode_key(key: ExtraKey) -> bytes:
    """Encodes one key with the number, types and lengths of its values."""
    parts = [struct.pack("<I", len(key))]
    for value in key:
        if isinstance(value, int):
            parts.append(b"i" + struct.pack("<q", value))
            continue
        data = _encode_text(value)
        parts.append(b"s" + struct.pack("<I", len(data)) + data)
    return b"".join(parts)


def _encode_text(text: str) -> bytes:
    # Clients choose salts, so a lone surrogate must not raise an error here.
    return text.encode("utf-8", "surrogatepass")


def _cbor_value(value: str | int) -> str | int | bytes:
    """The value itself, or bytes if it is text with surrogates, which CBOR cannot encode."""
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        return _encode_text(value)
    return value
