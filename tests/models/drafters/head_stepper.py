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
        width: Tokens of each call, with padding, so that each program compiles once.
    """

    def __init__(self, model, head, *, max_tokens, width):
        spec = with_drafter(model.config.spec("float32"), head.config.spec("float32"))
        groups = groups_of_spec(spec, block_size=BLOCK_SIZE)
        places = groups.places(spec)
        num_layers = model.config.num_layers
        self.model = model.with_places(places[:num_layers])
        self.head = head.with_places(places[num_layers:])
        self.tables = groups.tables(max_tokens)
        self.width = width
        num_blocks = sum(table.num_groups * table.max_blocks_per_req for table in self.tables)
        self.pages = empty_kv_cache(groups.config(1 + num_blocks), model.platform, "float32")
        jit = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
        self._forward = jit(self._forward_and_combine)
        self._run = jit(self._embed_and_run)
        self._choose = jit(self._logits_and_choice)

    def batch(self, token_ids, start):
        padded, positions = np.zeros((2, self.width), np.int32)
        padded[: len(token_ids)] = token_ids
        positions[: len(token_ids)] = np.arange(start, start + len(token_ids))
        tables, first = [], 1
        for table in self.tables:
            size = table.num_groups * table.max_blocks_per_req
            blocks = np.arange(first, first + size, dtype=np.int32)
            # A state is read from the slot to which it is written.
            num_slots = 2 if table.is_state else 1
            tables.append(np.tile(blocks, num_slots).reshape(table.dims(1)))
            first += size
        batch = make_batch(
            token_ids=padded,
            positions=positions,
            query_start_loc=np.array([0, len(token_ids)], np.int32),
            seq_lens=np.array([start + len(token_ids)], np.int32),
            block_tables=tables,
            table_shapes=self.tables,
            logits_indices=np.zeros(1, np.int32),
            wants=Wants(
                logits="none", hidden="none" if self.head.taps else "all", taps=self.head.taps
            ),
        )
        return jax.device_put(batch)

    def compute_hidden(self, token_ids, start):
        """What the head reads of the target's hidden states."""
        batch = self.batch(token_ids, start)
        hidden, self.pages = self._forward(self.model.params, self.head.params, self.pages, batch)
        return np.asarray(hidden)[: len(token_ids)]

    def states(self):
        """The blocks of the model's states, [num_rows, num_groups, blocks_per_state, ...]."""
        first = 1
        for table in self.tables:
            end = first + table.num_groups * table.max_blocks_per_req
            if table.is_state:
                blocks = np.arange(first, end).reshape(table.num_groups, -1)
                return np.asarray(self.pages)[:, blocks]
            first = end
        raise ValueError("the model has no states")

    def predict(self, next_ids, hidden, start):
        """Hidden states of the head."""
        batch = self.batch(next_ids, start)
        rows, self.pages = self._run(
            self.model.params, self.head.params, self.pages, batch, self._padded(hidden)
        )
        return np.asarray(rows)[: len(next_ids)]

    def choose(self, hidden):
        """The most likely token of each row."""
        chosen = self._choose(self.model.params, self.head.params, self._padded(hidden))
        return np.asarray(chosen)[: len(hidden)].tolist()

    def drafts(self, token_ids, num_drafts):
        """The drafts after these tokens, computed without drafts that were made before."""
        last = len(token_ids) - 2
        hidden = self.predict(token_ids[1:], self.compute_hidden(token_ids[:-1], 0), 0)[-1:]
        found = self.choose(hidden)
        while len(found) < num_drafts:
            last += 1
            hidden = self.predict(found[-1:], hidden, last)
            found += self.choose(hidden)
        return found

    def _padded(self, hidden):
        padded_np = np.zeros((self.width, hidden.shape[1]), hidden.dtype)
        padded_np[: len(hidden)] = hidden
        return jax.device_put(padded_np)

    def _forward_and_combine(self, params, head_params, pages, batch):
        outputs, pages = self.model.forward(params, pages, batch)
        hidden = jnp.concatenate(outputs.taps, 1) if self.head.taps else outputs.hidden
        return self.head.combine(head_params, hidden), pages

    def _embed_and_run(self, params, head_params, pages, batch, hidden):
        target_embed = functools.partial(self.model.embed, params)
        embedded = self.head.embed(head_params, batch.token_ids, target_embed)
        return self.head.run(head_params, pages, batch, embedded=embedded, hidden=hidden)

    def _logits_and_choice(self, params, head_params, hidden):
        target_logits = functools.partial(self.model.compute_logits, params)
        argmax = functools.partial(jnp.argmax, axis=-1)
        return self.head.choose(head_params, hidden, target_logits, argmax)
