"""SlowRunner: executes a SchedulerOutput on a KVMemory and fails when a read is wrong."""

import dataclasses

from paxkv.contracts.scheduler_output import KVConnectorOutput, ModelRunnerOutput
from tests.slow_model.kv_memory import KVMemory, chain

VOCAB_SIZE = 20


def next_token(content):
    """The model: the token after a prefix is a function of the content of the last slot."""
    return content % 9973 % VOCAB_SIZE


@dataclasses.dataclass
class Row:
    """The runner's copy of a request.

    Args:
        ends_at: Tokens that end it.
        has_ended: Whether one of these tokens has ended it in a burst. Later steps return no tokens
            for it.
    """

    token_ids: list
    num_prompt_tokens: int
    tables: list
    num_computed: int
    scope: object
    ends_at: frozenset
    has_ended: bool = False
    # By group of states: the slot that the step reads, if it is another one than in `tables`. From
    # the position `switch` on, the state is in `tables`.
    old_slots: dict = dataclasses.field(default_factory=dict)
    switch: int = 0

    @property
    def contents(self):
        return chain(self.token_ids, self.scope)

    def tables_to_read(self, position):
        is_old = position <= self.switch
        return [self.old_slots.get(g, t) if is_old else t for g, t in enumerate(self.tables)]

    def tables_to_write(self, position):
        is_old = position < self.switch
        return [self.old_slots.get(g, t) if is_old else t for g, t in enumerate(self.tables)]


class SlowRunner:
    """The runner's part of a step. `scope_of` holds the scope of each request.

    Args:
        max_model_len: Positions from this one on are never computed or sampled.
    """

    def __init__(self, kinds, *, num_blocks, max_model_len):
        self.kinds = kinds
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.memory = KVMemory(kinds)
        self.scope_of = {}
        self.rows = {}
        # Tokens that end a request; kept while it is preempted.
        self.ends_of = {}
        # Request id -> transfer of each load in progress, and the tokens of each load.
        self.loading = {}
        self.tokens_to_load = {}

    def execute(self, output, *, draw, num_drafts=0, tokens_per_sample=1, load_done=True):
        """Runs one step.

        Args:
            draw: random.Random, for right and wrong drafts.
            num_drafts: Most draft tokens that a request gets for its next step.
            tokens_per_sample: Tokens that a request without drafts samples in one step.
            load_done: Whether loads in progress finish in this step.
        """
        self.update_rows(output)
        self.memory.copy([(c.source_block_id, c.target_block_id) for c in output.block_copies])
        connector_output = self.load(output, load_done)
        if output.num_decode_steps > 1:
            sampled = self.decode(output, draw)
            return self.answer(sampled, {}, connector_output)
        work, written = [], {}
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            row = self.rows[req_id]
            drafts = output.scheduled_spec_decode_tokens.get(req_id, [])
            start, end = row.num_computed, row.num_computed + num_tokens
            assert end <= self.max_model_len - 1, "a position that is only ever sampled"
            if row.has_ended:
                self.write_garbage(row, num_tokens, written)
                continue
            assert len(drafts) == max(0, end - len(row.token_ids)), "drafts and tokens scheduled"
            contents = chain(row.token_ids + drafts, row.scope)
            work.append((req_id, row, start, end, drafts, contents))
        for _req_id, row, start, _end, _drafts, contents in work:
            self.memory.read_states(row.tables_to_read(start), contents, start)
        for _req_id, row, start, end, drafts, contents in work:
            tables = row.tables_to_write(start)
            self.memory.write(tables, contents, start, end, written, row, num_drafts=len(drafts))
        for _req_id, row, start, end, _drafts, contents in work:
            self.memory.read(row.tables, contents, start, end)
        sampled, proposals = dict.fromkeys(output.num_scheduled_tokens, []), {}
        proposes = num_drafts > 0 and draw.random() < 0.7
        for req_id, row, _start, end, drafts, _contents in work:
            if drafts and draw.random() < 0.1:
                continue  # as if the row returned no token
            sampled[req_id] = self.sample(row, end, drafts, tokens_per_sample)
            if proposes and sampled[req_id]:
                proposals[req_id] = self.propose(row, draw, num_drafts)
        return self.answer(sampled, proposals, connector_output)

    def decode(self, output, draw):
        """A burst: one token per step, each computed once the one before it is sampled.

        A token that ends a request ends the burst for it; but sometimes the runner does not
        know of that token and continues.
        """
        sampled = {req_id: [] for req_id in output.num_scheduled_tokens}
        knows_end = {req_id: draw.random() < 0.8 for req_id in sampled}
        written = {}
        for i in range(output.num_decode_steps):
            work = []
            for req_id, num_tokens in output.num_scheduled_tokens.items():
                row = self.rows[req_id]
                if i == 0 and row.has_ended:
                    self.write_garbage(row, num_tokens, written)
                if i >= num_tokens or row.has_ended:
                    continue
                assert row.num_computed == len(row.token_ids) - 1, "not the last token"
                assert row.num_computed < self.max_model_len - 1
                work.append((req_id, row, row.contents))
            for _req_id, row, contents in work:
                start = row.num_computed
                self.memory.read_states(row.tables_to_read(start), contents, start)
            for _req_id, row, contents in work:
                start = row.num_computed
                tables = row.tables_to_write(start)
                self.memory.write(tables, contents, start, start + 1, written, row)
            for req_id, row, contents in work:
                start = row.num_computed
                self.memory.read(row.tables, contents, start, start + 1)
                row.num_computed += 1
                row.token_ids.append(next_token(contents[-1]))
                sampled[req_id].append(row.token_ids[-1])
                row.has_ended = row.token_ids[-1] in row.ends_at and knows_end[req_id]
        return sampled

    def write_garbage(self, row, num_tokens, written):
        """What the device may write for a request whose end the scheduler does not know yet."""
        start, end = row.num_computed, row.num_computed + num_tokens
        for position in range(start, end):
            tables = row.tables_to_write(position)
            self.memory.write(tables, ["garbage"] * end, position, position + 1, written, row)
        row.num_computed = end

    def answer(self, sampled, proposals, connector_output):
        # The runner may return requests in any order.
        req_ids = list(sampled)[::-1]
        return ModelRunnerOutput(
            req_ids=req_ids,
            sampled_token_ids=[sampled[req_id] for req_id in req_ids],
            logprobs=[None] * len(req_ids),
            draft_token_ids=proposals,
            kv_connector_output=connector_output,
        )

    def sample(self, row, end, drafts, tokens_per_sample):
        """Accepts the leading drafts that are right, and adds the token after them."""
        if end < len(row.token_ids):
            row.num_computed = end
            return []
        num_known = len(row.token_ids)
        # A state goes back to before the drafts, also to before accepted ones.
        goes_back = any(kind.name == "state" for kind in self.kinds)
        num_before_drafts = end - len(drafts)
        row.token_ids.append(next_token(row.contents[-1]))
        while drafts and row.token_ids[-1] == drafts[0]:
            drafts = drafts[1:]
            row.token_ids.append(next_token(row.contents[-1]))
        while len(row.token_ids) < num_known + tokens_per_sample:
            row.token_ids.append(next_token(row.contents[-1]))
        sampled = row.token_ids[num_known:]
        row.num_computed = num_before_drafts if goes_back else end - len(drafts)
        return sampled

    def propose(self, row, draw, num_drafts):
        """Drafts for the next step, some of them wrong."""
        token_ids = list(row.token_ids)
        for _ in range(draw.randint(0, num_drafts)):
            token = next_token(chain(token_ids, row.scope)[-1])
            token_ids.append(token if draw.random() < 0.7 else (token + 1) % VOCAB_SIZE)
        return token_ids[len(row.token_ids) :]

    def load(self, output, load_done):
        """Fills blocks as a connector does, with what the tokens would have written."""
        metadata = output.kv_connector_metadata
        if metadata is None:
            return None
        for transfer in metadata.loads:
            self.loading[transfer.request_id] = transfer
        finished = set()
        for req_id, transfer in list(self.loading.items()):
            if req_id not in output.num_scheduled_tokens and not load_done:
                continue
            self.loading.pop(req_id)
            start = transfer.start_token_idx
            contents = chain(self.tokens_to_load[req_id], self.scope_of[req_id])
            tables = transfer.block_ids
            self.memory.load(tables, contents, start, start + transfer.num_tokens)
            if req_id not in output.num_scheduled_tokens:
                finished.add(req_id)
        return KVConnectorOutput(finished_recving=frozenset(finished))

    def split_slots(self, row):
        """Splits the blocks of a new request into a slot to read, if any, and its first slot."""
        row.switch = row.num_computed
        for group, kind in enumerate(self.kinds):
            if kind.name == "state" and len(row.tables[group]) > kind.size:
                row.old_slots[group] = row.tables[group][: kind.size]
                row.tables[group] = row.tables[group][kind.size :]

    def extend_tables(self, row, new_block_ids):
        for group, (kind, new) in enumerate(zip(self.kinds, new_block_ids, strict=True)):
            if kind.name != "state":
                row.tables[group] += new
            elif new:
                row.old_slots[group], row.tables[group] = row.tables[group], list(new)

    def update_rows(self, output):
        for row in self.rows.values():
            row.old_slots = {}
        for req_id in output.finished_req_ids | output.preempted_req_ids:
            self.rows.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.rows
            self.ends_of[new.req_id] = frozenset(new.ending_token_ids)
            self.rows[new.req_id] = Row(
                list(new.prompt_token_ids),
                len(new.prompt_token_ids),
                [list(table) for table in new.block_ids],
                new.num_computed_tokens,
                self.scope_of[new.req_id],
                self.ends_of[new.req_id],
            )
            self.split_slots(self.rows[new.req_id])
        cached = output.scheduled_cached_reqs
        assert set(cached.all_token_ids) == cached.resumed_req_ids
        for i, req_id in enumerate(cached.req_ids):
            new_block_ids = cached.new_block_ids[i]
            computed = cached.num_computed_tokens[i]
            if req_id in cached.resumed_req_ids:
                assert req_id not in self.rows
                token_ids = list(cached.all_token_ids[req_id])
                num_prompt_tokens = len(token_ids) - cached.num_output_tokens[i]
                tables = [list(table) for table in new_block_ids]
                scope, ends = self.scope_of[req_id], self.ends_of[req_id]
                self.rows[req_id] = Row(token_ids, num_prompt_tokens, tables, computed, scope, ends)
                self.split_slots(self.rows[req_id])
            elif new_block_ids is not None:
                assert any(new_block_ids)
                self.extend_tables(self.rows[req_id], new_block_ids)
            row = self.rows[req_id]
            row.switch = output.slot_switches.get(req_id, computed)
            if row.has_ended:
                # The scheduler counts tokens that the runner never returns.
                row.num_computed = computed
                continue
            # Positions are scheduled in order, without a gap or a repetition.
            assert computed == row.num_computed
            assert cached.num_output_tokens[i] == len(row.token_ids) - row.num_prompt_tokens
