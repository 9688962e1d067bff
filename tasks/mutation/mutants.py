"""The faults that can be planted in a source: one small change each, at one place."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from tasks.mutation.tracer.lamina_blocks import blocks_of

KINDS = {
    "condition": "a condition negated, a comparison or `and` turned, True for False",
    "sign": "plus for minus, a minus dropped",
    "scale": "a factor or divisor dropped, a constant doubled",
    "off-by-one": "an integer one higher, a range one shorter",
    "wait": "a call that waits or synchronises dropped",
    "call": "another call whose result nobody uses dropped",
}
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
# Their turned form says the same as a negation of the whole.
WHOLE = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
WAITS = {"wait", "wait_stream", "wait_event", "synchronize", "barrier", "join", "record_stream"}
# What these say is for people: no test should hold its wording.
FOR_PEOPLE = {"__repr__", "__str__", "describe", "table", "warn", "print", "info", "debug", "log"}


@dataclass(frozen=True, order=True)
class Mutant:
    """One fault: the text `before` at a place becomes `after`.

    Args:
        file: path below the layer's source directory.
        line: where it begins, from 1.
        column: bytes before it on that line.
        kind: a key of KINDS.
        function: qualified name of the function around it, "" for a module's own statements.
        block: first line of the innermost block around it; 0 for a module's own statements.
        before: what stands there.
        after: what is planted.
    """

    file: str
    line: int
    column: int
    kind: str
    function: str
    block: int
    before: str
    after: str

    @property
    def name(self) -> str:
        """Return the place and the change in one line."""
        where = f"{self.file}:{self.line}:{self.column}"
        return f"{where} {self.kind}: {one_line(self.before)} -> {one_line(self.after)}"

    def plant(self, text: str) -> str:
        """Return the source with the fault. Raises ValueError if `before` does not stand there."""
        data, before = text.encode(), self.before.encode()
        begin = sum(len(row) for row in data.splitlines(keepends=True)[: self.line - 1])
        begin += self.column
        if data[begin : begin + len(before)] != before:
            raise ValueError(f"{self.name}: the source has changed")
        return (data[:begin] + self.after.encode() + data[begin + len(before) :]).decode()


def one_line(text: str) -> str:
    """Shorten a text to one line of at most 60 characters."""
    words = " ".join(text.split())
    return words if len(words) <= 60 else words[:57] + "..."


class _Finder(ast.NodeVisitor):
    """Collects the faults of one module."""

    def __init__(self, file: str, text: str, tree: ast.Module) -> None:
        self.file = file
        self.blocks = list(blocks_of(tree))
        self.rows = text.encode().splitlines(keepends=True)
        self.data = text.encode()
        self.found: list[Mutant] = []
        self.around: list[str] = []

    # -------------------------------------------------------------------- places

    def offset(self, line: int, column: int) -> int:
        """Return a place as bytes from the beginning."""
        return sum(len(row) for row in self.rows[: line - 1]) + column

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return where a node begins and ends."""
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        begin = self.offset(node.lineno, node.col_offset)
        return begin, self.offset(end_line, end_column)

    def text(self, node: ast.expr | ast.stmt) -> str:
        """Return a node's text."""
        begin, end = self.span(node)
        return self.data[begin:end].decode()

    def add(self, kind: str, span: tuple[int, int], after: str) -> None:
        """Note a fault that replaces a span."""
        before = self.data[span[0] : span[1]].decode()
        head = self.data[: span[0]]
        line, column = head.count(b"\n") + 1, span[0] - (head.rfind(b"\n") + 1)
        around = [b for b in self.blocks if b.begin <= (line, column) < b.end]
        block = around[-1].line if around else 0  # an inner one comes after those around it
        function = ".".join(self.around)
        self.found.append(Mutant(self.file, line, column, kind, function, block, before, after))

    def between(self, left: ast.expr, right: ast.expr, kind: str, old: str, new: str) -> None:
        """Note a fault that replaces the operator `old` between two operands."""
        begin, end = self.span(left)[1], self.span(right)[0]
        middle = self.data[begin:end].decode()
        if middle.count(old) == 1:
            self.add(kind, (begin, end), middle.replace(old, new))

    # -------------------------------------------------------------------- what is left alone

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in FOR_PEOPLE or (node.name == "__getattr__" and not self.around):
            return
        self.around.append(node.name)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.around.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before = self.around
        self.around = [*before, node.name]
        for statement in node.body:
            self.visit(statement)
        self.around = before

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave out what an error says."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave out assertions: they are for bugs."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave out texts."""

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            self.visit(node.value)

    # -------------------------------------------------------------------- faults

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        self.negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def negate(self, test: ast.expr) -> None:
        turned = isinstance(test, ast.Compare) and isinstance(test.ops[0], WHOLE)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self.add("condition", self.span(test), self.text(test.operand))
        elif not turned:
            self.add("condition", self.span(test), f"not ({self.text(test)})")

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            turned = COMPARISONS[type(node.ops[0])]
            self.between(node.left, node.comparators[0], "condition", *turned)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self.between(node.values[0], node.values[1], "condition", old, new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = any(
            isinstance(x, (ast.JoinedStr, ast.List, ast.Tuple)) or is_text(x)
            for x in (node.left, node.right)
        )
        if isinstance(node.op, ast.Add) and not text:
            self.between(node.left, node.right, "sign", "+", "-")
        elif isinstance(node.op, ast.Sub):
            self.between(node.left, node.right, "sign", "-", "+")
        elif isinstance(node.op, (ast.Mult, ast.Div, ast.FloorDiv)) and not text:
            self.add("scale", self.span(node), self.text(node.left))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub):
            self.add("sign", self.span(node), self.text(node.operand))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        turned = {ast.Add: ("+=", "-="), ast.Sub: ("-=", "+=")}.get(type(node.op))
        if turned and not is_text(node.value) and not isinstance(node.value, ast.List):
            self.between(node.target, node.value, "sign", *turned)
        elif isinstance(node.op, (ast.Mult, ast.Div, ast.FloorDiv)):
            self.add("scale", self.span(node), "pass")
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add("condition", self.span(node), str(not node.value))
        elif isinstance(node.value, int):
            self.add("off-by-one", self.span(node), str(node.value + 1))
        elif isinstance(node.value, float):
            self.add("scale", self.span(node), repr(node.value * 2 or 1.0))

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Call):
            return  # a docstring, or a yield
        name = node.value.func
        last = name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")
        if last not in FOR_PEOPLE:
            self.add("wait" if last in WAITS else "call", self.span(node), "pass")
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "range" and node.args:
            last = node.args[min(1, len(node.args) - 1)]
            self.add("off-by-one", self.span(last), f"{self.text(last)} - 1")
        self.generic_visit(node)


def is_text(node: ast.expr) -> bool:
    """Whether an operand is a string."""
    return isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))


def mutants_of_text(file: str, text: str) -> list[Mutant]:
    """Return the faults of a module, each once, in the order of their places."""
    tree = ast.parse(text)
    finder = _Finder(file, text, tree)
    finder.visit(tree)
    return sorted(set(finder.found))


def mutants_of(source: Path) -> list[Mutant]:
    """Return the faults of every module below a directory."""
    found: list[Mutant] = []
    for path in sorted(source.rglob("*.py")):
        found += mutants_of_text(str(path.relative_to(source)), path.read_text())
    return found


def is_program(mutant: Mutant, text: str) -> bool:
    """Whether the source with the fault is still a program."""
    try:
        compile(mutant.plant(text), mutant.file, "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True
