"""vLLM's spellings of flags: `--max_num_seqs 8`, `--compilation-config.level 3` and `-O3`."""

import json
from collections.abc import Collection, Sequence

from paxkv.config.vllm_flags import plain_value
from paxkv.errors import ConfigError

# Short flags of settings whose values are objects.
_SHORT_OBJECT_FLAGS = {
    "-O": "--compilation-config",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-sc": "--speculative-config",
}


def plain_words(words: Sequence[str], known_flags: Collection[str]) -> list[str]:
    """Rewrites a command line with the flags that the parser knows.

    ["--max_num_seqs=8", "--a.b", "1", "--a.c.d=x"] -> ["--max-num-seqs=8",
    '--a={"b": 1, "c": {"d": "x"}}'], if `--a` is a known flag. `plain_value` reads the values of
    keys; the last value of a key counts. A key that ends in "+" adds comma-separated items to a
    list. Words after "--" do not change.

    Raises:
        ConfigError: A key has no value, or does not fit the other keys of its flag.
    """
    plain: list[str] = []
    objects: dict[str, dict[str, object]] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if word == "--":
            plain += [word, *remaining]
            break
        name, equals, value = word.partition("=")
        flag, dot, path = name.partition(".")
        flag = _SHORT_OBJECT_FLAGS.get(flag, flag) if dot else _dashed(flag)
        if not dot:
            plain.append(flag + equals + value if flag in known_flags else word)
            continue
        flag = _dashed(flag)
        if not flag.startswith("-") or flag not in known_flags:
            plain.append(word)
            continue
        if not equals:
            # A value such as -1 may begin with one dash. A word with two dashes is the next flag.
            if not remaining or remaining[0].startswith("--"):
                raise ConfigError(f"{name} needs a value, as in {name} 1.")
            value = remaining.pop(0)
        _put(objects.setdefault(flag, {}), path.split("."), value, name)
    for flag, fields in objects.items():
        if any(word.partition("=")[0] == flag for word in plain):
            raise ConfigError(
                f"{flag} is given as a whole and key by key; use only one of the two forms."
            )
        # Insert at the front, because words at the end may be values of the last flag.
        plain.insert(0, f"{flag}={json.dumps(fields)}")
    return plain


def _dashed(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


def _put(fields: dict[str, object], keys: Sequence[str], text: str, name: str) -> None:
    """Sets `fields[keys[0]][keys[1]]...`."""
    *outer, last = keys
    for key in outer:
        fields = fields.setdefault(key, {})
        if not isinstance(fields, dict):
            raise ConfigError(f"{name}: {key} already has a value that is not an object.")
    if not last.removesuffix("+"):
        raise ConfigError(f"{name} names no key; write a key after the dot.")
    if not last.endswith("+"):
        fields[last] = plain_value(text)
        return
    items = fields.setdefault(last[:-1], [])
    if not isinstance(items, list):
        raise ConfigError(f"{name}: {last[:-1]} already has a value that is not a list.")
    items += map(plain_value, text.split(","))
