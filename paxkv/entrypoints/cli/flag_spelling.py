"""vLLM's ways to write a flag: `--max_num_seqs 8`, `--compilation-config.level 3` and `-O3`."""

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
    """The same command line, with flags as the parser knows them.

    ["--max_num_seqs=8", "--a.b", "1", "--a.c.d=x"] -> ["--max-num-seqs=8",
    '--a={"b": 1, "c": {"d": "x"}}'], where `--a` is a known flag. Values of keys are read by
    `plain_value`; the last value of a key counts. A key that ends in "+" adds to a list, with
    commas between several items. Words after "--" stay as they are.

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
            # A value may begin with one dash, as -1 does. The next flag is no value.
            if not remaining or remaining[0].startswith("--"):
                raise ConfigError(f"{name} needs a value, as in {name} 1.")
            value = remaining.pop(0)
        _put(objects.setdefault(flag, {}), path.split("."), value, name)
    for flag, fields in objects.items():
        if any(word.partition("=")[0] == flag for word in plain):
            raise ConfigError(
                f"{flag} is given as a whole and key by key; write all of it in one way."
            )
        # At the front, because words after the last flag may be values of it.
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
