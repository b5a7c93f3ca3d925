"""`BoundedEnvironment`: jinja's sandbox with limits on a template's time and output size.

A chat template is a program. The sandbox restricts it to its variables. The limits here prevent
endless loops and huge outputs.
"""

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

from paxkv.text.call_arguments import dump_json

_ItemT = TypeVar("_ItemT")
# The longest conversation that fits into a request by default renders in well under a second.
MAX_RENDER_S = 10.0
MAX_RENDERED_CHARS = 32 * 2**20
# Number of loop iterations per check of the time, which costs as much as a short loop body.
_ITEMS_PER_CHECK = 256
# The widths of "%*d" and "%.*f" are among the values.
_STARRED_WIDTH = re.compile(r"%[-+ #0-9.]*\*")
_LOOP_FILTER, _CONCAT_FILTER = "paxkv_loop", "paxkv_concat"


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Compiles and renders templates. Several threads may render at the same time."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, *, extensions: list[type[jinja2.ext.Extension]]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self._renders = threading.local()
        self.filters[_LOOP_FILTER] = self._timed
        self.filters[_CONCAT_FILTER] = self._concatenated
        self.filters["format"] = _formatted
        for name in ("batch", "center", "indent", "slice", "wordwrap"):
            self.filters[name] = _with_small_numbers(self.filters[name])

    def render(
        self, template: jinja2.Template, variables: dict[str, object], *, max_s: float | None = None
    ) -> str:
        """Renders a template.

        Args:
            max_s: Time limit in seconds; MAX_RENDER_S if left out.

        Raises:
            TemplateError: The template takes too long, produces too much text, or raises this
                error. A broken template may also raise any other error.
        """
        self._renders.deadline_s = time.monotonic() + (MAX_RENDER_S if max_s is None else max_s)
        parts: list[str] = []
        num_chars = 0
        for part in template.generate(variables):
            self._check_time()
            num_chars += len(part)
            _check_size(num_chars)
            parts.append(part)
        return "".join(parts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        return _LimitInserter().visit(super()._parse(source, name, filename))

    def call(
        self,
        context: jinja2.runtime.Context,
        function: object,
        /,
        *args: object,
        **kwargs: object,
    ) -> object:
        self._check_time()
        if not _accepts_large_numbers(function):
            check_numbers((*args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: object, right: object
    ) -> object:
        if operator == "*":
            for many, count in ((left, right), (right, left)):
                if isinstance(many, (str, list, tuple)) and isinstance(count, int):
                    _check_size(len(many) * count)
        elif operator == "+":
            # Templates such as DeepSeek's add the arguments of a call to a text.
            if isinstance(left, str) and isinstance(right, Mapping):
                right = dump_json(right)
            if all(isinstance(v, (str, list, tuple)) for v in (left, right)):
                _check_size(len(left) + len(right))
        elif operator == "**":
            check_numbers((left, right), most=64)
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        @functools.wraps(formatted)
        def bounded(*args: object, **kwargs: object) -> str:
            is_map = value.__name__ == "format_map" and args
            fields = ((), args[0]) if is_map else (args, kwargs)
            # Check the length only. `formatted` returns another text for strings of safe HTML.
            _SizedFormatter(self).vformat(value.__self__, *fields)
            return formatted(*args, **kwargs)

        return bounded

    def _timed(self, items: Iterable[_ItemT]) -> "Iterable[_ItemT]":
        # jinja's loops use the length of the sequence.
        return _TimedItems(self, items) if hasattr(items, "__len__") else self._timed_items(items)

    def _timed_items(self, items: Iterable[_ItemT]) -> Iterator[_ItemT]:
        # Also check before the first item, for loops that contain short loops.
        self._check_time()
        for num_items, item in enumerate(items):
            if num_items % _ITEMS_PER_CHECK == 0:
                self._check_time()
            yield item

    def _concatenated(self, parts: list[object]) -> str:
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def _check_time(self) -> None:
        # No deadline is set while jinja compiles a template and folds constants.
        deadline_s = getattr(self._renders, "deadline_s", None)
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise jinja2.TemplateError("it takes too long")


class _SizedFormatter(jinja2.sandbox.SandboxedFormatter):
    """Raises before a text is too long. The width in "{:{width}}" may come from any value."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        super().__init__(environment)
        self._num_chars = 0

    def format_field(self, value: object, format_spec: str) -> str:
        _check_widths(format_spec)
        text = super().format_field(value, format_spec)
        self._num_chars += len(text)
        _check_size(self._num_chars)
        return text


class _TimedItems:
    """A sequence that checks the time while it is iterated."""

    def __init__(self, environment: BoundedEnvironment, items: Iterable[object]) -> None:
        self._environment = environment
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[object]:
        return self._environment._timed_items(self._items)


class _LimitInserter(jinja2.visitor.NodeTransformer):
    """Adds a filter to the sequence of every loop, and to every `~`."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _LOOP_FILTER)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Filter:
        self.generic_visit(node)
        return _filtered(jinja2.nodes.List(node.nodes, lineno=node.lineno), _CONCAT_FILTER)


def _filtered(node: jinja2.nodes.Expr, name: str) -> jinja2.nodes.Filter:
    filtered = jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
    return filtered.set_environment(node.environment)


def _accepts_large_numbers(function: object) -> bool:
    """True for macros, containers and their methods, which do not use numbers as sizes.

    They may receive large numbers, such as timestamps in messages.
    """
    if isinstance(function, jinja2.runtime.Macro):
        return True
    if function is dict or function is jinja2.utils.Namespace:
        return True
    owner = getattr(function, "__self__", None)
    return isinstance(owner, (dict, list, tuple, jinja2.runtime.LoopContext))


def _with_small_numbers(function: Callable[..., object]) -> Callable[..., object]:
    # `wraps` also copies jinja's marks, for example that the filter needs the environment.
    @functools.wraps(function)
    def bounded(*args: object, **kwargs: object) -> object:
        check_numbers((*args, *kwargs.values()))
        return function(*args, **kwargs)

    return bounded


def _formatted(template: str, *args: object, **kwargs: object) -> str:
    _check_format(str(template), args)
    return jinja2.filters.do_format(template, *args, **kwargs)


def check_numbers(values: Iterable[object], *, most: int = 1_000_000) -> None:
    """Rejects numbers that are too large for sizes: `"x".center(10 ** 10)` would be 10 GB.

    Raises:
        TemplateError: The absolute value of an integer is above `most`.
    """
    for value in values:
        if isinstance(value, int) and abs(value) > most:
            raise jinja2.TemplateError(f"it uses a number over {most}")


def _check_size(num_items: int) -> None:
    if num_items > MAX_RENDERED_CHARS:
        raise jinja2.TemplateError(f"it makes more than {MAX_RENDERED_CHARS} characters")


def _check_format(template: str, values: object) -> None:
    """Checks the widths in `template % values`."""
    _check_widths(template)
    if _STARRED_WIDTH.search(template.replace("%%", "")) and isinstance(values, tuple):
        check_numbers(values)


def _check_widths(template: str) -> None:
    # A width in a format produces a string of that length.
    _check_size(max(map(int, _digit_runs(template)), default=0))


def _digit_runs(text: str) -> list[str]:
    # 12 digits suffice to exceed every limit.
    return [run[:12] for run in "".join(c if c in "0123456789" else " " for c in text).split()]
