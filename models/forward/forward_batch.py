"""`ForwardBatch`, the input of one step of the model, and the list of dimension names.

Every `dtype[dims]` comment of the code uses these names of dimensions, and no second name for them:

    num_tokens          tokens of this step, padding included
    num_reqs            request rows of this step, empty rows included
    num_groups          KV cache groups; the layers of a group share block tables
    max_blocks_per_req  columns of a block table
    num_logits          tokens whose logits are wanted
    num_queries         tokens that attend: all, or in the last layer the last of each request
    num_layers          decoder layers of the model
    num_rows            rows of the pages: the caches of the largest group (cache j of every group
                        has row j); elsewhere, the rows of an array, such as one per token
    num_blocks          blocks in the pool, the null block (0) included
    block_size          token positions in a block of one group
    blocks_per_state    blocks of the pool that hold one layer's state of a request
    num_q_heads         query heads
    num_kv_heads        key and value heads
    head_dim            width of a head
    latent_dim          width of the latent that MLA caches in place of keys and values
    rope_dim            width of the rotary part, which MLA caches together with the latent
    hidden              width of the residual stream
    intermediate        inner width of the MLP
    vocab               vocabulary entries
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from models.forward.row_widths import Carry, Width, run_at_width
from models.forward.wants import Outputs, Wants


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class GroupInputs:
    """The inputs of KV cache groups whose block tables have the same shape and meaning."""

    # Physical block of each logical block, in [0, num_blocks); 0 where the request has none.
    block_tables: jax.Array  # i32[num_groups, num_reqs, max_blocks_per_req]
    # Tokens in the cache after this step, in [0, max_blocks_per_req * block_size].
    seq_lens: jax.Array  # i32[num_reqs]
    block_size: int = field(metadata={"static": True})

    @property
    def num_groups(self) -> int:
        return self.block_tables.shape[0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StateInputs:
    """The inputs of KV cache groups that keep states (`StateFormat`).

    Row r owns tokens `query_start_loc[r]:query_start_loc[r + 1]` of the step, in order. These rows
    may differ from the `ForwardBatch`'s: a batch-invariant step makes each token a request of its
    own, but states need all tokens of a request in one row.
    """

    # Blocks that hold the state before the step, and blocks that get the state after it. No block
    # is written for two rows.
    read_slots: jax.Array  # i32[num_groups, num_reqs, blocks_per_state]
    write_slots: jax.Array  # i32[num_groups, num_reqs, blocks_per_state]
    # The state before the step is zero, and the blocks of `read_slots` hold anything.
    starts_from_zero: jax.Array  # bool[num_reqs]
    # Rows that are not alive write nothing, and their tokens write no keys and values. A burst
    # computes the last token of an ended request again. Its state would advance once more, and
    # its keys and values would depend on this other state.
    is_alive: jax.Array  # bool[num_reqs]
    query_start_loc: jax.Array  # i32[num_reqs + 1], not decreasing, first entry 0
    # Static. True: row r has token r, or no token.
    has_one_token_each: bool = field(metadata={"static": True})
    # Row r writes the state before token `state_ends[r]` of the step. This token and later ones of
    # the row are drafts, which the model may reject. None: row r writes the state after its last
    # token.
    state_ends: jax.Array | None = None  # i32[num_reqs]

    @property
    def num_groups(self) -> int:
        return self.read_slots.shape[0]

    @property
    def is_written(self) -> jax.Array:  # bool[num_reqs]
        """Whether the row's state changes in this step."""
        return self.is_alive & (self.query_start_loc[1:] > self.query_start_loc[:-1])

    def is_alive_of_tokens(self, num_tokens: int) -> jax.Array:  # bool[num_tokens]
        """Whether the row of each token is alive. Padding has the value of some row."""
        if self.has_one_token_each:
            return self.is_alive[:num_tokens]
        token_idx = jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.searchsorted(self.query_start_loc[1:], token_idx, side="right")
        return self.is_alive.at[row].get(mode="clip")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """The tokens of one step; row r owns tokens `query_start_loc[r]:query_start_loc[r + 1]`.

    Padding: tokens at or past `query_start_loc[-1]` belong to no request. They have id 0 and
    position 0, and are written to no block. A row without a request has no tokens, and its entry in
    `seq_lens` is 0. Unused entries of `logits_indices` are 0, so their logits are computed and
    ignored.

    Worked example, num_tokens 8, num_reqs 3, a prompt of 4, a decode at position 9, an empty row:
        token_ids       [5, 6, 7, 8, 3, 0, 0, 0]
        positions       [0, 1, 2, 3, 9, 0, 0, 0]
        query_start_loc [0, 4, 5, 5]
        seq_lens        [4, 10, 0]
        logits_indices  [3, 4, 0]
    """

    token_ids: jax.Array  # i32[num_tokens], in [0, vocab)
    positions: jax.Array  # i32[num_tokens], place of the token in its request, from 0
    query_start_loc: jax.Array  # i32[num_reqs + 1], not decreasing, first entry 0
    groups: tuple[GroupInputs | StateInputs, ...]
    logits_indices: jax.Array  # i32[num_logits], tokens whose logits are wanted
    # Static: an upper bound of the query tokens of one request. None: there is no bound. With 1,
    # attention compiles no code for prompts.
    max_query_len: int | None = field(default=None, metadata={"static": True})
    # Static. With `logits="last"`, `logits_indices` are the last tokens of the requests, in order.
    # With `logits="last"` or "none", or with `hidden="last"`, requests without tokens must come
    # after all others: the last layer and the head find a request's row by its number.
    wants: Wants = field(default=Wants(), metadata={"static": True})
    # Static: numbers of leading tokens, rising; the last one is num_tokens. Products with weights
    # are computed for the smallest number that holds all real tokens. Rows after it may hold
    # anything finite. Empty means num_tokens only.
    widths: tuple[int, ...] = field(default=(), metadata={"static": True})

    @property
    def drops_rows(self) -> bool:
        """Whether the last layer returns only the last token of each request.

        False if no request has more than one token: the last tokens are then all tokens.
        """
        return self.wants.last_tokens_alone and self.max_query_len != 1

    @property
    def last_tokens(self) -> jax.Array:  # i32[num_reqs]
        """The index of each request's last token; any index for a request without tokens."""
        if self.wants.logits == "last":
            return self.logits_indices
        return jnp.maximum(self.query_start_loc[1:] - 1, 0)

    def choose_outputs(
        self,
        hidden: jax.Array,  # f[num_tokens, hidden], or f[num_reqs, hidden] where `drops_rows`
        taps: tuple[jax.Array, ...] = (),
    ) -> Outputs:
        """Picks the rows that `wants` asks for out of the hidden states after the last norm."""
        wants = self.wants
        rows = {"none": None, "all": hidden}
        if "last" in (wants.logits, wants.hidden):
            rows["last"] = hidden if self._are_last_tokens(hidden) else hidden[self.last_tokens]
        if wants.logits == "indices":
            rows["indices"] = hidden[self.logits_indices]
        return Outputs(for_logits=rows[wants.logits], hidden=rows[wants.hidden], taps=taps)

    def _are_last_tokens(self, hidden: jax.Array) -> bool:
        has_one_each = self.max_query_len == 1 and hidden.shape[0] == self.num_reqs
        return self.drops_rows or has_one_each

    @property
    def num_reqs(self) -> int:
        return self.query_start_loc.shape[0] - 1

    def at_width(self, body: Callable[[Width, Carry], Carry], carry: Carry) -> Carry:
        """Returns `body(width, carry)` with the smallest of `widths` that holds all real tokens."""
        widths = self.widths or (self.token_ids.shape[0],)
        return run_at_width(widths, self.query_start_loc[-1], body, carry)
