"""Finds the class that `model_impl` names, in a module or a file of the user's own."""

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from models.decoders.decoder import Decoder
from models.errors import ModelError

# The class that `models/registry.py` has for the architecture in config.json.
AUTO = "auto"
_EXPECTED = (
    f"expected {AUTO!r}, 'module:Class' such as 'my_model:MyModel', or 'path/to/file.py:Class'"
)
_HOW_TO = "docs/guide/adding-a-model.md describes such a class"


def load_model_impl(model_impl: str) -> type[Decoder]:
    """Imports the class that `model_impl` names.

    A module is one on `sys.path`, or one in the current folder. If needed, the folder of the module
    is added to the end of `sys.path`, so that the module can import its neighbors.

    Args:
        model_impl: "module:Class" or "path/to/file.py:Class".

    Raises:
        ModelError: The module cannot be imported, or its class is not a model class.
    """
    module_name, _, class_name = model_impl.rpartition(":")
    if not module_name or not class_name.isidentifier():
        raise ModelError(f"model_impl is {model_impl!r}; {_EXPECTED}.")
    module = _import_module(module_name, model_impl)
    model_class = getattr(module, class_name, None)
    where = f"{module.__name__!r} ({getattr(module, '__file__', None) or 'without a file'})"
    if model_class is None:
        raise ModelError(
            f"model_impl={model_impl!r}: module {where} has no {class_name!r}; its model classes "
            f"are: {', '.join(_model_classes(module)) or 'none'}."
        )
    if not isinstance(model_class, type) or not issubclass(model_class, Decoder):
        raise ModelError(
            f"model_impl={model_impl!r}: {class_name!r} of module {where} is "
            f"{_described(model_class)}; expected a class derived from "
            f"models.decoders.decoder.Decoder. {_HOW_TO}."
        )
    if model_class.read_config.__func__ is Decoder.read_config.__func__:
        raise ModelError(
            f"model_impl={model_impl!r}: class {class_name!r} of module {where} has no "
            f"`read_config`, so it cannot read a config.json. Define this classmethod. {_HOW_TO}."
        )
    return model_class


def _import_module(name: str, model_impl: str) -> ModuleType:
    """Imports a module by its name, or a file by its path."""
    if name.endswith(".py"):
        file = Path(name).expanduser().resolve()
        if not file.is_file():
            raise ModelError(f"model_impl={model_impl!r}: there is no file {file}; {_EXPECTED}.")
        folder, name = file.parent, file.stem
    else:
        folder, file = Path.cwd(), None
    try:
        _find_in(folder, name)
        module = importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ModelError(
                f"model_impl={model_impl!r}: there is no module {name!r} on sys.path or in the "
                f"current folder {folder}; {_EXPECTED}."
            ) from error
        raise ModelError(
            f"model_impl={model_impl!r}: module {name!r} cannot be imported "
            f"({type(error).__name__}: {error}{_line_of(error)})."
        ) from error
    found = getattr(module, "__file__", None)
    if file is not None and (found is None or Path(found).resolve() != file):
        raise ModelError(
            f"model_impl={model_impl!r}: the name {name!r} is that of another module "
            f"({found or 'without a file'}). Rename the file."
        )
    return module


def _find_in(folder: Path, name: str) -> None:
    """Adds `folder` to `sys.path` if Python finds the module only with it."""
    top = name.partition(".")[0]
    is_known = top in sys.modules or importlib.util.find_spec(top) is not None
    if not is_known and ((folder / f"{top}.py").is_file() or (folder / top).is_dir()):
        # At the end: its other files must not hide modules that are installed.
        sys.path.append(str(folder))
        importlib.invalidate_caches()


def _line_of(error: Exception) -> str:
    """The last place outside Python's import system in the traceback of a failed import."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    # A SyntaxError names its own line.
    if not frames or isinstance(error, SyntaxError):
        return ""
    return f", in {os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}"


def _model_classes(module: ModuleType) -> list[str]:
    """Names of the model classes that the module itself defines."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Decoder)
        and value.__module__ == module.__name__
    ]


def _described(value: object) -> str:
    if isinstance(value, type):
        bases = ", ".join(base.__name__ for base in value.__bases__)
        return f"a class derived from {bases}"
    return f"of type {type(value).__name__}"
