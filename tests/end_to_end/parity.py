"""Compares the engine with live transformers under settings that must not change an answer."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from models import LoadedModel, load_model
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.kv_cache_spec import MambaSpec
from paxkv.generate import CompiledGenerator, GenerateShape
from paxkv.runner.model_runner import ModelRunner
from tests.end_to_end.engine_harness import (
    MAX_DECODE_BURST,
    EngineSettings,
    RecordingRunner,
    RunResult,
    greedy,
    run_engine,
)

if TYPE_CHECKING:
    import torch

NUM_NEW_TOKENS = 12
# The largest error of transformers itself that is accepted. A larger one would hide our errors.
MAX_REFERENCE_ERROR = 1e-3
MIN_BOUND = 1e-4
# If the logits of the two best tokens differ by less than this many bounds, either may be drawn.
SURE_GAP = 4
MAX_UNSURE_SHARE = 0.05

_BLOCK_SIZE = 8
_ROOMY = EngineSettings(block_size=_BLOCK_SIZE, num_blocks=200, enable_prefix_caching=False)
# All settings use the programs of one runner.
SETTINGS: dict[str, EngineSettings] = {
    "roomy": _ROOMY,
    "prefix cache": dataclasses.replace(_ROOMY, enable_prefix_caching=True, arrival_gap=8),
    "odd chunks": dataclasses.replace(_ROOMY, max_num_batched_tokens=13),
    "bursts": dataclasses.replace(_ROOMY, max_decode_burst=MAX_DECODE_BURST, max_steps_in_flight=2),
}
# Of the families with states. Bursts save states too.
SAVED_STATES = dataclasses.replace(
    SETTINGS["prefix cache"], max_decode_burst=MAX_DECODE_BURST, max_steps_in_flight=2
)
# Of the families with programs of every kind.
FORKS = dataclasses.replace(_ROOMY, enable_prefix_caching=True, has_forks=True)


def largest_difference(largest_logit: float, relative_error: float) -> float:
    """Largest difference of a logit that is not an error of ours.

    Args:
        relative_error: The error of transformers' own logits, as in `Reference`.
    """
    assert relative_error <= MAX_REFERENCE_ERROR
    return max(MIN_BOUND, 3 * relative_error) * largest_logit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """What transformers makes of some prompts."""

    prompts: list[list[int]]
    token_ids: list[list[int]]
    logits: list[np.ndarray]  # f32[NUM_NEW_TOKENS, vocab] for each
    # How far transformers' own rounding changes its logits: their largest difference from those of
    # two runs without a cache, one of them with slightly changed weights, as a share of the largest
    # logit.
    relative_error: float

    @property
    def bound(self) -> float:
        """Largest difference of a logit that is not an error of ours."""
        largest = max(float(np.abs(logits).max()) for logits in self.logits)
        return largest_difference(largest, self.relative_error)

    def gap(self, req_idx: int, position: int) -> float:
        """How far the best token is before the next one."""
        second, first = np.sort(self.logits[req_idx][position])[-2:]
        return float(first - second)


@dataclasses.dataclass(kw_only=True)
class Compared:
    """A row of the table."""

    num_positions: int = 0
    num_unsure: int = 0  # another token than the reference's, by less than `SURE_GAP` bounds
    worst: float = 0.0  # difference of a logit, as a share of the bound

    def add_logits(
        self, reference: Reference, req_idx: int, position: int, got: np.ndarray
    ) -> None:
        difference = float(np.abs(got - reference.logits[req_idx][position]).max())
        assert difference <= reference.bound, (
            f"request {req_idx}, position {position}: a logit differs by {difference:.3g}, "
            f"the bound is {reference.bound:.3g}"
        )
        self.worst = max(self.worst, difference / reference.bound)

    def add_token(self, reference: Reference, req_idx: int, position: int, token_id: int) -> bool:
        """Counts a position; whether the reference has the same token there."""
        self.num_positions += 1
        if token_id == reference.token_ids[req_idx][position]:
            return True
        gap = reference.gap(req_idx, position)
        assert gap < SURE_GAP * reference.bound, (
            f"request {req_idx}, position {position}: token {token_id} instead of "
            f"{reference.token_ids[req_idx][position]}, which leads by {gap:.3g}"
        )
        self.num_unsure += 1
        return False

    def check(self) -> None:
        assert self.num_unsure <= MAX_UNSURE_SHARE * self.num_positions


def make_checkpoint(
    family: str, folder: Path, seed: int, *, is_shallow: bool, is_sharp: bool
) -> "torch.nn.Module":
    """Saves the checkpoint of that seed of a family or a whole, and returns transformers' model.

    Args:
        is_shallow: The checkpoint is that of `more_families.SHALLOW`, if the family is there.
        is_sharp: Whether the best token of most positions leads clearly.
    """
    from tests.oracles import families, more_families, wholes

    if family in wholes.LOADED:
        return wholes.make_whole(family, folder, seed, is_sharp=is_sharp)
    table = families.FAMILIES | families.EXTRA | families.NEWEST
    if is_shallow:
        table |= more_families.SHALLOW
    model, _ = families.build(family, seed, table)
    if change := more_families.CHANGES.get(family):
        change(model)
    if implementation := more_families.ATTENTION.get(family):
        model.config._attn_implementation = implementation
    if is_sharp:
        families.sharpen(model, seed)
    families.finish(model, folder)
    return model


def make_reference(family: str, folder: Path, seed: int, *, is_shallow: bool = False) -> Reference:
    """Saves the family's checkpoint of that seed, and runs transformers on it.

    Args:
        is_shallow: As in `make_checkpoint`.
    """

    from tests.oracles import families, more_families

    model = make_checkpoint(family, folder, seed, is_shallow=is_shallow, is_sharp=True)
    # Tokens that the head does not score are not text, and are in no prompt.
    vocab = getattr(model.config, "output_vocab_size", families.VOCAB)
    lengths = more_families.PROMPT_LENS.get(family)
    chosen = {} if lengths is None else {"lengths": lengths}
    prompts = families.prompts(seed, vocab, **chosen)
    reference = Reference(prompts=prompts, token_ids=[], logits=[], relative_error=0)
    for prompt in reference.prompts:
        token_ids, _, scores = families.greedy(model, prompt, NUM_NEW_TOKENS)
        reference.token_ids.append(token_ids)
        reference.logits.append(scores.numpy())
    errors = [_uncached_error(model, reference)]
    # Runs with and without a cache often round in the same way where the model is most sensitive.
    # So their difference alone can be far smaller than their error.
    _round_elsewhere(model, seed)
    errors.append(_uncached_error(model, reference))
    return dataclasses.replace(reference, relative_error=max(errors))


def _uncached_error(model: "torch.nn.Module", reference: Reference) -> float:
    """Largest difference of uncached logits from the reference's, by its largest logit."""
    import torch

    errors = []
    for prompt, token_ids, logits in zip(
        reference.prompts, reference.token_ids, reference.logits, strict=True
    ):
        tokens = torch.tensor([prompt + token_ids[:-1]])
        with torch.no_grad():
            uncached = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 :]
        errors.append(np.abs(uncached.float().numpy() - logits).max() / np.abs(logits).max())
    return float(max(errors))


def _round_elsewhere(model: "torch.nn.Module", seed: int) -> None:
    """Changes each weight by at most 2**-23 of itself, the precision of float32."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            noise = torch.rand(weights.shape, generator=generator) - 0.5
            weights.mul_(1 + noise * 2**-22)


class ParityEngine:
    """A family's programs, which all its seeds and settings share.

    Args:
        checkpoint: Of any seed.
        has_every_size: Whether the runners compile the sizes of programs that an engine with the
            default settings would use. Otherwise there is one program of steps and one of bursts.
        has_every_kind: Whether there are batch-invariant programs and a `CompiledGenerator`, too.
    """

    def __init__(self, checkpoint: Path, *, has_every_size: bool, has_every_kind: bool) -> None:
        make_runner = functools.partial(RecordingRunner, checkpoint, _BLOCK_SIZE)
        if not has_every_size:
            make_runner = functools.partial(
                make_runner,
                max_num_batched_tokens=_ROOMY.max_num_batched_tokens,
                has_few_sizes=True,
            )
        self._ordinary = make_runner()
        self._invariant = make_runner(batch_invariant=True) if has_every_kind else None
        self._generator = None
        if has_every_kind:
            shape = GenerateShape(
                batch_size=4,
                max_prompt_len=96,
                max_new_tokens=NUM_NEW_TOKENS,
                block_size=_BLOCK_SIZE,
            )
            self._generator = CompiledGenerator(load_model(checkpoint, dtype="float32"), shape)

    @property
    def _runners(self) -> list[ModelRunner]:
        return [
            recording.runner
            for recording in (self._ordinary, self._invariant)
            if recording is not None
        ]

    def load(self, checkpoint: Path) -> None:
        """Puts the weights of another checkpoint of the family in."""
        model = load_model(checkpoint, dtype="float32")
        for runner in self._runners:
            runner.worker.params = _put_like(model, runner.worker.params)
        if self._generator is not None:
            self._generator._model = model

    @property
    def num_programs(self) -> int:
        """Compiled so far, for all settings."""
        num_programs = sum(runner.worker.programs.num_compiles for runner in self._runners)
        if self._generator is not None:
            num_programs += self._generator._generate._cache_size()
        return num_programs

    def compare(self, reference: Reference) -> dict[str, Compared]:
        """A row for each setting that there are programs for."""
        rows = {
            name: self._follow(self._ordinary, reference, settings)
            for name, settings in SETTINGS.items()
        }
        tiny = dataclasses.replace(_ROOMY, num_blocks=self._tiny_pool(reference))
        rows["preempted"] = self._follow(self._ordinary, reference, tiny)
        if self._ordinary.has_states:
            rows["saved states"] = self._follow(self._ordinary, reference, SAVED_STATES)
            tiny = dataclasses.replace(SAVED_STATES, num_blocks=tiny.num_blocks, arrival_gap=2)
            rows["saved, preempted"] = self._follow(self._ordinary, reference, tiny)
        if self._invariant is not None:
            rows["forks"] = self._follow(self._ordinary, reference, FORKS)
            rows["batch-invariant"] = self._follow(self._invariant, reference, _ROOMY)
        if self._generator is not None:
            rows["CompiledGenerator"] = self._follow_generator(reference, self._generator)
        for row in rows.values():
            row.check()
        return rows

    def _tiny_pool(self, reference: Reference) -> int:
        """Blocks for the longest request and a third more, two slots, and the null block."""
        num_tokens = max(map(len, reference.prompts)) + NUM_NEW_TOKENS
        groups = self._ordinary.runner.kv_cache_config.kv_cache_groups
        num_held = {True: 0, False: 0}  # by whether the blocks are those of states
        for group in groups:
            num_held[isinstance(group.kv_cache_spec, MambaSpec)] += (
                group.kv_cache_spec.max_held_blocks(
                    max_model_len=num_tokens, max_num_batched_tokens=_ROOMY.max_num_batched_tokens
                )
            )
        return 1 + num_held[False] + num_held[False] // 3 + 2 * num_held[True]

    def _follow(
        self,
        recording: RecordingRunner,
        reference: Reference,
        settings: EngineSettings,
    ) -> Compared:
        row = Compared()
        # Each prompt comes twice in a row, so that the second one finds the first one's blocks.
        is_twice = settings.enable_prefix_caching

        def run(prompts: list[list[int]], max_tokens: list[int]) -> RunResult:
            params = [greedy(1, tokens)[0] for tokens in max_tokens]
            result = run_engine(recording, prompts, settings, sampling_params=params)
            _check_setting_had_effect(recording, settings, result, prompts)
            return result

        first = list(range(len(reference.prompts)))
        todo = [(idx, 0) for idx in first for _ in range(1 + is_twice)]
        while todo:
            prompts = [reference.prompts[idx] + reference.token_ids[idx][:at] for idx, at in todo]
            result = run(prompts, [NUM_NEW_TOKENS - at for _, at in todo])
            left = []
            for (idx, start), token_ids, logits in zip(
                todo, result.token_ids, result.logits, strict=True
            ):
                for position, (token_id, got) in enumerate(
                    zip(token_ids, logits, strict=True), start=start
                ):
                    row.add_logits(reference, idx, position, got)
                    if not row.add_token(reference, idx, position, token_id):
                        left += [(idx, position + 1)] * (position + 1 < NUM_NEW_TOKENS)
                        break
            todo = left
        return row

    def _follow_generator(self, reference: Reference, generator: CompiledGenerator) -> Compared:
        row = Compared()
        todo = [(idx, 0) for idx in range(len(reference.prompts))]
        while todo:
            prompts = [reference.prompts[idx] + reference.token_ids[idx][:at] for idx, at in todo]
            params = [
                SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS - at, ignore_eos=True)
                for _, at in todo
            ]
            left = []
            for (idx, start), token_ids in zip(
                todo, generator.generate(prompts, params), strict=True
            ):
                for position, token_id in enumerate(token_ids, start=start):
                    if not row.add_token(reference, idx, position, token_id):
                        left += [(idx, position + 1)] * (position + 1 < NUM_NEW_TOKENS)
                        break
            todo = left
        return row


def _check_setting_had_effect(
    recording: RecordingRunner,
    settings: EngineSettings,
    result: RunResult,
    prompts: Sequence[list[int]],
) -> None:
    """A setting that changes nothing would be shown by nothing. Not of the few that are left."""
    if len(prompts) < 4:
        return
    is_tiny = settings.num_blocks < _ROOMY.num_blocks
    may_preempt = is_tiny and recording.keeps_tokens
    assert (result.num_preemptions > 0) == may_preempt
    may_hit = settings.enable_prefix_caching and recording.can_hit
    # In a tiny pool there may be no room to save a state.
    if not (may_hit and is_tiny and recording.has_states):
        assert (sum(result.num_cached_tokens) > 0) == may_hit
    may_fork = settings.has_forks and recording.can_hit and recording.keeps_tokens
    assert (result.num_block_copies > 0) == may_fork


def _put_like(model: LoadedModel, params: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The model's parameters where and as `params` are."""
    put = [jax.device_put(new, old.sharding) for new, old in zip(model.params, params, strict=True)]
    assert all(
        (new.shape, new.dtype) == (old.shape, old.dtype)
        for new, old in zip(put, params, strict=True)
    )
    return tuple(put)


def table_line(family: str, seed: int, name: str, row: Compared, reference: Reference) -> str:
    """Of the printed table."""
    return (
        f"{family:16} {seed:4} {name:18} {row.num_positions:9} {row.num_unsure:6} "
        f"{row.worst:8.3f} {reference.relative_error:9.1e}"
    )


TABLE_HEAD = f"{'family':16} seed {'setting':18} positions unsure  of bound  own error"
