"""The identity of compiled programs: everything that they depend on besides their shapes."""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence

import flax
import jax
import jaxlib
from jax.sharding import Mesh

import paxkv
from models import KernelSettings, LoadedModel, Pages
from models.loading.loaded_draft_model import LoadedDrafter
from models.loading.loaded_module import LoadedModule
from paxkv.runner.programs.program_sources import source_digest
from paxkv.runner.shapes.own_program import OwnProgram
from paxkv.runner.shapes.step_variant import StepVariant

# Settings of JAX that change tracing or compiling. No version of JAX has all of them.
_JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_threefry_gpu_kernel_lowering",
    "jax_numpy_dtype_promotion",
    "jax_allow_f16_reductions",
    "jax_use_hlo_logistic_lowering",
    "jax_pallas_use_mosaic_gpu",
    "jax_pallas_enable_debug_checks",
    "jax_debug_nans",
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_compiler_enable_remat_pass",
    "jax_use_shardy_partitioner",
)
_COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def program_identity(
    *,
    model: LoadedModel,
    params: Sequence[jax.Array],
    kv_cache: Pages,
    mesh: Mesh,
    max_num_seqs: int,
    num_logits_rows: int,
    compiler_options: Mapping[str, str],
    feature_code: Sequence[StepVariant | OwnProgram] = (),
    head: LoadedDrafter | None = None,
) -> dict[str, str]:
    """Returns names and values of everything that all programs of an engine depend on.

    The identity has versions, the source code of paxkv, the device down to its instruction set,
    the model except the values of its weights, the programs' arguments, and the compiler's
    settings. Two processes with equal identities compile the same program for the same shape.

    Args:
        kv_cache: May be abstract.
        num_logits_rows: Rows of the logits that steps leave for the sampler.
        feature_code: Variants and programs of all step features. The identity covers their source
            code, and the source code of the formats in `model.places`. A program's shape names the
            variants that it contains.
        head: The draft head, if there is one.
    """
    num_rows, num_blocks, *page = kv_cache.shape
    jax_settings = jax.config.values  # some settings are not attributes of `jax.config`
    modules = [model] if head is None else [model, head]
    formats = {
        place.format for module in modules for places in module.places for _, place in places
    }
    traced = _packages_of([*feature_code, *formats])
    packages = frozenset(traced).union(*(module.packages for module in modules))
    return {
        "paxkv": f"{paxkv.__version__}, source {source_digest(packages)[:16]}",
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "flax": flax.__version__,
        **_device_facts(mesh),
        **model.platform.identity(),
        "model's class": model.class_name,
        **({} if head is None else _head_facts(head)),
        **_model_facts(model.config),
        "dtype": model.dtype,
        "weights": _digest([(array.shape, array.dtype.name) for array in params])[:16],
        "weight shardings": _digest([str(spec) for spec in model.param_specs])[:16],
        **_kernel_facts(model.kernels),
        "max_num_seqs": str(max_num_seqs),
        "rows of logits": str(num_logits_rows),
        "number of KV blocks": str(num_blocks),
        "KV cache": f"{kv_cache.dtype.name}, {num_rows} rows, pages of {page}",
        "unused token ids": _digest(model.unused_token_ids)[:16],
        "places in the KV cache": _digest(model.places)[:16],
        "compiler options": json.dumps(dict(compiler_options), sort_keys=True),
        **{name: str(jax_settings.get(name, "not known")) for name in _JAX_SETTINGS},
        **{name: os.environ.get(name, "") for name in _COMPILER_VARIABLES},
    }


def identity_digest(identity: Mapping[str, str]) -> str:
    """Returns a short name for an identity, for its folder."""
    return _digest(sorted(identity.items()))[:32]


def identity_differences(compiled: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Describes each difference by its name and both values."""
    names = [*wanted, *(name for name in compiled if name not in wanted)]
    return [
        f"{name}: compiled with {compiled.get(name, 'none')!r}, now {wanted.get(name, 'none')!r}"
        for name in names
        if compiled.get(name) != wanted.get(name)
    ]


def _packages_of(traced: Iterable[object]) -> set[str]:
    """Returns the top-level packages that define the classes of these objects."""
    classes = {base for each in traced for base in type(each).__mro__}
    return {cls.__module__.partition(".")[0] for cls in classes} - sys.stdlib_module_names


def _device_facts(mesh: Mesh) -> dict[str, str]:
    device = mesh.devices.flat[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "runtime": device.client.platform_version,
        "mesh": json.dumps(dict(mesh.shape)),
    }


def _head_facts(head: LoadedModule) -> dict[str, str]:
    """A draft head's class, layers, weights and caches."""
    weights = [(array.shape, array.dtype.name) for array in head.params]
    return {
        "draft head's class": head.class_name,
        "draft head's config": _digest(_model_facts(head.config))[:16],
        "draft head's weights": _digest(weights)[:16],
        "draft head's places in the KV cache": _digest(head.places)[:16],
    }


def _model_facts(config: object) -> dict[str, str]:
    return {
        f"model's {field.name}": repr(getattr(config, field.name))
        for field in dataclasses.fields(config)
        # Programs get the tokens that end a request as arguments.
        if field.name != "eos_token_ids"
    }


def _kernel_facts(kernels: KernelSettings) -> dict[str, str]:
    # `_device_facts` describes the mesh. The text of a mesh contains device numbers.
    names = [field.name for field in dataclasses.fields(kernels) if field.name != "mesh"]
    return {f"kernels' {name}": str(getattr(kernels, name)) for name in names}


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
