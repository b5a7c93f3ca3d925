"""A KV connector over a set of token chains, and a runner whose KV memory it loads and saves."""

from paxkv.contracts.scheduler_output import KVConnectorMetadata, KVTransfer
from tests.paxkv.scheduler.stepping import FunctionRunner, answer


class InMemoryConnector:
    """The scheduler's half of a connector. It stores chains of tokens, in whole blocks.

    Args:
        is_async: Loads run during other steps.
        delays_free: Blocks of finished requests are saved, and held until the save ends.
    """

    def __init__(self, *, block_size=4, is_async=False, delays_free=False):
        self.block_size = block_size
        self.is_async = is_async
        self.delays_free = delays_free
        # The stored blocks, each as the tuple of all tokens up to its end.
        self.chains = set()
        # Requests for which the connector has no answer yet.
        self.undecided = set()
        self.num_asked = 0
        self._matched = {}
        self._loads = []
        self._saves = []
        self.token_ids = {}

    def store(self, token_ids):
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            self.chains.add(tuple(token_ids[:end]))

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.num_asked += 1
        if request.request_id in self.undecided:
            return None, False
        end = num_computed_tokens
        while (
            end + self.block_size <= request.num_tokens
            and tuple(request.all_token_ids[: end + self.block_size]) in self.chains
        ):
            end += self.block_size
        self._matched[request.request_id] = num_computed_tokens
        return end - num_computed_tokens, self.is_async

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        self.token_ids[request.request_id] = list(request.all_token_ids)
        if num_external_tokens > 0:
            start = self._matched[request.request_id]
            self._loads.append(
                KVTransfer(
                    request_id=request.request_id,
                    block_ids=block_ids,
                    start_token_idx=start,
                    num_tokens=num_external_tokens,
                )
            )

    def build_connector_meta(self, num_computed_tokens_after_step):
        metadata = KVConnectorMetadata(loads=self._loads, saves=self._saves)
        self._loads, self._saves = [], []
        return metadata

    def request_finished(self, request, block_ids):
        num_tokens = request.num_computed_tokens // self.block_size * self.block_size
        if num_tokens == 0 or not self.delays_free:
            return False
        self.token_ids[request.request_id] = list(request.all_token_ids)
        self._saves.append(
            KVTransfer(
                request_id=request.request_id,
                block_ids=block_ids,
                start_token_idx=0,
                num_tokens=num_tokens,
            )
        )
        return True


class MemoryRunner(FunctionRunner):
    """One KV cache group. Each slot holds the chain of tokens for which it was written.

    Reading another chain fails, so loads, saves and sharing must be right.
    """

    def __init__(self, connector):
        super().__init__()
        self.connector = connector
        self.memory = {}
        self.tables = {}
        # Transfers in progress; the test ends them.
        self.loading = {}
        self.saving = {}

    def slot(self, block_ids, position):
        size = self.connector.block_size
        return block_ids[0][position // size], position % size

    def load(self, request_id, *, failed_blocks=()):
        """Ends a load; blocks at the indices `failed_blocks` are not filled.

        Returns:
            Ids of those blocks.
        """
        transfer = self.loading.pop(request_id)
        tokens = self.connector.token_ids[request_id]
        start, invalid = transfer.start_token_idx, set()
        for position in range(start, start + transfer.num_tokens):
            slot = self.slot(transfer.block_ids, position)
            if position // self.connector.block_size in failed_blocks:
                invalid.add(slot[0])
                self.memory.pop(slot, None)
            else:
                self.memory[slot] = tuple(tokens[: position + 1])
        return frozenset(invalid)

    def save(self, request_id):
        """Ends a save. It stores the content that the blocks have now."""
        transfer = self.saving.pop(request_id)
        size = self.connector.block_size
        for end in range(size, transfer.num_tokens + 1, size):
            chain = self.memory[self.slot(transfer.block_ids, end - 1)]
            assert chain == tuple(self.connector.token_ids[request_id][:end])
            self.connector.chains.add(chain)

    def start_transfers(self, output):
        """Starts the step's transfers. Loads of requests in the step end before it computes."""
        metadata = output.kv_connector_metadata
        self.loading |= {load.request_id: load for load in metadata.loads}
        self.saving |= {save.request_id: save for save in metadata.saves}

    def execute(self, output, *, drafts=None, transfers=None, failed_blocks=()):
        self.start_transfers(output)
        invalid = set()
        for request_id in list(self.loading):
            if request_id in output.num_scheduled_tokens:
                invalid |= self.load(request_id, failed_blocks=failed_blocks)
        self.update_tables(output)
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        result = super().execute(output)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self.write(request_id, computed[request_id], num_tokens)
        if not invalid:
            for request_id, num_tokens in output.num_scheduled_tokens.items():
                assert self.is_valid(request_id, computed[request_id] + num_tokens), request_id
        transfers = dict(transfers or {})
        transfers["invalid_block_ids"] = transfers.get("invalid_block_ids", frozenset()) | invalid
        sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
        return answer(sampled, drafts=drafts, transfers=transfers)

    def write(self, request_id, start, num_tokens):
        """Writes slots; invalid ones if the slots before them do not hold the right tokens."""
        tokens = tuple(self.token_ids[request_id])
        is_valid = self.is_valid(request_id, start)
        for position in range(start, start + num_tokens):
            slot = self.slot(self.tables[request_id], position)
            self.memory[slot] = tokens[: position + 1] if is_valid else None

    def is_valid(self, request_id, num_tokens):
        tokens = tuple(self.token_ids[request_id])
        return all(
            self.memory.get(self.slot(self.tables[request_id], position)) == tokens[: position + 1]
            for position in range(num_tokens)
        )

    def update_tables(self, output):
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(table) for table in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self.tables[request_id] = [list(table) for table in block_ids]
            elif block_ids is not None:
                self.tables[request_id][0] += block_ids[0]
