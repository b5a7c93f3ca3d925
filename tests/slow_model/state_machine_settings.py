"""How long the state machines run: at least 500 steps each by default, far more when slow."""

from hypothesis import HealthCheck, Phase, settings

STEPS_PER_EXAMPLE = 50


def quick(num_examples):
    """The same examples in every run. Failures are not shrunk: that may take minutes."""
    return settings(
        max_examples=num_examples,
        stateful_step_count=STEPS_PER_EXAMPLE,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


def long(num_examples):
    """Different examples in every run; a failing one is shrunk."""
    return settings(
        quick(num_examples),
        stateful_step_count=2 * STEPS_PER_EXAMPLE,
        derandomize=False,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )
