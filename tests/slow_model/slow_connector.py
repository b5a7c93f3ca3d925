"""SlowConnector: a KV connector that has `external` tokens of each SlowRequest."""

from paxkv.contracts.scheduler_output import KVConnectorMetadata, KVTransfer


class SlowConnector:
    """A KVConnector whose answers come from the SlowRequests in `plans`.

    Attributes:
        tokens_to_load: Request id -> the tokens whose keys and values are loaded.
    """

    def __init__(self):
        self.plans = {}
        self.tokens_to_load = {}
        self.loads = []
        self.num_computed = {}

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        plan = self.plans[request.request_id]
        if plan.external is None:
            return None, False
        self.num_computed[request.request_id] = num_computed_tokens
        return max(0, plan.external - num_computed_tokens), plan.is_async

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        if num_external_tokens == 0:
            return
        self.tokens_to_load[request.request_id] = list(request.all_token_ids)
        self.loads.append(
            KVTransfer(
                request_id=request.request_id,
                block_ids=tuple(list(table) for table in block_ids),
                start_token_idx=self.num_computed[request.request_id],
                num_tokens=num_external_tokens,
            )
        )

    def build_connector_meta(self, num_computed_tokens_after_step):
        loads, self.loads = self.loads, []
        return KVConnectorMetadata(loads=loads, saves=[])

    def request_finished(self, request, block_ids):
        return False
