"""`DraftCounts`: counters of drafts since the engine's start."""


class DraftCounts:
    """Counts drafts with vLLM's meaning.

    Attributes:
        num_drafts: Answers to drafts: one for each request of each step that verified some.
        num_draft_tokens: Drafts that were verified.
        num_accepted_tokens: Drafts that were accepted.
        num_accepted_per_pos: The same by position: first drafts, second drafts and so on.
    """

    def __init__(self, max_drafts: int) -> None:
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_per_pos = [0] * max_drafts

    def record(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Records the answer to the drafts of one request."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        missing = num_accepted_tokens - len(self.num_accepted_per_pos)
        self.num_accepted_per_pos += [0] * missing
        for place in range(num_accepted_tokens):
            self.num_accepted_per_pos[place] += 1
