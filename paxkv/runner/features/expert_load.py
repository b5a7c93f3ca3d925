"""A step feature that counts the load of experts: the tokens that go to each expert of a layer."""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from models import EXPERT_TOKENS, LoadedModel, Outputs, Report, Wants
from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.errors import ConfigError
from paxkv.runner.features.base import FeatureStep, StepFeature
from paxkv.runner.features.feature_device import FeatureDevice
from paxkv.runner.memory.zeros import put_zeros
from paxkv.runner.shapes.scheduled_rows import ScheduledRows
from paxkv.runner.shapes.step_variant import DeviceArray, StepPart, StepVariant

logger = logging.getLogger(__name__)

_COUNTS = "expert_counts"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoadVariant(StepVariant):
    """Counts the choices of all tokens in an array that stays on the device.

    A choice is one token going to one expert.
    """

    num_layers: int
    num_experts: int

    @property
    def is_in_every_program(self) -> bool:
        return True

    def arrays(self) -> Mapping[str, DeviceArray]:
        dims = (self.num_layers, self.num_experts)
        return {_COUNTS: DeviceArray(dims=dims, dtype="int32", is_donated=True)}

    def wants(self, wants: Wants) -> Wants:
        report = Report(name=EXPERT_TOKENS, dims=(self.num_experts,))
        return dataclasses.replace(wants, reports=(*wants.reports, report))

    def update(
        self,
        values: Mapping[str, jax.Array],
        outputs: Outputs,
        part: StepPart,
        logits_of: Callable[[jax.Array], jax.Array],
    ) -> Mapping[str, jax.Array]:
        return {_COUNTS: values[_COUNTS] + outputs.reports[EXPERT_TOKENS]}


class ExpertLoad(StepFeature):
    """Reads the counts from the device once per window, and logs a line about each window.

    A window begins with a step. It ends at the first step, or the first call of `stats`, that is at
    least `window_s` later. Steps then get a fresh array. The feature reads the old array as soon as
    the device has finished it, so steps never wait. When an engine is idle, `stats` shows its last
    steps once the window is over.

    Args:
        clock: Returns seconds; it never goes back.
    """

    def __init__(
        self, model: LoadedModel, window_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Finds the experts of the model.

        Raises:
            ConfigError: The model has no experts.
        """
        num_experts = _experts_of_layers(model)
        if not num_experts:
            raise ConfigError(
                f"expert_load_window is {window_s:g}, but no layer of the model has experts. Leave "
                "--expert-load-window out for this model."
            )
        self._variant = ExpertLoadVariant(
            num_layers=model.config.num_layers, num_experts=max(num_experts.values())
        )
        self._num_experts = num_experts
        self._window_s = window_s
        self._clock = clock
        self._began_s: float | None = None  # None: no step has run in this window
        self._ended: jax.Array | None = None  # counts of an ended window, until they are read
        self._ended_took_s = 0.0
        self._totals_np = np.zeros((self._variant.num_layers, self._variant.num_experts), np.int64)
        self._is_new = False

    def variants(self) -> tuple[StepVariant, ...]:
        return (self._variant,)

    def before_step(self, scheduler_output: SchedulerOutput, device: FeatureDevice) -> None:
        self._end_window()
        if self._began_s is None and scheduler_output.num_scheduled_tokens:
            self._began_s = self._clock()

    def plan(self, step: ScheduledRows) -> FeatureStep | None:
        """Returns None, because the variant is in every program and needs nothing from the host."""
        return None

    def stats(self, *, only_new: bool) -> Mapping[str, object]:
        """Returns the field `SchedulerStats.expert_tokens`."""
        self._end_window()
        if only_new:
            was_new, self._is_new = self._is_new, False
            if not was_new:
                return {}
        expert_tokens = {
            layer_idx: tuple(self._totals_np[layer_idx, :num_experts].tolist())
            for layer_idx, num_experts in self._num_experts.items()
        }
        return {"expert_tokens": expert_tokens}

    def _end_window(self) -> None:
        """Reads the counts of an ended window, and ends the current window if its time is over."""
        self._read_ended()
        if self._ended is not None or self._began_s is None:
            return
        took_s = self._clock() - self._began_s
        if took_s >= self._window_s:
            ended = self.arrays[_COUNTS]
            self.arrays[_COUNTS] = put_zeros(ended.shape, ended.dtype, ended.sharding)
            self._ended, self._ended_took_s, self._began_s = ended, took_s, None
            self._read_ended()

    def _read_ended(self) -> None:
        if self._ended is None or not self._ended.is_ready():
            return
        with jax.transfer_guard_device_to_host("allow"):
            counts_np = np.asarray(self._ended)
        self._ended = None
        self._totals_np += counts_np
        self._is_new = True
        of_layers = {
            layer_idx: counts_np[layer_idx, :n] for layer_idx, n in self._num_experts.items()
        }
        logger.info("expert load in %.1f s: %s", self._ended_took_s, describe_load(of_layers))


def describe_load(
    of_layers: Mapping[int, np.ndarray],  # i[num_experts] by the number of the layer
) -> str:
    """Describes the counts of a window in words, for the log.

    The imbalance of a layer is the load of its busiest expert, divided by the mean load of all its
    experts: 1 is perfectly even. A layer with less than half of the choices of another layer counts
    neither for imbalances nor for idle experts, because few choices are uneven by chance. The last
    layer has few choices if most tokens are inside prompts, because it skips these tokens.
    """
    num_choices = {layer_idx: int(counts_np.sum()) for layer_idx, counts_np in of_layers.items()}
    most = max(num_choices.values())
    if not most:
        return "0 choices"
    full = {idx: counts_np for idx, counts_np in of_layers.items() if 2 * num_choices[idx] >= most}
    imbalances = {idx: counts_np.max() / counts_np.mean() for idx, counts_np in full.items()}
    worst = max(imbalances, key=imbalances.__getitem__)
    num_idle = sum(int((counts_np == 0).sum()) for counts_np in full.values())
    return (
        f"{sum(num_choices.values())} choices, imbalance "
        f"{np.median(list(imbalances.values())):.2f} in the median layer and "
        f"{imbalances[worst]:.2f} in layer {worst}, "
        f"{num_idle} of {sum(map(len, full.values()))} experts idle"
    )


def _experts_of_layers(model: LoadedModel) -> dict[int, int]:
    """Layer number -> number of experts, for the layers that have experts."""
    # "layers.3.mlp.experts.up_proj.kernel" [num_experts, in, out]
    parameters = model.parameters | model.stack_places
    return {
        int(name.split(".")[1]): parameters[name].shape[0]
        for name, rule in model.weight_rules.items()
        if rule.layout == "experts" and name.startswith("layers.")
    }
