"""SlowRequest: a request of SlowScheduler; Prediction: what SlowScheduler expects of a step."""

import dataclasses


@dataclasses.dataclass
class SlowRequest:
    """One request. `status` is "waiting", "remote", "running", "preempted" or "finished".

    Args:
        scope: What keeps equal tokens of two requests apart: salt, adapter.
        max_tokens: Prompt and output tokens at which it ends by its length.
        stop_at: Tokens that end it.
        external: Tokens of its prompt that the connector has; None while it does not know.
        is_async: Whether they are loaded while other steps run.
    """

    request_id: str
    tokens: list
    num_prompt: int
    scope: object
    max_tokens: int
    stop_at: frozenset = frozenset()
    min_output: int = 0
    priority: int = 0
    arrival: float = 0.0
    skips_reading: bool = False
    fork_from: str | None = None
    keep_blocks: bool = False
    external: int | None = 0
    is_async: bool = False
    status: str = "waiting"
    num_computed: int = 0
    num_cached: int = 0
    has_run: bool = False
    num_loading: int = 0
    is_loaded: bool = False
    source: "SlowRequest | None" = None
    drafts: list = dataclasses.field(default_factory=list)
    # Sampled tokens that steps in flight will return for it.
    num_placeholders: int = 0
    # Tokens after which its state is saved, because others share this prefix.
    save_at: int = 0
    # Tokens at its beginning that other requests are likely to have.
    num_leading: int = 0
    # Whether it has ended, and its state is that after `num_computed` tokens.
    has_final_state: bool = False

    @property
    def keeps_state(self):
        """Whether it saves its state for forks while it runs."""
        return self.keep_blocks and 1 < self.num_prompt < self.max_tokens - 1

    @property
    def order(self):
        return (self.priority, self.arrival, self.request_id)


@dataclasses.dataclass
class Prediction:
    """What one step must look like.

    Args:
        wanted: Request id -> request that its tokens are for; ended or preempted ones are removed.
        num_decode_steps: More than 1 in a burst.
    """

    num_scheduled: dict
    computed_before: dict
    drafts: dict
    preempted: list
    new: list
    resumed: list
    wanted: dict = dataclasses.field(default_factory=dict)
    # Request id -> first token that the connector loads for it in the step.
    loads: dict = dataclasses.field(default_factory=dict)
    num_decode_steps: int = 1
    # Request id -> position from which its state is written to a new slot, within a burst.
    slot_switches: dict = dataclasses.field(default_factory=dict)
