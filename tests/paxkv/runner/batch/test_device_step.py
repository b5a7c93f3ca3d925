"""Steps return an output to the scheduler, with or without tokens."""

import dataclasses

from paxkv.contracts.scheduler_output import KVConnectorOutput, ModelRunnerOutput
from paxkv.runner.batch.device_step import FinishedStep
from paxkv.runner.features.base import StepFeature


class Loads(StepFeature):
    """Reports a load that ended while all requests waited for it."""

    def finish_empty(self, output):
        loaded = KVConnectorOutput(finished_recving=frozenset({"a"}))
        return dataclasses.replace(output, kv_connector_output=loaded)


class Nothing(StepFeature):
    """Has nothing to report."""


def test_features_report_in_a_step_without_tokens():
    output = FinishedStep((Nothing(), Loads())).sample_tokens()
    assert output.kv_connector_output.finished_recving == {"a"}
    nothing = ModelRunnerOutput(req_ids=[], sampled_token_ids=[], logprobs=[])
    assert FinishedStep((Nothing(),)).sample_tokens() == nothing
