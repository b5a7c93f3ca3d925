"""Folders of compiled programs: the user's cache, and the output of `python -m paxkv.compile`.

A program is machine code, which runs after it is loaded. So paxkv uses a folder only if it belongs
to the user or to root, and is not writable by everybody.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pickle
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled

from paxkv.config.runner_config import RunnerConfig
from paxkv.errors import ConfigError
from paxkv.runner.programs.program_identity import identity_differences, identity_digest
from paxkv.runner.shapes.program_shapes import ProgramShape, RowShape, TableShape

logger = logging.getLogger(__name__)

_INDEX_FILE = "programs.json"
_SUFFIX = ".program"
_TEMPORARY = ".being-written"
_OUR_FILES = (_SUFFIX, _INDEX_FILE, _TEMPORARY)
_DIGEST_BYTES = 32
_PROBE_BYTES = 2**16
_NUM_BLOCKS = "number of KV blocks"
# The cache deletes the folder of an identity if no engine has started with it for this long.
_FORGET_AFTER_S = 30 * 24 * 3600
# The cache keeps the folders that were used last. A folder may take some hundred megabytes.
_MAX_IDENTITIES = 32
# Names of `identity_digest`. The cache deletes no other folders.
_IDENTITY_FOLDER = re.compile(r"[0-9a-f]{32}")
# A shape in an index: its class and its dimensions by name, as JSON.
_Described = dict[str, str | int | list[int | str] | None]


class ProgramFolder:
    """The programs of one identity, one file each.

    Args:
        devices: The devices that the programs run on.
        has_all: True: a missing or damaged program is an error. False: it is compiled.
        must_keep: True: failing to save a program is an error. False: the first failure is logged.
        is_warned: A failure to save programs was already logged.
    """

    def __init__(
        self,
        path: Path,
        devices: Sequence[jax.Device],
        *,
        has_all: bool,
        must_keep: bool,
        is_warned: bool = False,
    ) -> None:
        self.path = path
        self._devices = list(devices)
        self._has_all = has_all
        self._must_keep = must_keep
        self._is_warned = is_warned

    def load(self, shape: ProgramShape) -> Compiled | None:
        """Loads the program of `shape`; None if it has to be compiled.

        Raises:
            ConfigError: The program is missing or cannot be read, and the folder must have it.
        """
        path = self._file(shape)
        try:
            stored = path.read_bytes()
        except OSError as error:
            is_new = isinstance(error, FileNotFoundError) and not self._has_all
            return None if is_new else self._refuse(path, error.strerror or str(error))
        digest, content = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            return self._refuse(path, "it is damaged")
        try:
            serialized, in_tree, out_tree = pickle.loads(content)
            return serialize_executable.deserialize_and_load(
                *(serialized, in_tree, out_tree),
                backend=self._devices[0].client,
                execution_devices=self._devices,
            )
        # A backend that cannot load a program, whatever error it raises, can still compile it.
        except Exception as error:
            return self._refuse(path, f"{type(error).__name__}: {error}")

    def save(self, shape: ProgramShape, program: Compiled) -> None:
        """Saves a program that was compiled `without_jax_cache`.

        Raises:
            ConfigError: The program cannot be saved, and `must_keep` is true.
        """
        try:
            content = pickle.dumps(serialize_executable.serialize(program))
            _write(self._file(shape), hashlib.sha256(content).digest() + content)
        # A program that cannot be saved, whatever the error, can still run.
        except Exception as error:
            message = f"the program of {shape} cannot be kept in {self.path}: {error}."
            if self._must_keep:
                raise ConfigError(message) from error
            if not self._is_warned:
                logger.warning(
                    "%s The next start compiles it again. Later failures are not logged.",
                    message,
                )
            self._is_warned = True

    def _refuse(self, path: Path, problem: str) -> None:
        message = f"the compiled program {path} cannot be read: {problem}."
        if self._has_all:
            raise ConfigError(f"{message} To write it again, {_compile_again(self.path)}")
        logger.warning("%s It is compiled again.", message)

    def _file(self, shape: ProgramShape) -> Path:
        digest = hashlib.sha256(repr(shape).encode()).hexdigest()
        return self.path / f"{type(shape).__name__}-{digest[:16]}{_SUFFIX}"


class ProgramStore(Protocol):
    """Finds the folder in which an engine looks for its programs before it compiles them."""

    def open(
        self,
        identity: Mapping[str, str],
        shapes: Sequence[ProgramShape],
        devices: Sequence[jax.Device],
    ) -> ProgramFolder | None:
        """Returns the folder for the programs of an identity; None if it cannot be written.

        Raises:
            ConfigError: The folder cannot be trusted or written, or its programs do not fit.
        """
        ...


class ProgramCache:
    """The user's cache: each start saves its programs for later starts.

    Args:
        root: Holds a folder per identity. The cache keeps the 32 folders that starts used last, and
            deletes a folder after 30 days without a start. If it cannot write to `root`, it logs a
            warning and the engine starts without it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._is_warned = False

    def check(self) -> None:
        """Checks that programs can be saved, before minutes of compiling. Logs a warning if not.

        Raises:
            ConfigError: The folder cannot be trusted, because others may write to it.
        """
        try:
            _make_folder(self._root)
            # A full disk may have room for an empty file, so this writes something.
            with tempfile.TemporaryFile(dir=self._root) as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._warn(error)

    def open(
        self,
        identity: Mapping[str, str],
        shapes: Sequence[ProgramShape],
        devices: Sequence[jax.Device],
    ) -> ProgramFolder | None:
        """See `ProgramStore.open`. Makes the folder if the identity is new."""
        path = self._root / identity_digest(identity)
        try:
            _make_folder(self._root)
            # Keeps this folder: a server may have run longer than the limit since its last start.
            _forget_unused(self._root, but=path)
            _make_folder(path)
            if not (path / _INDEX_FILE).is_file():
                _write_index(path, identity, shapes)
            # A user who may only read the folder can still load its programs.
            with contextlib.suppress(OSError):
                os.utime(path)
        except OSError as error:
            self._warn(error)
            return None
        return ProgramFolder(
            path, devices, has_all=False, must_keep=False, is_warned=self._is_warned
        )

    def _warn(self, error: OSError) -> None:
        if not self._is_warned:
            logger.warning(
                "no program can be kept in compilation_cache_dir=%s: %s. Every start compiles "
                "the programs that this folder lacks. Make room, or choose another folder.",
                self._root,
                error,
            )
        self._is_warned = True


class CompiledPrograms:
    """A folder that `python -m paxkv.compile` wrote. It must have all programs of a start.

    Raises:
        ConfigError: The folder holds no compiled programs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._index = _read_index(path)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the KV cache that the programs were compiled for."""
        return int(self._index["identity"][_NUM_BLOCKS])

    @property
    def max_model_len(self) -> int | None:
        """`max_model_len` that the programs were compiled for; None if no program has it."""
        shapes = (shape for shape in self._index["programs"] if shape["shape"] == RowShape.__name__)
        return next((shape["max_model_len"] for shape in shapes), None)

    def open(
        self,
        identity: Mapping[str, str],
        shapes: Sequence[ProgramShape],
        devices: Sequence[jax.Device],
    ) -> ProgramFolder:
        """See `ProgramStore.open`."""
        differences = [
            *identity_differences(self._index["identity"], identity),
            *_shape_differences(self._index["programs"], list(map(_described, shapes))),
        ]
        if differences:
            raise ConfigError(
                f"the programs in compiled_dir={self._path} do not fit this start: "
                f"{'; '.join(differences)}. Start with the settings of the compilation, or "
                f"{_compile_again(self._path)}"
            )
        return ProgramFolder(self._path, devices, has_all=True, must_keep=True)


class NewCompiledPrograms:
    """The folder that a run of `python -m paxkv.compile` fills.

    Args:
        path: A new or empty folder, or the folder of an earlier run, whose programs are deleted.

    Raises:
        ConfigError: The folder holds other files, or cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            _make_folder(path)
            foreign = [name for name in os.listdir(path) if not name.endswith(_OUR_FILES)]
        except OSError as error:
            raise _cannot_write(path, error) from error
        if foreign:
            raise ConfigError(
                f"programs cannot be written to {path}: it holds other files, {foreign[0]!r} for "
                "example. "
                "Choose a new or an empty folder."
            )

    def open(
        self,
        identity: Mapping[str, str],
        shapes: Sequence[ProgramShape],
        devices: Sequence[jax.Device],
    ) -> ProgramFolder:
        """See `ProgramStore.open`. Deletes the programs of earlier runs."""
        try:
            for path in self._path.iterdir():
                if path.name.endswith(_OUR_FILES):
                    path.unlink()
            _write_index(self._path, identity, shapes)
        except OSError as error:
            raise _cannot_write(self._path, error) from error
        return ProgramFolder(self._path, devices, has_all=False, must_keep=True)


def choose_store(config: RunnerConfig) -> ProgramStore | None:
    """Returns the store that the settings choose; None if every start compiles all programs.

    By default, the store is in the folder of JAX's own cache, if the user has set one.
    """
    if config.compiled_dir is not None:
        return CompiledPrograms(Path(config.compiled_dir))
    if not config.enable_compilation_cache:
        return None
    jax_cache_dir = jax.config.jax_compilation_cache_dir
    if config.compilation_cache_dir is not None:
        root = Path(config.compilation_cache_dir)
    # JAX's cache may also be a bucket in the cloud, such as gs://name.
    elif jax_cache_dir and "://" not in jax_cache_dir:
        root = Path(jax_cache_dir) / "paxkv"
    else:
        root = user_cache_folder()
    if root is None:
        logger.warning(
            "no program can be kept: this user has no home folder. Every start compiles all of "
            "them, unless compilation_cache_dir or XDG_CACHE_HOME names a folder."
        )
        return None
    cache = ProgramCache(root)
    cache.check()
    return cache


def user_cache_folder() -> Path | None:
    """Returns the default folder for programs (XDG Base Directory Specification).

    None for a user without a home: `expanduser` then returns "~", a path relative to the current
    folder.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the specification says to ignore it
        base = Path(os.path.expanduser("~"), ".cache")
    return base / "paxkv" / "compiled" if base.is_absolute() else None


@contextlib.contextmanager
def without_jax_cache() -> Iterator[None]:
    """Turns JAX's own persistent cache off inside the context.

    On a CPU, a program from that cache lacks parts. It could be saved and loaded again, but would
    fail when called (JAX 0.10.2 and 0.12.0.1).
    """
    was_enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX decides only once whether to use the cache
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
        compilation_cache.reset_cache()


def _described(shape: ProgramShape) -> _Described:
    values = _fields_of(shape)
    for table in values.pop("tables", ()):
        for name, value in _fields_of(table).items():
            values[name] = (*values.get(name, ()), value)
    # Through JSON, so that it equals a shape read from an index. Features are given by their repr.
    return json.loads(json.dumps({"shape": type(shape).__name__, **values}, default=repr))


def _fields_of(shape: ProgramShape | TableShape) -> dict[str, object]:
    return {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}


def _shape_differences(compiled: Sequence[_Described], wanted: Sequence[_Described]) -> list[str]:
    """Describes which wanted programs were not compiled.

    Names the dimensions with values that no compiled program has. If each value occurs in some
    program, names the first missing program.
    """
    missing = [shape for shape in wanted if shape not in compiled]
    unknown: dict[tuple[str, str], list[str]] = {}
    for shape in missing:
        for name, value in shape.items():
            values = unknown.setdefault((shape["shape"], name), [])
            if str(value) not in _values_of(name, shape["shape"], compiled) + values:
                values.append(str(value))
    differences = [
        f"{kind}'s {name}: compiled with {', '.join(_values_of(name, kind, compiled)) or 'none'}, "
        f"now also {', '.join(values)}"
        for (kind, name), values in unknown.items()
        if values
    ]
    return differences or [f"a program of {shape} is missing" for shape in missing[:1]]


def _values_of(name: str, kind: str, shapes: Sequence[_Described]) -> list[str]:
    """Returns the different values of one dimension."""
    return list(dict.fromkeys(str(s.get(name)) for s in shapes if s["shape"] == kind))


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"programs cannot be written to {path}: {error}. Choose another folder.")


def _compile_again(path: Path) -> str:
    return f"compile with this start's settings: python -m paxkv.compile --out {path} ..."


def _make_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_trusted(path)


def _check_trusted(path: Path) -> None:
    if os.name != "posix":
        return
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"compiled programs in {path} cannot be trusted: it belongs to user {status.st_uid} "
            f"and has mode {stat.filemode(status.st_mode)}; wanted user {os.geteuid()} or root, "
            "not writable for others. Users who can write there could run code in this process. "
            "Change owner or mode (chown, chmod o-w), or choose another folder."
        )


def _forget_unused(root: Path, *, but: Path) -> None:
    used_at = {}
    for path in root.iterdir():
        if path == but or not _IDENTITY_FOLDER.fullmatch(path.name):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if (path / _INDEX_FILE).is_file():
                used_at[path] = path.stat().st_mtime
    latest = sorted(used_at, key=used_at.get, reverse=True)[: _MAX_IDENTITIES - 1]
    for path, time_used in used_at.items():
        if path not in latest or time_used < time.time() - _FORGET_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)


def _read_index(path: Path) -> dict[str, dict[str, str] | list[_Described]]:
    try:
        _check_trusted(path)
        index = json.loads((path / _INDEX_FILE).read_text())
        return {"identity": dict(index["identity"]), "programs": list(index["programs"])}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"compiled_dir={path} holds no compiled programs: {error}. To write them, "
            f"{_compile_again(path)}"
        ) from error


def _write_index(path: Path, identity: Mapping[str, str], shapes: Sequence[ProgramShape]) -> None:
    index = {"identity": dict(identity), "programs": list(map(_described, shapes))}
    _write(path / _INDEX_FILE, (json.dumps(index, indent=1) + "\n").encode())


def _write(path: Path, content: bytes) -> None:
    """Writes a file atomically, because other processes may read and write it at the same time."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=_TEMPORARY)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
