"""Mutants of a source file: copies in which one operator, number, condition or call is another.

Left out is what no test of behaviour can see: strings, annotations, imports, decorators, messages
of errors, assertions for the type checker, and `strict` of `zip`, which is an assertion too.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mod,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitXor: (ast.BitOr,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OTHER_NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "amin": "amax",
    "amax": "amin",
    "sum": "mean",
    "mean": "sum",
    "floor": "ceil",
    "sqrt": "square",
    "rsqrt": "sqrt",
    "cos": "sin",
    "ones_like": "zeros_like",
    "zeros_like": "ones_like",
}
# Calls x.name(...) of which only x stays.
DROPPED = [
    *("abs", "add_", "bitwise_and_", "bitwise_xor_", "clamp", "clone", "detach"),
    *("div_", "mul_", "round_", "square", "to"),
]
NOT_EXCHANGED = ("isinstance", "larger", "max", "min", "promote_types", "smaller", "transpose")
SKIPPED_FIELDS = ("annotation", "returns", "decorator_list")
SKIPPED = (ast.Import, ast.ImportFrom, ast.Raise, ast.Assert, ast.expr_context)


@dataclass(frozen=True)
class Mutant:
    """A changed source: the function and the statement as it is now, and its lines."""

    key: str
    lines: range
    in_function: bool  # else any test may see it, as others import constants
    code: CodeType


@dataclass(frozen=True)
class Site:
    """A node that may change, and where it stands."""

    node: ast.AST
    parent: ast.AST
    field: str
    index: int | None  # in a field that is a list
    statement: ast.stmt
    scope: str
    in_function: bool

    def put(self, node: ast.AST) -> None:
        """Set what stands at this place."""
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


def unchanged_of(source: str, path: str) -> Mutant:
    """A mutant in which nothing is changed."""
    return Mutant("unchanged", range(0), False, compile(source, path, "exec"))


def mutants_of(source: str, path: str) -> list[Mutant]:
    """All mutants of a source, in its order."""
    tree = ast.parse(source)
    found = []
    for site in list(_sites(tree)):
        for replacement in _replacements(site):
            site.put(replacement)
            code = compile(ast.fix_missing_locations(tree), path, "exec")
            key = f"{site.scope or 'module'}: {_described(site, replacement)}"
            found.append(Mutant(key, _lines(site.statement), site.in_function, code))
            site.put(site.node)
    return found


def _sites(node: ast.AST, inside: Site | None = None, scope: str = "") -> Iterator[Site]:
    """The nodes below `node` that may change."""
    in_function = inside is not None and inside.in_function
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        scope, in_function = f"{scope}.{node.name}".strip("."), isinstance(node, ast.FunctionDef)
    for field, index, child in _children(node):
        if isinstance(child, ast.stmt):
            statement = child
        else:
            assert inside is not None  # a file has only statements
            statement = inside.statement
        # A default is set where the function is defined.
        own = in_function and not (isinstance(node, ast.FunctionDef) and field == "args")
        site = Site(child, node, field, index, statement, scope, own)
        yield site
        yield from _sites(child, site, scope)


def _children(node: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    """Field, index in a field that is a list, and node."""
    for field, value in ast.iter_fields(node):
        if field not in SKIPPED_FIELDS:
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(child, ast.AST) and not _is_skipped(node, child):
                    yield field, index if isinstance(value, list) else None, child


def _is_skipped(parent: ast.AST, node: ast.AST) -> bool:
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    # A union of types at the top of a file.
    is_top = isinstance(parent, ast.Module) and isinstance(node, ast.Assign)
    return isinstance(node, SKIPPED) or (is_top and "|" in ast.unparse(node))


def _described(site: Site, replacement: ast.AST) -> str:
    """The first line of the changed statement, or the call that is left out."""
    if isinstance(replacement, ast.Pass):
        return f"without {ast.unparse(site.node)}"
    return ast.unparse(site.statement).splitlines()[0]


def _lines(statement: ast.stmt) -> range:
    """Those of a statement, without the block of an `if` or a loop."""
    body = getattr(statement, "body", None)
    if body and not isinstance(statement, ast.FunctionDef):
        return range(statement.lineno, max(statement.lineno + 1, body[0].lineno))
    return range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)


def _replacements(site: Site) -> Iterator[ast.AST]:
    node = site.node
    for other in OPERATORS.get(type(node), ()):
        yield other()
    if isinstance(node, ast.Constant):
        yield from _constants(node.value)
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        yield ast.BinOp(node.right, node.op, node.left)
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    if site.field in ("test", "ifs") and not _has_opposite(node):
        yield ast.UnaryOp(ast.Not(), node)  # type: ignore[arg-type]


def _has_opposite(condition: ast.AST) -> bool:
    """Whether another replacement negates a condition already."""
    is_single = isinstance(condition, ast.Compare) and len(condition.ops) == 1
    return is_single or isinstance(condition, ast.UnaryOp)


def _constants(value: object) -> Iterator[ast.AST]:
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        yield ast.Constant(value + 1)
    elif isinstance(value, float):
        yield ast.Constant(2.0 * value or 1.0)


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    """Another function, another bound, the bare receiver, or two arguments exchanged."""
    function, name = node.func, ""
    if isinstance(function, ast.Name):
        name = function.id
        if name in OTHER_NAMES:
            yield ast.Call(ast.Name(OTHER_NAMES[name], ast.Load()), node.args, node.keywords)
    elif isinstance(function, ast.Attribute):
        name = function.attr
        if name in OTHER_NAMES:
            other = ast.Attribute(function.value, OTHER_NAMES[name], ast.Load())
            yield ast.Call(other, node.args, node.keywords)
        if name in DROPPED:
            yield function.value
    for index, keyword in enumerate(node.keywords):
        if keyword.arg in ("min", "max"):
            changed = [copy.copy(each) for each in node.keywords]
            changed[index].arg = OTHER_NAMES[keyword.arg]
            yield ast.Call(function, node.args, changed)
    first = 1 if name == "where" else 0
    args = list(node.args)
    is_named = any(isinstance(arg, ast.Constant) and isinstance(arg.value, str) for arg in args)
    if len(args) >= first + 2 and not is_named and name not in NOT_EXCHANGED:
        args[first], args[first + 1] = args[first + 1], args[first]
        if ast.dump(args[first]) != ast.dump(args[first + 1]):
            yield ast.Call(function, args, node.keywords)
