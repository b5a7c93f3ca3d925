"""`Tokenizer`: converts text to token ids and back, with a checkpoint's tokenizer files."""

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import tokenizers

from paxkv.errors import ConfigError, InvalidRequestError
from paxkv.text.token_bounds import find_max_chars_per_token
from paxkv.text.token_bytes import TokenBytes

_LFS_POINTER = b"version https://git-lfs"
_TOKEN_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")

# Encoding a text of this length takes tens of milliseconds, so other threads should run meanwhile.
LONG_TEXT_CHARS = 4096


class Tokenizer:
    """A fast tokenizer (tokenizer.json) with the special tokens of tokenizer_config.json.

    Args:
        backend: The tokenizer of tokenizer.json. Its truncation and padding are switched off.
        tokenizer_config: Content of tokenizer_config.json. If it sets `add_bos_token` or
            `add_eos_token`, these replace the tokens that tokenizer.json would add.

    Raises:
        ConfigError: tokenizer_config.json names a token that has no id, or is malformed.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, tokenizer_config: Mapping[str, object] | None = None
    ) -> None:
        tokenizer_config = tokenizer_config or {}
        self.config = dict(tokenizer_config)
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        _add_config_tokens(backend, tokenizer_config.get("added_tokens_decoder"))
        named = _read_named_tokens(tokenizer_config)
        # Variables of chat templates: "eos_token" -> "</s>".
        self.special_tokens = {name: token.content for name, token in named.items()}
        _mark_special(backend, named.values(), _read_extra_tokens(tokenizer_config))
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        added_tokens = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added_tokens.items() if token.special)
        # Id -> text of added tokens, which represent their literal text.
        self.added_token_texts = {i: token.content for i, token in added_tokens.items()}
        self._token_texts: dict[int, str] = {}
        self._bytes_of = TokenBytes(backend).of
        self._prefix_ids, self._suffix_ids = self._read_added_ids(tokenizer_config)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Reads tokenizer.json and, if present, tokenizer_config.json and special_tokens_map.json.

        Raises:
            ConfigError: There is no tokenizer.json, or a file cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{folder} has no tokenizer.json. Save a fast tokenizer there (transformers: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)), or send token ids."
            )
        backend = _read_backend(path)
        # Older checkpoints have the names of special tokens in a separate file.
        special_tokens_map = read_json_object(folder / "special_tokens_map.json")
        tokenizer_config = read_json_object(folder / "tokenizer_config.json")
        return cls(backend, {**special_tokens_map, **tokenizer_config})

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones. A model's own vocabulary may be larger."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def max_chars_per_token(self) -> int | None:
        """See `find_max_chars_per_token`. The first access scans the whole vocabulary."""
        return find_max_chars_per_token(self._backend)

    @property
    def json(self) -> str:
        """The tokenizer as the content of a tokenizer.json."""
        return self._backend.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special_tokens: Add the tokens that the checkpoint puts around a text, such as BOS.
                A rendered chat template contains its own.

        Raises:
            InvalidRequestError: The text contains a lone surrogate, which is not a character.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the prompt is not valid Unicode: a lone surrogate at character {error.start}."
            ) from error
        use_own = self._prefix_ids is not None
        ids = self._encode_valid(text, add_special_tokens=add_special_tokens and not use_own)
        if add_special_tokens and use_own:
            return [*self._prefix_ids, *ids, *self._suffix_ids]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Unknown ids are omitted; invalid UTF-8 becomes U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, also of a special token; for log-probabilities."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._make_token_text(token_id)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token. The bytes of an answer's tokens join to the bytes of its text."""
        return self._bytes_of(self._backend.id_to_token(token_id), self.token_text(token_id))

    def _make_token_text(self, token_id: int) -> str:
        name = self._backend.id_to_token(token_id)
        decoder = self._backend.decoder
        # SentencePiece decoders drop the space at the start of a text: "▁the" becomes " the" only
        # after another token.
        if name is not None and decoder is not None and decoder.decode(["x", "▁"]) == "x ":
            return decoder.decode(["x", name])[1:]
        return self.decode([token_id], skip_special_tokens=False)

    def has_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether `decode` uses this token; it ignores the others."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return False
        return self._backend.id_to_token(token_id) is not None

    def ids_without_token(self, vocab_size: int) -> list[int]:
        """Ids below `vocab_size` without a token, because a model's vocabulary may be padded."""
        known = set(self._backend.get_vocab(with_added_tokens=True).values())
        return [token_id for token_id in range(vocab_size) if token_id not in known]

    def token_to_id(self, token: str) -> int | None:
        """Id of a token by its name in the vocabulary; None if there is no such token."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Name of a token in the vocabulary, such as "Ġthe" for " the"; None for unknown ids."""
        return self._backend.id_to_token(token_id)

    def _encode_valid(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) <= LONG_TEXT_CHARS:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # Only the batch call lets other threads run meanwhile.
        batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        if token is None:
            return None
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise ConfigError(
                f"tokenizer_config.json has {name}={token!r}, but tokenizer.json has no such "
                "token. Download the files again."
            )
        return token_id

    def _read_added_ids(
        self, tokenizer_config: Mapping[str, object]
    ) -> tuple[list[int] | None, list[int]]:
        """Ids to put before and after a text. With prefix None, tokenizer.json adds its own."""
        flags = [tokenizer_config.get(name) for name in ("add_bos_token", "add_eos_token")]
        if all(flag is None for flag in flags):
            return None, []
        ids = (self.bos_token_id, self.eos_token_id)
        prefix, suffix = (
            [token_id] if flag and token_id is not None else []
            for flag, token_id in zip(flags, ids, strict=True)
        )
        return prefix, suffix


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    encoded = path.read_bytes()
    if encoded.startswith(_LFS_POINTER):
        raise ConfigError(
            f"{path} is a Git LFS pointer: the file itself was not downloaded. Run `git lfs pull` "
            "in its folder."
        )
    try:
        # The library reads only UTF-8 without a byte order mark.
        return tokenizers.Tokenizer.from_str(encoded.decode(json.detect_encoding(encoded)))
    # The library raises a bare Exception for every kind of malformed file.
    except Exception as error:
        raise ConfigError(
            f"{path} cannot be read as a tokenizer: {error}. Download it again."
        ) from error


def read_json_object(path: Path) -> dict[str, object]:
    """Reads a JSON file, encoded as UTF-8, UTF-16 or UTF-32. A missing file is an empty object.

    Raises:
        ConfigError: The file contains no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid JSON: {error}. Correct the file or download it again."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} contains a {type(content).__name__}; it must contain a JSON object. Correct "
            "the file or download it again."
        )
    return content


def _read_named_tokens(
    tokenizer_config: Mapping[str, object],
) -> dict[str, tokenizers.AddedToken]:
    """Named tokens: fields that end in "_token", and named tokens of `extra_special_tokens`."""
    named = {name: value for name, value in tokenizer_config.items() if name.endswith("_token")}
    extra = tokenizer_config.get("extra_special_tokens")
    if isinstance(extra, Mapping):
        named.update(extra)
    tokens = {name: _as_special_token(value) for name, value in named.items()}
    return {name: token for name, token in tokens.items() if token is not None}


def _read_extra_tokens(tokenizer_config: Mapping[str, object]) -> list[tokenizers.AddedToken]:
    """Special tokens without a name; older checkpoints call them `additional_special_tokens`."""
    values = tokenizer_config.get("extra_special_tokens")
    if not isinstance(values, list) or not values:
        values = tokenizer_config.get("additional_special_tokens")
    if not isinstance(values, list):
        return []
    return [token for token in map(_as_special_token, values) if token is not None]


def _as_special_token(value: object) -> tokenizers.AddedToken | None:
    """Reads "</s>" or {"content": "</s>", "lstrip": false, ...}; None for other values."""
    fields = value if isinstance(value, Mapping) else {"content": value}
    content = fields.get("content")
    if not isinstance(content, str) or not content:
        return None
    return tokenizers.AddedToken(content, **{**_token_flags(fields), "special": True})


def _token_flags(fields: Mapping[str, object]) -> dict[str, bool]:
    return {name: bool(fields[name]) for name in _TOKEN_FLAGS if name in fields}


def _mark_special(
    backend: tokenizers.Tokenizer,
    named: Collection[tokenizers.AddedToken],
    extra: Collection[tokenizers.AddedToken],
) -> None:
    """Marks tokens as special, as in transformers: vocabulary tokens, and named added tokens.

    Tokens without an id are ignored, because the model has no embedding for them.
    """
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    changed: dict[str, tokenizers.AddedToken] = {}
    for token in (*named, *extra):
        if token.content not in added and backend.token_to_id(token.content) is not None:
            changed.setdefault(token.content, token)
    for token in named:
        known = added.get(token.content)
        if known is not None and not known.special:
            known.special = True
            changed[token.content] = known
    # In one call, because each call processes all added tokens again, perhaps thousands.
    backend.add_special_tokens([*changed.values()])


def _add_config_tokens(backend: tokenizers.Tokenizer, added_tokens: object) -> None:
    """Adds the tokens of tokenizer_config.json.

    If tokenizer.json has the same token, tokenizer_config.json takes precedence, as in
    transformers.

    Raises:
        ConfigError: A new token would not get the id that tokenizer_config.json gives it.
    """
    added = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    changed: list[tokenizers.AddedToken] = []
    new_ids: dict[str, int] = {}
    for token_id, token in _read_added_tokens(added_tokens):
        if repr(token) != added.get(token.content):
            changed.append(token)
        if backend.token_to_id(token.content) is None:
            new_ids[token.content] = token_id
    backend.add_tokens(changed)
    for content, token_id in new_ids.items():
        if backend.token_to_id(content) != token_id:
            raise ConfigError(
                f"tokenizer_config.json gives token {content!r} the id {token_id}, but the "
                f"next free id of tokenizer.json is {backend.token_to_id(content)}."
            )


def _read_added_tokens(added_tokens: object) -> list[tuple[int, tokenizers.AddedToken]]:
    """Reads {"7": {"content": "<tool>", "special": true}}, sorted by id."""
    if added_tokens is None:
        return []
    if not isinstance(added_tokens, Mapping):
        raise _bad_added_tokens(added_tokens)
    found: list[tuple[int, tokenizers.AddedToken]] = []
    for key, fields in added_tokens.items():
        content = fields.get("content") if isinstance(fields, Mapping) else None
        if not key.isdecimal() or not isinstance(content, str) or not content:
            raise _bad_added_tokens({key: fields})
        found.append((int(key), tokenizers.AddedToken(content, **_token_flags(fields))))
    return sorted(found, key=lambda entry: entry[0])


def _bad_added_tokens(got: object) -> ConfigError:
    return ConfigError(
        f"added_tokens_decoder of tokenizer_config.json has {got!r}; expected ids with their "
        'tokens, such as {"7": {"content": "<tool>"}}. Download it again.'
    )
