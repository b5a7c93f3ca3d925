"""`HeadDrafts`: which proposals of a head are verified."""

from paxkv.contracts.scheduler_output import ModelRunnerOutput
from paxkv.runner.drafters.acceptance import Acceptance
from paxkv.runner.drafters.depth_pacer import DepthPacer
from paxkv.runner.features.head_drafts import HeadDrafts, HeadStep


class RecordingPacer(DepthPacer):
    """Keeps the rates that it is asked about."""

    def __init__(self):
        super().__init__(max_drafts=2)
        self.rates = []

    def choose(self, rates):
        self.rates = list(rates)
        return super().choose(rates)


class Run:
    """Steps of one request, whose tokens are all 7."""

    def __init__(self):
        self.pacer = RecordingPacer()
        self.feature = HeadDrafts(None, max_drafts=2, pacer=self.pacer)
        self.start()

    def start(self):
        self.feature._requests["r"] = Acceptance(self.feature._total)

    def step(self, draft_ids, *, is_decode=True):
        planned = HeadStep(
            feature=self.feature,
            requests=[self.feature._requests["r"]],
            num_drafts=0,
            num_proposed=len(draft_ids),
            num_decode_steps=1,
            is_decode=is_decode,
        )
        output = ModelRunnerOutput(
            req_ids=("r",),
            sampled_token_ids=[[7]],
            logprobs=[None],
            draft_token_ids={"r": draft_ids},
        )
        self.feature.keep_drafts(planned, output)
        return self.pacer.rates[0]


def test_wrong_drafts_after_a_gap_do_not_count_for_new_requests():
    run = Run()
    for _ in range(20):
        run.start()
        run.step([7], is_decode=False)
        run.step([])
        for _ in range(5):
            with_gap = run.step([8, 8])
    assert with_gap < 0.2
    run.start()
    assert run.step([7], is_decode=False) > 0.8


def test_proposal_from_before_a_gap_counts_as_complete():
    run = Run()
    for _ in range(20):
        run.start()
        run.step([8], is_decode=False)
        run.step([])
    run.start()
    assert run.step([7], is_decode=False) < 0.2
