"""The places of a source file that can be mutated, their names, and the mutated source.

A site is named by the qualified function, the kind, the normalized line, the mutated line, and the
occurrence of that pair within the function. The name says nothing about the file or the line
number, so it is still found after the function has moved.
"""

import ast
import collections
import dataclasses
from collections.abc import Container, Iterator

OPERATOR_KINDS = ("comparison", "arithmetic", "boolean")
# The draw chooses a group first; otherwise constants and operators would crowd out the rest.
KIND_GROUPS = (OPERATOR_KINDS, ("constant",), ("off-by-one",), ("deletion",))

_OPPOSITES = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OTHER_BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_OTHER_ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_LOGGERS = {"logger", "_logger", "log", "logging", "warnings"}
# Their statements are assertions: a weaker one survives and says nothing about the tests.
_ASSERTING_FUNCTIONS = {"check_invariants"}
_ASSERTING_FILES = {"invariants.py"}
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteName:
    """What identifies a mutation in any version of the source."""

    function: str  # qualified within the module, such as "BlockPool.free_blocks"
    kind: str
    line: str
    mutated: str
    occurrence: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One mutation of one version of a source file."""

    name: SiteName
    lines: range  # numbers of the source lines that the statement or its header takes
    start: int  # bytes of the source that the mutation replaces
    end: int
    replacement: str

    def mutate(self, source: str) -> str:
        data = source.encode()
        new = data[: self.start] + self.replacement.encode() + data[self.end :]
        return new.decode()


@dataclasses.dataclass(frozen=True, slots=True)
class _Change:
    """An attribute of a syntax node (or an item of a list) takes another value."""

    kind: str
    replaced: ast.AST  # its text in the source is replaced
    rewritten: ast.AST  # its text after the change is put there
    owner: object
    key: str | int
    value: object

    def exchange(self, value: object) -> object:
        if isinstance(self.key, int):
            old, self.owner[self.key] = self.owner[self.key], value
        else:
            old = getattr(self.owner, self.key)
            setattr(self.owner, self.key, value)
        return old


def functions_of(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """Functions of a module by their qualified names; a property and its setter share one."""
    found: dict[str, list[ast.AST]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (*_FUNCTION, ast.ClassDef)):
                name = prefix + child.name
                if isinstance(child, _FUNCTION):
                    found.setdefault(name, []).append(child)
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(tree, "")
    return found


def find_sites(source: str, only: Container[str] | None = None) -> list[Site]:
    """All sites inside the functions of a file.

    Args:
        only: Qualified names of the functions to look at; None is all.
    """
    offsets = _line_offsets(source)
    sites = []
    for function, nodes in functions_of(ast.parse(source)).items():
        if only is not None and function not in only:
            continue
        if function.rpartition(".")[2] in _ASSERTING_FUNCTIONS:
            continue
        seen: collections.Counter[tuple[str, str, str]] = collections.Counter()
        for node in nodes:
            for statement in _own_statements(node.body):
                for kind, replaced, mutated, replacement in _mutations(statement, node):
                    line = _normalized(statement)
                    name = SiteName(
                        function=function,
                        kind=kind,
                        line=line,
                        mutated=mutated,
                        occurrence=seen[kind, line, mutated],
                    )
                    seen[kind, line, mutated] += 1
                    sites.append(
                        Site(
                            name=name,
                            lines=_header_lines(statement),
                            start=offsets[replaced.lineno - 1] + replaced.col_offset,
                            end=offsets[replaced.end_lineno - 1] + replaced.end_col_offset,
                            replacement=replacement,
                        )
                    )
    return sites


def is_worth_mutating(path: str) -> bool:
    return path.rpartition("/")[2] not in _ASSERTING_FILES


def _line_offsets(source: str) -> list[int]:
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    return offsets


def _own_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a function, without statements of functions and classes inside it."""
    for statement in body:
        if isinstance(statement, (*_FUNCTION, ast.ClassDef)):
            continue
        yield statement
        for part in ("body", "orelse", "finalbody"):
            yield from _own_statements(getattr(statement, part, []))
        for branch in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
            yield from _own_statements(branch.body)


def _header(statement: ast.stmt) -> list[ast.AST]:
    """What of a statement is executed before its body; the whole of a simple statement."""
    match statement:
        case ast.If() | ast.While():
            return [statement.test]
        case ast.For() | ast.AsyncFor():
            return [statement.iter]
        case ast.With() | ast.AsyncWith():
            return [item.context_expr for item in statement.items]
        case ast.Match():
            return [statement.subject]
        case ast.Try() | ast.TryStar():
            return []
    return [statement]


def _header_lines(statement: ast.stmt) -> range:
    header = _header(statement)
    return range(header[0].lineno, header[-1].end_lineno + 1)


def _normalized(statement: ast.stmt) -> str:
    """The statement, or the header of a compound one, as `ast.unparse` writes it on one line."""
    if not hasattr(statement, "body"):
        return " ".join(ast.unparse(statement).split())
    body, orelse = statement.body, getattr(statement, "orelse", None)
    statement.body = [ast.Pass()]
    if orelse:
        statement.orelse = []
    try:
        text = ast.unparse(statement)
    finally:
        statement.body = body
        if orelse:
            statement.orelse = orelse
    return " ".join(text.removesuffix("pass").split())


def _mutations(statement: ast.stmt, function: ast.AST) -> Iterator[tuple[str, ast.AST, str, str]]:
    """Kind, replaced node, mutated line and replacement text of each mutation of a statement."""
    if _is_left_alone(statement):
        return
    if _is_deletable(statement, function):
        yield "deletion", statement, "pass", "pass"
    if isinstance(statement, (ast.Raise, ast.Try, ast.TryStar, ast.Match)):
        return
    for part in _header(statement):
        if isinstance(part, ast.AnnAssign):
            part = part.value
        for node in _expressions(part):
            for change in _changes(node):
                old = change.exchange(change.value)
                mutated, text = _normalized(statement), ast.unparse(change.rewritten)
                change.exchange(old)
                is_statement = isinstance(change.rewritten, ast.stmt)
                yield change.kind, change.replaced, mutated, text if is_statement else f"({text})"


def _is_left_alone(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal() | ast.Pass():
            return True
        case ast.Assert() | ast.Expr(value=ast.Constant()):
            return True
        case ast.AnnAssign(value=None):
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id="print"))):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in _LOGGERS
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name)))):
            return name in _LOGGERS
    return False


def _is_deletable(statement: ast.stmt, function: ast.AST) -> bool:
    """Leaves out what makes every call fail: the only assignment of a variable or attribute."""
    match statement:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            return True
        case ast.Raise() | ast.Continue() | ast.Break():
            return True
        case ast.Return(value=value):
            return value is not None
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
            if isinstance(target, ast.Name):
                return _num_bindings(function, target.id) > 1
            is_made_here = function.name in ("__init__", "__post_init__")
            return isinstance(target, ast.Subscript) or (
                isinstance(target, ast.Attribute) and not is_made_here
            )
    return False


def _num_bindings(function: ast.AST, name: str) -> int:
    stores = sum(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        for node in ast.walk(function)
    )
    arguments = function.args
    parameters = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return stores + any(parameter.arg == name for parameter in parameters)


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    # Python 3.11 gives wrong positions inside of f-strings.
    if isinstance(node, ast.JoinedStr):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _expressions(child)


def _changes(node: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.Compare(ops=ops):
            for position, operator in enumerate(ops):
                opposite, boundary = _OPPOSITES[type(operator)], _OTHER_BOUNDARY.get(type(operator))
                yield _Change("comparison", node, node, ops, position, opposite())
                if boundary:
                    yield _Change("off-by-one", node, node, ops, position, boundary())
        case ast.BinOp(op=operator, left=left, right=right):
            other = _OTHER_ARITHMETIC.get(type(operator))
            if other and not (_is_text(left) or _is_text(right)):
                yield _Change("arithmetic", node, node, node, "op", other())
        case ast.AugAssign(op=operator, value=value):
            other = _OTHER_ARITHMETIC.get(type(operator))
            if other and not _is_text(value):
                yield _Change("arithmetic", node, node, node, "op", other())
        case ast.BoolOp(op=operator):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield _Change("boolean", node, node, node, "op", other)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            twice = ast.UnaryOp(op=ast.Not(), operand=operand)
            yield _Change("boolean", node, node, node, "operand", twice)
        case ast.Constant(value=bool(value)):
            yield _Change("constant", node, node, node, "value", not value)
        case ast.Constant(value=int(value)):
            yield _Change("constant", node, node, node, "value", value + 1)
            yield _Change("constant", node, node, node, "value", value - 1)
        case ast.Slice():
            for side in ("lower", "upper"):
                if getattr(node, side) is not None:
                    yield from _moved_bound(node, side, getattr(node, side))
        case ast.Call(func=ast.Name(id="range"), args=arguments):
            position = 0 if len(arguments) == 1 else 1
            yield from _moved_bound(arguments, position, arguments[position])


def _moved_bound(owner: object, key: str | int, bound: ast.expr) -> Iterator[_Change]:
    # A constant bound has its own mutations.
    if isinstance(bound, (ast.Constant, ast.Starred)):
        return
    for operator in (ast.Add(), ast.Sub()):
        moved = ast.BinOp(left=bound, op=operator, right=ast.Constant(1))
        yield _Change("off-by-one", bound, moved, owner, key, moved)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )
