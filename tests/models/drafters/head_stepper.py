"""`HeadStepper`: runs a model and its draft head by hand, without scheduler or runner."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from models import Wants
from models.decoder_spec import with_drafter
from paxkv.runner.memory.kv_cache_arrays import empty_kv_cache
from paxkv.runner.memory.kv_cache_groups import groups_of_spec
from paxkv.runner.programs.make_batch import make_batch
from tests.quick_compile import QUICK_COMPILE

BLOCK_SIZE = 8


class HeadStepper:
    """One request over consecutive blocks. Positions may be computed again.

    Args:
        max_tokens: Of the request.
    """

    def __init__(self, model, head, *, max_tokens):
        spec = with_drafter(model.config.spec("float32"), head.config.spec("float32"))
        groups = groups_of_spec(spec, block_size=BLOCK_SIZE)
        places = groups.places(spec)
        num_layers = model.config.num_layers
        self.model = model.with_places(places[:num_layers])
        self.head = head.with_places(places[num_layers:])
        self.tables = groups.tables(max_tokens)
        num_blocks = sum(table.num_groups * table.max_blocks_per_req for table in self.tables)
        self.pages = empty_kv_cache(groups.config(1 + num_blocks), model.platform, "float32")
        self._forward = jax.jit(self.model.forward, compiler_options=QUICK_COMPILE)
        self._run = jax.jit(self.head.run, compiler_options=QUICK_COMPILE)

    def batch(self, token_ids, start, num_tokens):
        """Args: num_tokens: With padding."""
        padded, positions = np.zeros((2, num_tokens), np.int32)
        padded[: len(token_ids)] = token_ids
        positions[: len(token_ids)] = np.arange(start, start + len(token_ids))
        tables, first = [], 1
        for table in self.tables:
            shape = (table.num_groups, 1, table.max_blocks_per_req)
            size = table.num_groups * table.max_blocks_per_req
            tables.append(jnp.arange(first, first + size, dtype=jnp.int32).reshape(shape))
            first += size
        return make_batch(
            token_ids=jnp.array(padded),
            positions=jnp.array(positions),
            query_start_loc=jnp.array([0, len(token_ids)], jnp.int32),
            seq_lens=jnp.array([start + len(token_ids)], jnp.int32),
            block_tables=tables,
            table_shapes=self.tables,
            logits_indices=jnp.zeros(1, jnp.int32),
            wants=Wants(
                logits="none", hidden="none" if self.head.taps else "all", taps=self.head.taps
            ),
        )

    def compute_hidden(self, token_ids, start, num_tokens=None):
        """What the head reads of the target's hidden states, with padding."""
        batch = self.batch(token_ids, start, num_tokens or len(token_ids))
        outputs, self.pages = self._forward(self.model.params, self.pages, batch)
        hidden = jnp.concatenate(outputs.taps, 1) if self.head.taps else outputs.hidden
        return self.head.combine(self.head.params, hidden)

    def predict(self, next_ids, hidden, start):
        """Hidden states of the head, with the padding of `hidden`."""
        batch = self.batch(next_ids, start, hidden.shape[0])
        target_embed = functools.partial(self.model.embed, self.model.params)
        embedded = self.head.embed(self.head.params, batch.token_ids, target_embed)
        hidden, self.pages = self._run(
            self.head.params, self.pages, batch, embedded=embedded, hidden=hidden
        )
        return hidden

    def choose(self, hidden):
        """The most likely token of each row."""
        target_logits = functools.partial(self.model.compute_logits, self.model.params)
        return self.head.choose(self.head.params, hidden, target_logits).tolist()

    def drafts(self, token_ids, num_drafts, num_tokens):
        """The drafts after these tokens, computed without drafts that were made before."""
        last = len(token_ids) - 2
        hidden = self.compute_hidden(token_ids[:-1], 0, num_tokens)
        hidden = self.predict(token_ids[1:], hidden, 0)[last : last + 1]
        found = self.choose(hidden)
        while len(found) < num_drafts:
            last += 1
            hidden = self.predict(found[-1:], hidden, last)
            found += self.choose(hidden)
        return found
