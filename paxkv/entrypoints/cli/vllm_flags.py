"""Parses vLLM's flags that paxkv does not have, and warns about them or rejects them."""

import argparse
from collections.abc import Sequence

from paxkv.config.vllm_flags import VLLM_FLAGS, VllmFlag, accepted_values

_SEEN = "vllm_flags"


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `VLLM_FLAGS` that the parser does not have itself, hidden from its help."""
    for flag in VLLM_FLAGS:
        names = [name for name in flag.names if name not in parser._option_string_actions]
        if flag.num_values == 0:
            names += [name.replace("--", "--no-", 1) for name in names if name.startswith("--")]
        nargs = None if flag.num_values == 1 else flag.num_values
        if names:
            parser.add_argument(
                *names,
                nargs=nargs,
                action=_RecordAction,
                dest=argparse.SUPPRESS,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
                flag=flag,
            )


def drain_warnings(namespace: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Returns a warning for each ignored flag. A rejected flag ends the program."""
    warnings = []
    for name, flag, values in vars(namespace).pop(_SEEN, []):
        value: object = values
        if flag.num_values == 0:
            value = not name.startswith("--no-")
        elif flag.num_values in (1, "?"):
            # A flag without a value is a switch that is on.
            value = values[0] if values else True
        verdict = flag.verdict(value)
        if verdict == "ignored":
            warnings.append(f"{name} has no effect: {flag.reason}.")
        elif verdict == "refused":
            got = f", got {' '.join(values)!r}" if values else ""
            accepted = [] if flag.num_values == 0 else accepted_values(flag)
            expected = f"; expected {' or '.join(accepted)}" if accepted else ""
            parser.error(f"vLLM's {name} is not supported here: {flag.reason}{got}{expected}.")
    return warnings


class _RecordAction(argparse.Action):
    """Records a flag and its values; `drain_warnings` judges them after parsing."""

    def __init__(self, *, flag: VllmFlag, **named: object) -> None:
        super().__init__(**named)
        self._flag = flag

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[str] | None,
        option_string: str | None = None,
    ) -> None:
        values = [values] if isinstance(values, str) else list(values or ())
        seen = getattr(namespace, _SEEN, [])
        setattr(namespace, _SEEN, [*seen, (option_string, self._flag, values)])
