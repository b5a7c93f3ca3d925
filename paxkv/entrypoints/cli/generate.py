"""`paxkv generate`: completes prompts in this process, without a server."""

from paxkv.entrypoints.command_end import end_by_signals, ended_by_interrupt, run_command

# Before the imports below, which are slow.
if __name__ == "__main__":
    end_by_signals()

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Sequence

from paxkv.config.cache_config import CacheConfig
from paxkv.config.command_line import add_config_flags, config_from_arguments
from paxkv.config.model_config import ModelConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.request_output import RequestOutput
from paxkv.entrypoints.cli.arguments import add_serve_arguments, parse_arguments
from paxkv.entrypoints.cli.command_parser import CommandParser
from paxkv.errors import ConfigError, EngineDeadError, InvalidRequestError
from paxkv.package_origin import check_package_origin

# Before the imports below, which fail without an explanation if another package is named `models`.
try:
    check_package_origin()
except ConfigError as error:
    raise SystemExit(f"paxkv: error: {error}") from None

from models.errors import ModelError
from paxkv.llm import LLM

_CONFIG_CLASSES = (ModelConfig, CacheConfig, SchedulerConfig, RunnerConfig)
# LLM has no `served_model_name`. It calls `policy` `scheduling_policy`, as vLLM does.
_NOT_LLM_ARGUMENTS = ("served_model_name", "policy")
# Field of SamplingParams, type, help.
_SAMPLING = (
    ("max_tokens", int, "largest number of new tokens"),
    ("temperature", float, "sampling temperature; 0 chooses the most likely token"),
    ("top_p", float, "total probability of the most likely tokens to sample from"),
    ("top_k", int, "number of most likely tokens to sample from; 0 is all"),
    ("min_p", float, "smallest probability, as a share of the most likely token's"),
    ("n", int, "number of completions of each prompt"),
    ("seed", int, None),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the completions in the prompts' order; returns the exit code of the process."""
    namespace = parse_arguments(make_parser(), arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if namespace.system_prompt is not None and not namespace.chat:
        print("paxkv: error: --system-prompt needs --chat.", file=sys.stderr)
        return 1
    prompts = namespace.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        print("paxkv: error: no prompt; use --prompt TEXT or write to stdin.", file=sys.stderr)
        return 1
    try:
        # Reject invalid sampling parameters before the model is loaded.
        given = _given_sampling_fields(namespace)
        SamplingParams(**given)
        with ended_by_interrupt(), _make_llm(namespace) as llm:
            params = dataclasses.replace(llm.get_default_sampling_params(), **given)
            cuts_max_tokens = "max_tokens" not in given
            if namespace.chat:
                conversations = [_conversation(p, namespace.system_prompt) for p in prompts]
                outputs = llm.chat(conversations, params, cuts_max_tokens=cuts_max_tokens)
            else:
                outputs = llm.generate(
                    prompts,
                    params,
                    use_tqdm=sys.stderr.isatty(),
                    cuts_max_tokens=cuts_max_tokens,
                )
    except (ConfigError, ModelError, InvalidRequestError, EngineDeadError) as error:
        print("paxkv: error:", *str(error).splitlines(), file=sys.stderr)
        return 1
    for prompt, output in zip(prompts, outputs, strict=True):
        _show(prompt, output, is_json=namespace.json)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The engine's flags, the prompts, and the most common sampling parameters."""
    parser = CommandParser(
        prog="paxkv generate",
        description="Completes prompts in this process, without a server. Prompts come from "
        "--prompt, or from the lines of stdin.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="prompt to complete; may be repeated"
    )
    parser.add_argument(
        "--chat", action="store_true", help="put each prompt into the model's chat template"
    )
    parser.add_argument(
        "--system-prompt", metavar="TEXT", help="system message before each prompt, with --chat"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object per prompt, with all its completions",
    )
    group = parser.add_argument_group("SamplingParams", "How tokens are sampled.")
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    for name, value_type, help_text in _SAMPLING:
        flag = "--sampling-seed" if name == "seed" else "--" + name.replace("_", "-")
        help_text = help_text or "seed that makes sampling repeatable; --seed is the engine's seed"
        default = defaults[name]
        if name not in ("n", "seed"):
            default = f"that of the model's generation_config.json, else {default}"
        group.add_argument(
            flag,
            dest=f"sampling_{name}",
            type=value_type,
            metavar=value_type.__name__.upper(),
            help=f"{help_text} (default: {default})",
        )
    for config_class in _CONFIG_CLASSES:
        add_config_flags(parser, config_class, without=("served_model_name",))
    add_serve_arguments(parser)
    return parser


def _given_sampling_fields(namespace: argparse.Namespace) -> dict[str, int | float]:
    fields = {name: getattr(namespace, f"sampling_{name}") for name, _, _ in _SAMPLING}
    return {name: value for name, value in fields.items() if value is not None}


def _make_llm(namespace: argparse.Namespace) -> LLM:
    settings = {}
    for config_class in _CONFIG_CLASSES:
        config = config_from_arguments(config_class, namespace)
        settings |= {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    settings = {name: value for name, value in settings.items() if name not in _NOT_LLM_ARGUMENTS}
    settings["override_generation_config"] = namespace.override_generation_config.given
    return LLM(scheduling_policy=namespace.policy, **settings)


def _conversation(prompt: str, system_prompt: str | None) -> list[dict[str, str]]:
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": prompt}]


def _show(prompt: str, output: RequestOutput, *, is_json: bool) -> None:
    if is_json:
        completions = [
            {"text": c.text, "finish_reason": c.finish_reason, "num_tokens": len(c.token_ids)}
            for c in output.outputs
        ]
        print(json.dumps({"prompt": prompt, "completions": completions}, ensure_ascii=False))
        return
    for completion in output.outputs:
        print(completion.text)


if __name__ == "__main__":
    sys.exit(run_command(main))
