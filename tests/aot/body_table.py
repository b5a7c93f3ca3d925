"""Makes the tables of docs/design/kernels.md: the body of each op in the shapes of every family.

`python -m tests.aot.body_table` prints them, and `--write` puts them into the page. It needs JAX
0.11.2 or newer, and neither an accelerator nor its compiler: the attention, the states or the
experts of one layer are traced for a `Target`, and what `dispatch.py` chooses is noted.

The shapes are those of transformers' default config of each family (`published_configs.json`).
"""

import argparse
import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp

import pallas_kernels
from models import AttentionConfig, ForwardBatch, GroupInputs, KernelSettings, Platform
from models.cache.state_format import StateFormat
from models.config.block_index_config import BlockIndexedConfig
from models.config.index_config import INDEX_KEYS, IndexedLatentConfig
from models.config.moe_config import MoEConfig
from models.config.relative_attention_config import RelativeAttentionConfig
from models.families.gemma4 import Gemma4Config
from models.forward.layer_context import LayerContext, LayerPlaces, LayerState, make_context
from models.layers.attend import attend
from models.layers.block_index import BlockIndexer
from models.layers.experts import Experts
from models.layers.index_attend import attend_to_tokens, choose_tokens
from models.layers.indexer import IndexQueries
from models.layers.latent_attend import latent_attend, write_vectors
from models.layers.routing import Routing
from models.layers.sparse_attend import attend_to_positions, write_keys_and_values
from models.platforms import GPU, TPU
from models.registry import read_config
from pallas_kernels import Target, dispatch
from pallas_kernels.paged_attention import xla as paged_attention_xla
from pallas_kernels.paged_attention.xla_problem import AttentionProblem
from paxkv.runner.memory.kv_cache_arrays import empty_kv_cache, kv_cache_dtype
from paxkv.runner.memory.kv_cache_groups import KVCacheGroups, groups_of_spec

PAGE = Path(__file__).parents[2] / "docs/design/kernels.md"
START, END = "<!-- Made by `python -m tests.aot.body_table --write`. -->", "<!-- End. -->"
_CONFIGS = Path(__file__).with_name("published_configs.json")

# The engine's defaults: requests that run at once, and tokens of a step with prompts.
NUM_REQS, NUM_TOKENS = 64, 512
# A number of blocks that fits an H200 and a v6e in every family, and a number of block copies.
NUM_BLOCKS, NUM_COPIES = 512, 8
_OTHER_OPS = ("slot_mapping", "kv_scatter", "block_copy")
# By whether the cache has latents, and whether there is an index.
_ATTENTION_OPS = {
    (False, False): "paged_attention",
    (True, False): "latent_attention",
    (True, True): "sparse_latent_attention",
    (False, True): "sparse_paged_attention",
}
ATTENTION_OPS = tuple(_ATTENTION_OPS.values())
_DECODE, _MIXED = "decode", "mixed"
_BODY_NAMES = {"mosaic_gpu": "Mosaic GPU", "mosaic_tpu": "Mosaic TPU", "xla": "XLA"}
# Dtypes that no release has. The tables show them for one family only.
_OTHER_DTYPES = ("float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedConfig:
    """A family's config.json with the values of transformers' default config."""

    name: str  # "Gemma 4"
    config_class: str  # of transformers: "Gemma4TextConfig"
    # Fields that differ from the default, because paxkv does not load the default value, or because
    # no release has it.
    changed: Mapping[str, object]
    fields: Mapping[str, object]  # all fields of config.json, `changed` included


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that programs are compiled for."""

    name: str
    target: Target
    platform: Platform


DEVICES = (
    Device(
        name="H200",
        target=Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0"),
        platform=GPU(),
    ),
    Device(
        name="TPU v6e",
        target=Target(platform="tpu", device_kind="TPU v6 lite"),
        platform=TPU(),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The body that `dispatch.py` chose for one call of an op."""

    op: str
    body: str  # "mosaic_gpu", "mosaic_tpu" or "xla"
    reason: str | None  # why the body is XLA; None for a kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One kind of attention layer of a model, and its cache on a device."""

    model: str  # "Gemma 4"
    dtype: str
    attention: AttentionConfig
    device: Device
    groups: KVCacheGroups
    places: LayerPlaces
    max_positions: int

    @property
    def is_latent(self) -> bool:
        return self.places[0][1].format.kind == "latent"

    @property
    def is_indexed(self) -> bool:
        return isinstance(self.attention, IndexedLatentConfig | BlockIndexedConfig)

    @property
    def attention_op(self) -> str:
        return _ATTENTION_OPS[self.is_latent, self.is_indexed]

    @property
    def ops(self) -> set[str]:
        """All ops of a step of the layer."""
        return {*_OTHER_OPS, self.attention_op, *(["index_top_k"] if self.is_indexed else [])}

    @property
    def stored_width(self) -> int:
        cache = self.places[0][1].format
        return cache.width if self.is_latent else cache.head_dim

    @property
    def block_size(self) -> int:
        return self.groups.tables(self.max_positions)[self.places[0][1].inputs_idx].block_size

    def __str__(self) -> str:
        attention = self.attention
        window = f" window {attention.sliding_window}" if attention.sliding_window else ""
        chunks = f" chunks of {attention.chunk_size}" if attention.chunk_size else ""
        return f"{self.model} {attention.head_dim}{window}{chunks} {self.dtype} {self.device.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShapes:
    """The experts of one layer of a model."""

    model: str
    dtype: str
    num_experts: int
    top_k: int  # experts of each token
    hidden_size: int
    inner_size: int  # of one expert


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertChoices:
    """The bodies for the products of one layer's experts in a step."""

    tile_rows: int
    up: Choice  # from the hidden size to the inner size: the choice for gate and up
    down: Choice  # from the inner size to the hidden size


def published_configs() -> dict[str, PublishedConfig]:
    """Architecture -> its published config."""
    return {
        architecture: PublishedConfig(**entry)
        for architecture, entry in json.loads(_CONFIGS.read_text(encoding="utf-8")).items()
    }


def layers_of(published: PublishedConfig, device: Device, dtype: str | None = None) -> list[Layer]:
    """The first layer of each kind, where layers of one kind have equal shapes in op calls.

    Args:
        dtype: The dtype of weights, keys and values. None: the dtype in the config.
    """
    config = read_config(published.fields)
    config = replace(config, dtype=dtype or config.dtype)
    spec = config.spec(kv_cache_dtype(config.dtype, device.platform))
    groups = groups_of_spec(
        spec,
        block_size=device.platform.block_size,
        head_dim_step=device.platform.head_dim_step,
    )
    kinds = {}
    for attention, places in zip(config.attention, groups.places(spec), strict=True):
        if attention is None or not places:
            continue
        layer = Layer(
            model=published.name,
            dtype=config.dtype,
            attention=attention,
            device=device,
            groups=groups,
            places=places,
            max_positions=config.max_position_embeddings,
        )
        kinds.setdefault(_shown_shapes(layer), layer)
    return list(kinds.values())


def layer_program(
    layer: Layer, step: str
) -> tuple[Callable[..., tuple[jax.Array, jax.Array]], tuple[object, ...]]:
    """Makes a function with the ops of one layer in a step, and abstract arguments for it.

    Args:
        step: "decode" has one token of each request. "mixed" has any mix of prompts and decodes.

    Returns:
        A function that returns attention's output and the pages, and its arguments. The pages are
        the first argument.
    """
    attention, dtype = layer.attention, jnp.dtype(layer.dtype)
    num_tokens = _num_tokens(step)
    kernels = KernelSettings(target=layer.device.target)

    def run(pages, batch, q, new_kv, sinks, distance_bias, copies):
        pages = kernels.copy_blocks(pages, copies)
        context = make_context(batch, pages, kernels, ()).at(0, layer.places)
        if layer.is_latent:
            latents, *keys = new_kv
            (cache_name, _), *_ = layer.places
            name = {"cache_name": cache_name}
            pages = write_vectors(latents, pages, context, **name)
            sequences = (context.cache(cache_name).seq_lens, context.query_start_loc)
            if not layer.is_indexed:
                return latent_attend(attention, *q, *sequences, pages, context, **name), pages
            *q, index_queries = q
            pages = write_vectors(*keys, pages, context, cache_name=INDEX_KEYS)
            chosen = choose_tokens(attention, index_queries, pages, context)
            return attend_to_tokens(attention, *q, chosen, *sequences, pages, context), pages
        if layer.is_indexed:
            (q, index_q), (k, v, keys) = q, new_kv
            index = BlockIndexer(attention, dtype=dtype)
            pages = write_keys_and_values(k, v, pages, context)
            pages = index.write(keys, pages, context)
            positions = index.choose(index_q, batch.positions, pages, context)
            return attend_to_positions(attention, q, positions, pages, context), pages
        options = {"sinks": sinks, "distance_bias": distance_bias}
        return attend(attention, q, new_kv, pages, context, **options)

    def floats(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    groups = tuple(
        GroupInputs(
            block_tables=_integers(table.num_groups, NUM_REQS, table.max_blocks_per_req),
            seq_lens=_integers(NUM_REQS),
            block_size=table.block_size,
        )
        for table in layer.groups.tables(layer.max_positions)
    )
    new_kv = tuple(
        floats(num_tokens, attention.num_kv_heads, width)
        for width in (attention.head_dim, attention.value_head_dim)
    )
    pages = jax.eval_shape(
        functools.partial(
            empty_kv_cache,
            layer.groups.config(NUM_BLOCKS),
            layer.device.platform,
            kv_cache_dtype(layer.dtype, layer.device.platform),
        )
    )
    q = floats(num_tokens, attention.num_q_heads, attention.head_dim)
    if layer.is_latent:
        widths = (attention.latent_dim, attention.rope_dim)
        q = tuple(floats(num_tokens, attention.num_q_heads, width) for width in widths)
        new_kv = (floats(num_tokens, sum(widths)),)
    if layer.is_indexed:
        index = attention.index
        index_q = floats(num_tokens, index.num_heads, index.head_dim)
        weights = jax.ShapeDtypeStruct((num_tokens, index.num_heads), jnp.float32)
        q = (*q, IndexQueries(index_q, weights)) if layer.is_latent else (q, index_q)
        new_kv = (*new_kv, floats(num_tokens, index.head_dim))
    sinks = floats(attention.num_q_heads) if attention.has_sinks else None
    distance_bias = None
    if isinstance(attention, RelativeAttentionConfig):
        distance_bias = (
            floats(num_tokens, attention.num_q_heads, attention.num_profiles),
            floats(attention.num_profiles, attention.num_distances),
        )
    batch = _batch_of(step, groups)
    copies = _integers(2, NUM_COPIES)
    return run, (pages, batch, q, new_kv, sinks, distance_bias, copies)


def _batch_of(step: str, groups: tuple[GroupInputs, ...]) -> ForwardBatch:
    """An abstract batch of a step."""
    num_tokens = _num_tokens(step)
    return ForwardBatch(
        token_ids=_integers(num_tokens),
        positions=_integers(num_tokens),
        query_start_loc=_integers(NUM_REQS + 1),
        groups=groups,
        logits_indices=_integers(NUM_REQS),
        max_query_len=1 if step == _DECODE else None,
    )


def _num_tokens(step: str) -> int:
    return NUM_REQS if step == _DECODE else NUM_TOKENS


def _integers(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.int32)


def choices_of(layer: Layer, step: str) -> dict[str, Choice]:
    """Op -> the choice for it in one layer of a step."""
    function, args = layer_program(layer, step)
    with _recorded_choices() as choices:
        jax.eval_shape(function, *args)
    by_op = {choice.op: choice for choice in choices}
    if set(by_op) != layer.ops or len(set(choices)) != len(layer.ops):
        raise ValueError(f"{layer}: wanted one choice for each of {layer.ops}, got {choices}")
    attention = by_op[layer.attention_op]
    if layer.is_latent and step == _MIXED and attention.body == "mosaic_gpu":
        reason = "the kernels of latent attention compute requests with one query token only"
        by_op[layer.attention_op] = replace(attention, body="xla", reason=reason)
    return by_op


def experts_of(published: PublishedConfig) -> ExpertShapes | None:
    """The experts of a model; None if it has none."""
    config = read_config(published.fields)
    if isinstance(config, MoEConfig):
        num_experts, top_k = config.num_experts, config.num_experts_per_tok
        inner_size = config.moe_intermediate_size
    elif isinstance(config, Gemma4Config) and config.experts is not None:
        num_experts, top_k = config.experts.num_experts, config.experts.top_k
        inner_size = config.experts.intermediate_size
    else:
        return None
    return ExpertShapes(
        model=published.name,
        dtype=config.dtype,
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=getattr(config, "expert_hidden_size", config.hidden_size),
        inner_size=inner_size,
    )


def expert_choices_of(shapes: ExpertShapes, device: Device, step: str) -> ExpertChoices:
    """The choices for the products of one layer's experts in a step."""
    num_tokens, dtype = _num_tokens(step), jnp.dtype(shapes.dtype)
    kernels = KernelSettings(target=device.target)

    def run(x: jax.Array, routing: Routing, batch: ForwardBatch) -> jax.Array:
        experts = Experts(
            shapes.num_experts,
            *(shapes.hidden_size, shapes.inner_size),
            activation="silu",
            dtype=dtype,
        )
        context = LayerContext(batch=batch, kernels=kernels, slots=(), cos_sin={})
        return experts(x, routing, context)

    routing = Routing(
        expert_ids=_integers(num_tokens, shapes.top_k),
        weights=jax.ShapeDtypeStruct((num_tokens, shapes.top_k), jnp.float32),
    )
    x = jax.ShapeDtypeStruct((num_tokens, shapes.hidden_size), dtype)
    with _recorded_choices() as choices:
        jax.eval_shape(run, x, routing, _batch_of(step, ()))
    if [choice.op for choice in choices] != ["grouped_matmul"] * 3 or choices[0] != choices[1]:
        raise ValueError(f"{shapes}: wanted the same for gate and up, and one for down: {choices}")
    return ExpertChoices(
        tile_rows=kernels.tile_rows(num_tokens * shapes.top_k, shapes.num_experts),
        up=choices[1],
        down=choices[2],
    )


def state_choices_of(published: PublishedConfig, device: Device) -> list[Choice]:
    """The choices for a decode step, for each kind of states in the model."""
    config = read_config(published.fields)
    dtype = kv_cache_dtype(config.dtype, device.platform)
    groups = groups_of_spec(
        config.spec(dtype),
        block_size=device.platform.block_size,
        head_dim_step=device.platform.head_dim_step,
    )
    pages = jax.eval_shape(
        lambda: empty_kv_cache(groups.config(NUM_BLOCKS), device.platform, dtype)
    )
    kinds = dict.fromkeys(cache for cache in groups.formats.values() if cache.kind == "state")
    return [_state_choice(cache, pages, device) for cache in kinds]


def _state_choice(cache: StateFormat, pages: jax.ShapeDtypeStruct, device: Device) -> Choice:
    if cache.step_op is None or not device.platform.fuses_state_writes:
        return Choice(op="states", body="xla", reason="there is no kernel for this op")
    num_heads, num_lines, line_size = cache.shapes[-1]
    num_pages = cache.num_pages(math.prod(pages.shape[2:]) * pages.dtype.itemsize)
    flags = jax.ShapeDtypeStruct((NUM_REQS,), jnp.bool_)

    def floats(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((NUM_REQS, *dims), jnp.float32)

    keys, values = floats(num_heads, num_lines), floats(num_heads, line_size)
    tokens = (keys, keys, values, floats(num_heads), floats(num_heads))
    if cache.step_op == "ssd_step":  # in one group
        tokens = (keys, floats(1, line_size), floats(1, line_size), floats(num_heads))
    if cache.step_op == "selective_step":
        rates = jax.ShapeDtypeStruct(cache.shapes[-1], jnp.float32)
        tokens = (values, values, rates, keys, keys)

    def run(pages, read_slots, write_slots, is_zero, is_written, starts, *tokens):
        state = LayerState(
            format=cache,
            row=0,
            read_slots=read_slots,
            write_slots=write_slots,
            starts_from_zero=is_zero,
            is_written=is_written,
            query_start_loc=starts,
            has_one_token_each=True,
        )
        op = getattr(pallas_kernels, cache.step_op)
        return op(cache.in_pages(pages, state), *tokens, target=device.target)

    slots = _integers(NUM_REQS, num_pages)
    with _recorded_choices() as choices:
        jax.eval_shape(run, pages, slots, slots, flags, flags, _integers(NUM_REQS + 1), *tokens)
    (choice,) = choices
    return choice


@contextlib.contextmanager
def _recorded_choices() -> Iterator[list[Choice]]:
    """Collects the choices of `dispatch.py` while it is open. Meanwhile, ops are traced as XLA.

    The plain body of `paged_attention` is left out: it takes most of the time of tracing a layer.
    """
    choices = []
    preferred_body = dispatch.preferred_body

    def record(op_name, bodies, target, *args, **kwargs):
        body = preferred_body(op_name, bodies, target, *args, **kwargs)
        reason = None
        if body == "xla":
            kernel = bodies.get(f"mosaic_{target.platform}")
            reason = kernel.misfit(*args, **kwargs) if kernel else "there is no kernel for this op"
        choices.append(Choice(op=op_name, body=body, reason=reason))
        return "xla"

    def no_attention(problem: AttentionProblem, _: int | None) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(problem.out_shape), jnp.zeros(problem.out_shape[:-1])

    with (
        mock.patch.object(dispatch, "preferred_body", record),
        mock.patch.object(paged_attention_xla, "attend_all_rows", no_attention),
    ):
        yield choices


def all_layers(device: Device) -> list[Layer]:
    """A layer of every kind of every family, and the first family's layers in other dtypes."""
    configs = list(published_configs().values())
    layers = [layer for published in configs for layer in layers_of(published, device)]
    for dtype in _OTHER_DTYPES:
        layers += layers_of(configs[0], device, dtype)
    return layers


def make_tables() -> str:
    """Markdown: all tables, and a list of the reasons that their cells refer to."""
    reasons: list[str] = []
    parts = [f"On {device.name}:\n\n{_table_of(device, reasons)}" for device in DEVICES]
    parts.append(f"Products of experts:\n\n{_experts_table(reasons)}")
    listed = "\n".join(f"- ({_letter(idx)}) {reason}." for idx, reason in enumerate(reasons))
    return "\n\n".join([*parts, "Reasons for plain XLA:", listed])


def _table_of(device: Device, reasons: list[str]) -> str:
    """The table of one device. Adds the reasons in its cells to `reasons`."""
    names: dict[tuple[str, ...], list[str]] = {}
    for layer in all_layers(device):
        decode, mixed = choices_of(layer, _DECODE), choices_of(layer, _MIXED)
        # These ops have one column for both kinds of step.
        for op in _OTHER_OPS:
            if decode[op] != mixed[op]:
                raise ValueError(f"{layer}: {op} is {decode[op]} and {mixed[op]}")
        choices = (
            *(decode[layer.attention_op], mixed[layer.attention_op]),
            *(mixed[op] for op in ("kv_scatter", "slot_mapping", "block_copy")),
        )
        cells = tuple(_cell(choice, reasons) for choice in choices)
        named = names.setdefault((*_shown_shapes(layer), *cells), [])
        if layer.model not in named:
            named.append(layer.model)
    columns = (
        *("models", "query, KV heads", "K, V width", "window", "dtype"),
        *("stored width", "block size"),
        *("attention of decodes", "attention of prompts"),
        *("`kv_scatter`", "`slot_mapping`", "`block_copy`"),
    )
    return _markdown(columns, [(", ".join(models), *cells) for cells, models in names.items()])


def _experts_table(reasons: list[str]) -> str:
    """The table of all models with experts. Adds the reasons in its cells to `reasons`."""
    rows = []
    for shapes in filter(None, map(experts_of, published_configs().values())):
        choices = [
            expert_choices_of(shapes, device, step)
            for device in DEVICES
            for step in (_DECODE, _MIXED)
        ]
        rows.append(
            (
                shapes.model,
                f"{shapes.num_experts}, {shapes.top_k}",
                f"{shapes.hidden_size:,}; {shapes.inner_size:,}",
                *(_experts_cell(choice, reasons) for choice in choices),
            )
        )
    steps = [f"{step} on {device.name}" for device in DEVICES for step in ("decodes", "prompts")]
    return _markdown(("model", "experts, top k", "hidden size; inner size", *steps), rows)


def _experts_cell(choices: ExpertChoices, reasons: list[str]) -> str:
    up, down = _cell(choices.up, reasons), _cell(choices.down, reasons)
    bodies = up if up == down else f"to inner {up}, to hidden {down}"
    return f"{choices.tile_rows} rows: {bodies}"


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown_shapes(layer: Layer) -> tuple[str, ...]:
    attention = layer.attention
    window = "none"
    if attention.sliding_window is not None:
        window = f"{attention.sliding_window:,}"
    elif attention.chunk_size is not None:
        window = f"chunks of {attention.chunk_size:,}"
    return (
        f"{attention.num_q_heads}, {attention.num_kv_heads}",
        f"{attention.head_dim}, {attention.value_head_dim}",
        *(window, layer.dtype),
        *(str(layer.stored_width), str(layer.block_size)),
    )


def _cell(choice: Choice, reasons: list[str]) -> str:
    name = _BODY_NAMES[choice.body]
    if choice.reason is None:
        return name
    if choice.reason not in reasons:
        reasons.append(choice.reason)
    return f"{name} ({_letter(reasons.index(choice.reason))})"


def _letter(idx: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[idx]


def with_tables(page: str) -> str:
    """The text of the page with the current tables between its two marks.

    Raises:
        ValueError: The page lacks one of the marks.
    """
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"{PAGE} has no place for the tables: wanted the lines {START} and {END}.")
    return f"{before}{START}\n\n{make_tables()}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    arguments = parser.parse_args()
    if jax.__version_info__ < dispatch.MIN_JAX_FOR_MOSAIC_GPU:
        wanted = ".".join(map(str, dispatch.MIN_JAX_FOR_MOSAIC_GPU))
        parser.error(
            f"this is JAX {jax.__version__}; the GPU kernels need JAX {wanted} or newer. Install "
            "it, with Python 3.12 or newer, and run the command again."
        )
    if arguments.write:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(make_tables())


if __name__ == "__main__":
    main()
