"""Which modules compressed-tensors quantizes, and how: `config_groups` and `ignore`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from models.errors import UnsupportedModelError
from models.loading.quantized.compressed_scheme import CompressedScheme, read_scheme
from models.loading.quantized.quantization_fields import (
    FIELD,
    as_object,
    compile_pattern,
    read_names,
)

_PATTERN = "re:"


class NamedModules:
    """The modules that a list names by their own names, regular expressions or classes.

    A checkpoint does not contain the class of a module, so the name of any class, such as "Linear",
    matches all modules that have quantized tensors.

    Args:
        entries: "model.layers.0.mlp.up_proj", "re:.*up_proj" or "Linear".
        field: The full name of the list, for messages.

    Source: compressed-tensors 0.20, `match_targets`.
    """

    def __init__(self, entries: Sequence[str], *, field: str) -> None:
        self._names = frozenset(entries)
        self._patterns = [
            compile_pattern(entry.removeprefix(_PATTERN), field)
            for entry in entries
            if entry.startswith(_PATTERN)
        ]
        self.has_classes = any(entry.isidentifier() and entry[0].isupper() for entry in entries)

    def has_name(self, module: str) -> bool:
        """Whether the list has the name of the module."""
        return module in self._names

    def has_pattern(self, module: str) -> bool:
        """Whether a regular expression of the list matches the start of the module's name."""
        return any(pattern.match(module) is not None for pattern in self._patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeGroup:
    """One of the `config_groups`."""

    targets: NamedModules
    scheme: CompressedScheme


def read_groups(fields: Mapping[str, object]) -> tuple[SchemeGroup, ...]:
    """Reads the `config_groups` that quantize weights.

    Raises:
        ModelConfigError: A field is missing or of the wrong type.
        UnsupportedModelError: The numbers of a group have another format.
    """
    groups = []
    config_groups = as_object(fields.get("config_groups") or {}, f"{FIELD}.config_groups")
    for name, value in config_groups.items():
        path = f"{FIELD}.config_groups.{name}"
        group = as_object(value, path)
        scheme = read_scheme(group, default_format=fields.get("format"), path=path)
        if scheme is not None:
            entries = read_names(group, "targets", path=path)
            targets = NamedModules(entries, field=f"{path}.targets")
            groups.append(SchemeGroup(targets=targets, scheme=scheme))
    return tuple(groups)


def scheme_of(module: str, groups: Sequence[SchemeGroup]) -> CompressedScheme:
    """The scheme of the group that names the module most exactly.

    Raises:
        UnsupportedModelError: No group has the module.
    """
    for matches in (
        lambda targets: targets.has_name(module),
        lambda targets: targets.has_pattern(module),
        lambda targets: targets.has_classes,
    ):
        for group in groups:
            if matches(group.targets):
                return group.scheme
    raise UnsupportedModelError(
        f"config.json: no group in {FIELD}.config_groups has the module {module!r}, whose weight "
        "is quantized. Use the config.json that was published with the weights."
    )
