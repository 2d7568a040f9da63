"""Texts that stand as literals in a Python file, read from its syntax tree. Nothing of the file is ever run."""

import ast
import re
import warnings
from collections.abc import Iterator

MOST_CHARACTERS = 16 << 20  # what a `*` may make of a text
FORM = re.compile(r"([A-Za-z_]\w*)(\(\))?((?:\[\d+\])*)")
# Texts with values put in are no constants, nor are their parts.
COMPOSED = tuple(getattr(ast, name) for name in ("JoinedStr", "TemplateStr") if hasattr(ast, name))


class LiteralFailure(ValueError):
    """An address that leads to no text; the sentence says where it ends."""


def read(source: str, address: str) -> str:
    """The text at an address in the source of a Python module.

    NAME is the text that is assigned to NAME at the top of the module, once; NAME[0][1] an entry of the tuples,
    lists or dicts assigned there (of a dict the value of its k-th entry, as they are written). NAME()[k] is the
    k-th text constant in the body of the function NAME, from 0 and in the order of the source; its docstring and
    f-strings do not count. A text is a string, several beside each other or added with +, or one of these times a
    whole number.

    Raises LiteralFailure.
    """
    match = FORM.fullmatch(address)
    if match is None:
        raise LiteralFailure(f"{address!r} is no address of a literal; write NAME, NAME[0][1] or NAME()[0]")
    name, called, steps = match[1], match[2] is not None, [int(k) for k in re.findall(r"\d+", match[3])]
    try:
        with warnings.catch_warnings(action="ignore"):  # what Python thinks of an odd escape is no matter here
            module = ast.parse(source.removeprefix("\ufeff"))
        if called:
            return _in_function(module, name, steps, address)
        return _text(_entry(_assigned(module, name), steps, address), address)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, LiteralFailure):
            raise
        raise LiteralFailure(f"{address} cannot be read: the file is no Python ({error})") from None


def _assigned(module: ast.Module, name: str) -> ast.expr:
    found = [n for n in module.body if any(isinstance(t, ast.Name) and t.id == name for t in _targets(n))]
    if len(found) != 1 or isinstance(found[0], ast.AugAssign) or found[0].value is None:
        times = "never" if not found else f"{len(found)} times" if len(found) > 1 else "not plainly"
        raise LiteralFailure(f"{name} is {times} assigned at the top of the file; once is needed")
    return found[0].value


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def _entry(node: ast.expr, steps: list[int], address: str) -> ast.expr:
    for k in steps:
        if not isinstance(node, ast.Tuple | ast.List | ast.Dict):
            raise LiteralFailure(f"{address}: [{k}] is asked of something that is no tuple, list or dict")
        entries = node.values if isinstance(node, ast.Dict) else node.elts
        unpacked = isinstance(node, ast.Dict) and None in node.keys
        if unpacked or any(isinstance(e, ast.Starred) for e in entries):
            raise LiteralFailure(
                f"{address}: what another name holds is put in with *, so entries cannot be counted"
            )
        if k >= len(entries):
            raise LiteralFailure(f"{address}: there is no entry [{k}], only {len(entries)}")
        node = entries[k]
    return node


def _text(node: ast.expr, address: str) -> str:
    value = _value(node, address)
    if not isinstance(value, str):
        raise LiteralFailure(f"{address} is no text")
    return value


def _value(node: ast.expr, address: str) -> str | int:
    if isinstance(node, ast.Constant) and type(node.value) in (str, int):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _value(node.left, address), _value(node.right, address)
        if isinstance(node.op, ast.Add) and isinstance(left, str) and isinstance(right, str):
            return left + right
        if isinstance(node.op, ast.Mult) and {type(left), type(right)} == {str, int}:
            text, times = (left, right) if isinstance(left, str) else (right, left)
            if len(text) * times > MOST_CHARACTERS:
                raise LiteralFailure(f"{address} would have {len(text) * times:,} characters, which is no prompt")
            return text * times
    raise LiteralFailure(f"{address} is computed in line {node.lineno}, and only literals are read")


def _in_function(module: ast.Module, name: str, steps: list[int], address: str) -> str:
    found = [n for n in module.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name]
    if len(found) != 1:
        times = f"{len(found)} times" if found else "nowhere"
        raise LiteralFailure(f"the function {name} is defined {times} at the top of the file; once is needed")
    if len(steps) != 1:
        raise LiteralFailure(f"{address} names no constant of the function; write {name}()[0]")
    body = found[0].body
    if ast.get_docstring(found[0], clean=False) is not None:
        body = body[1:]
    constants = [c for statement in body for c in _constants(statement)]
    constants.sort(key=lambda c: (c.lineno, c.col_offset))  # the tree is not everywhere in the order of the text
    if steps[0] >= len(constants):
        raise LiteralFailure(
            f"{address}: the function {name} has {len(constants)} text constants, none is [{steps[0]}]"
        )
    return constants[steps[0]].value


def _constants(node: ast.AST) -> Iterator[ast.Constant]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node
    elif not isinstance(node, COMPOSED):
        for child in ast.iter_child_nodes(node):
            yield from _constants(child)
