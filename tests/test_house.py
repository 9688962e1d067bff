"""The plan of the house, counted: folders, floors, circles, satellites, faces, words, docstrings.

A rule is a function from a `House` (the texts of all modules) to complaints, one string each.
`EXCEPTIONS` names what does not keep a rule yet; one that is no longer needed fails as well, so
that the list only shrinks. The tests at the end show each rule planted sources that break it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

import pytest
from source_trees import (
    LAYERS,
    ROOT,
    lamina_imports,
    names_of,
    nodes_of,
    public_face,
    source_of,
    sub_faces,
    tree_of,
)

# The floors of each layer from the ground up: its folders, and the files beside them. A floor
# imports only from those before it.
FLOORS = {
    "mesh": "errors arguments roles launching watching groups rng runtime",
    "buffers": "compat storage_access layout placement resolve_axes tensors flat_buffer pool",
    "collectives": "compat transport call reduction move autograd_regions",
    "ddp": """
        compat parameters gradients group inspect backward execution finalize monitor norm optimizer
        wrapper
    """,
    "fsdp": "compat settings units weights debugging state module api check bridges",
    "models": """
        compat base invariance precision layers moe attention mamba decoder activation_memory
        transformers_plan torch_plan huggingface vision pipelining parallel_types bisection bisect
        plan
    """,
    "checkpoint": """
        compat errors progress storage ranks state save load manager preemption huggingface
        inspection plain_dcp
    """,
}
FACE_FILES = ("__init__", "engine", "__main__")

MOST_FILES, USUAL_FILES = 12, 9
SMALL_FILE = 75

# File names that several layers have, as they mean the same thing in each.
SHARED_NAMES = {
    "__init__": "what a package shows",
    "__main__": "what `python -m` runs",
    "engine": "what a layer shows to upper layers",
    "compat": "what a layer takes from torch that torch does not promise",
    "errors": "the exceptions that a layer raises",
    "config": "the settings that a user writes",
    "inspection": "what a user may look at",
}


@dataclass
class House:
    """All modules: `sources` by path (`ddp/group/group.py`), `pages` by path, and the words."""

    sources: Mapping[str, str]
    pages: Mapping[str, str] = field(default_factory=dict)
    terms: Collection[str] = ()
    dead_words: Collection[str] = ()

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {path: tree_of(source) for path, source in self.sources.items()}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """The files of the house that each file imports, within functions and for types too."""
        modules = {module_of(path): path for path in self.sources}
        found: dict[str, set[str]] = {path: set() for path in self.sources}
        for path, tree in self.trees.items():
            for _, module, name in lamina_imports(tree):
                for target in (f"{module}.{name}", module):
                    if target in modules:
                        found[path] |= {modules[target]} - {path}
                        break
        return found

    def definitions(self) -> Iterator[tuple[str, str]]:
        """Yield (path, name) of modules, folders, classes, functions, methods and attributes."""
        for path, tree in self.trees.items():
            yield from ((path, word) for word in PurePosixPath(path).with_suffix("").parts[1:])
            for node in nodes_of(tree):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield path, node.name
                targets = node.targets if isinstance(node, ast.Assign) else []
                targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
                for target in targets:
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                        yield path, target.attr
                fields = node.body if isinstance(node, ast.ClassDef) else []
                for line in fields:
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                        yield path, line.target.id

    def local_names(self) -> Iterator[tuple[str, str]]:
        """Yield (path, name) of parameters and of variables, wherever they are assigned."""
        for path, tree in self.trees.items():
            for node in nodes_of(tree):
                if isinstance(node, ast.arg):
                    yield path, node.arg
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield path, node.id
                elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
                    yield from [(path, node.name)] if node.name else []


def module_of(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(("lamina", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def folder_of(path: str) -> str:
    return str(PurePosixPath(path).parent)


def room_of(path: str) -> str:
    """The folder of a file; a file beside a layer's folders is a room by itself."""
    return path if path.count("/") == 1 else folder_of(path)


def stem_of(path: str) -> str:
    return PurePosixPath(path).stem


def is_face(path: str) -> bool:
    """Whether the file only shows names: `__init__.py`, and a layer's own `engine.py`."""
    layer_file = path.count("/") == 1
    return stem_of(path) == "__init__" or (layer_file and stem_of(path) in FACE_FILES)


def words_of(name: str) -> list[str]:
    """The words of a name in lower case: `TensorRegion` and `tensor_region` have two."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def circle_in(edges: Mapping[str, Collection[str]]) -> list[str]:
    """Return nodes of which each is followed by one that it leads to, or no nodes."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        found: list[str] = error.args[1][::-1]
        return found
    return []


def circles(graph: Mapping[str, Collection[str]]) -> Iterator[list[str]]:
    """Yield one circle of the graph at a time, each without the edges that began those before."""
    edges = {node: sorted(others) for node, others in sorted(graph.items())}
    while circle := circle_in(edges):
        yield circle
        edges[circle[0]].remove(circle[1])


# ------------------------------------------------------------------------ floors


def folders_are_rooms_enough(house: House) -> Iterator[str]:
    """At most twelve files in a folder, and at most nine in four of five folders."""
    counts = Counter(folder_of(path) for path in house.sources if not is_face(path))
    for folder, count in counts.items():
        if count > MOST_FILES:
            yield f"{folder}: {count} files, {MOST_FILES} at most"
    large = [folder for folder, count in counts.items() if count > USUAL_FILES]
    if len(large) * 5 > len(counts):
        yield f"{', '.join(large)}: too many folders above {USUAL_FILES} files"


def imports_run_downward(house: House) -> Iterator[str]:
    for path, others in house.imports.items():
        layer = path.split("/")[0]
        if layer not in FLOORS or is_face(path):
            continue
        floors = FLOORS[layer].split()
        own = floor_of(path)
        if own not in floors:
            yield f"{path}: {own} is no floor of {layer}; give it a place in FLOORS"
            continue
        for other in sorted(others):
            its = floor_of(other)
            if other.startswith(f"{layer}/") and (
                its not in floors or floors.index(its) > floors.index(own)
            ):
                yield f"{path}: {own} imports {other} from above"


def floor_of(path: str) -> str:
    return PurePosixPath(path).with_suffix("").parts[1]


def files_form_no_circle(house: House) -> Iterator[str]:
    for circle in circles(house.imports):
        yield " -> ".join(circle)


def folders_form_no_circle(house: House) -> Iterator[str]:
    graph: dict[str, set[str]] = defaultdict(set)
    for path, others in house.imports.items():
        known = path.split("/")[0] in FLOORS
        if known and not is_face(path):  # a face may show what lies on a higher floor
            graph[room_of(path)] |= {room_of(other) for other in others} - {room_of(path)}
    for circle in circles(graph):
        yield " -> ".join(circle)


def no_small_file_serves_one_sibling(house: House) -> Iterator[str]:
    """A face is no user: what one sibling and a face import, or a face alone, is small as well."""
    users: dict[str, set[str]] = {path: set() for path in house.sources}
    for path, others in house.imports.items():
        for other in others:
            users[other].add(path)
    for path, all_users in users.items():
        lines = len(house.sources[path].splitlines())
        if lines >= SMALL_FILE or is_face(path) or not all_users:
            continue
        own = [user for user in all_users if not is_face(user)]
        if not own:
            yield f"{path}: {lines} lines that a face alone shows; merge them into a sibling"
        elif len(own) == 1 and folder_of(own[0]) == folder_of(path):
            yield f"{path}: {lines} lines for {stem_of(own[0])} alone; merge them"


# ------------------------------------------------------------------------ faces


def faces_alone_list_names(house: House) -> Iterator[str]:
    """A face has an `__all__`. In another file an underscore says what is the file's own."""
    doors = {f"{layer}/{room}" for layer in LAYERS for room in sub_faces(layer).values()}
    for path, tree in house.trees.items():
        listed = public_face(house.sources[path])
        if is_face(path) or path in doors:
            holds = [node for node in tree.body if not isinstance(node, ast.Expr)]
            if holds and not listed and stem_of(path) != "__main__":
                yield f"{path}: no __all__"
        elif listed and not listed & set(names_of(tree)):
            yield f"{path}: an __all__ of its own names; an underscore says what is not for others"


def code_of(page: str, text: str) -> str:
    """What of a page is code: all of a program; of Markdown, what stands in backticks."""
    if not page.endswith(".md"):
        return text
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL))


def public_names_are_for_users(house: House) -> Iterator[str]:
    """What no example, page or README names is for upper layers: it belongs into `engine`."""
    written = "\n".join(code_of(page, text) for page, text in house.pages.items())
    known = set(re.findall(r"\w+", written))
    for layer in LAYERS:
        engine = public_face(house.sources.get(f"{layer}/engine.py", ""))
        for room in ("__init__.py", *sub_faces(layer).values()):
            face = f"{layer}/{room}".removesuffix(".py").removesuffix("/__init__")
            shown = public_face(house.sources.get(f"{layer}/{room}", ""))
            for name in sorted(shown - known):
                yield f"{face}: {name} is in no example, page or README; move it to {layer}.engine"
            for name in sorted(shown & engine):
                yield f"{face}: {name} is in {layer}.engine as well"


# ------------------------------------------------------------------------ words


def file_names_mean_one_thing(house: House) -> Iterator[str]:
    layers = defaultdict(set)
    for path in house.sources:
        if stem_of(path) not in SHARED_NAMES:
            layers[stem_of(path)].add(path.split("/")[0])
    for stem, owners in layers.items():
        if len(owners) > 1:
            yield f"{stem}.py: in {' and '.join(sorted(owners))}"


def forms_of(word: str) -> tuple[list[str], list[str]]:
    """The words of a term or a dead word, in the singular and in the plural."""
    *front, last = words_of(word)
    return [*front, last], [*front, f"{last}s"]


def holds_words(name: list[str], word: list[str]) -> bool:
    return any(name[i : i + len(word)] == word for i in range(len(name)))


# What would fit any value says nothing of this one: a name says what was found, or is held.
SAY_NOTHING = ("=found", "=held", "=one", "=told", "=anew", "=meant")
# Dead words that parameters and variables may have, where they mean what they mean in English.
PLAIN_ENGLISH = {"place", "part", "region", "rest", "lines"}


def with_words(names: Iterator[tuple[str, str]], refused: Collection[str]) -> Iterator[str]:
    """Yield the names that hold a word; with `=` before the word, those that are just that word.

    The words `in_place` (PyTorch's) and `at_rest` (of a module) are other words.
    """
    forms = [(word.startswith("="), form) for word in refused for form in forms_of(word)]
    for path, name in sorted(set(names)):
        words = words_of(re.sub(r"in_place|at_rest", "", name))
        if any(words == form if whole else holds_words(words, form) for whole, form in forms):
            yield f"{path}: {name}"


def dead_words_stay_dead(house: House) -> Iterator[str]:
    """A dead word is no part of a name. With `=` before it, it only may not be the whole name.

    `PLAIN_ENGLISH` is dead in definitions alone: some 150 variables are the `place` of a rank in a
    group, a `part` of a sum or the `rest` of a list, and are called so.
    """
    yield from with_words(house.definitions(), house.dead_words)
    of_locals = [word for word in house.dead_words if word.lstrip("=") not in PLAIN_ENGLISH]
    yield from with_words(house.local_names(), of_locals)


def names_say_the_thing(house: House) -> Iterator[str]:
    """No function, attribute, parameter or variable is called by a word of `SAY_NOTHING` alone."""
    yield from with_words(house.definitions(), SAY_NOTHING)
    yield from with_words(house.local_names(), SAY_NOTHING)


def terms_are_in_use(house: House) -> Iterator[str]:
    """What the glossary explains is a name of a module, class, function, attribute or argument."""
    names = {tuple(words_of(name)) for _, name in house.definitions()}
    nodes = (node for tree in house.trees.values() for node in nodes_of(tree))
    names |= {tuple(words_of(node.arg)) for node in nodes if isinstance(node, ast.arg)}
    for term in house.terms:
        if not any(holds_words(list(name), form) for name in names for form in forms_of(term)):
            yield f"glossary: {term}"


def docstrings_are_in_one_style(house: House) -> Iterator[str]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for path, tree in house.trees.items():
        for node in nodes_of(tree):
            if not isinstance(node, documented) or not (text := ast.get_docstring(node, False)):
                continue
            name = getattr(node, "name", "the module")
            if "``" in text.replace("```", ""):
                yield f"{path}: {name} has double backticks"
            if re.search(r"\n[ \t]*\n[ \t]*$", text):
                yield f"{path}: {name} has a blank line before its closing quotes"


# ------------------------------------------------------------------------ states

# The layers whose classes are counted, what a class may have, and who stores to itself alone.
COUNTED = ("mesh", "buffers", "collectives", "ddp", "fsdp")
ENGINE = ("ddp", "fsdp")
MOST_ATTRIBUTES, MOST_METHODS = 15, 25
# What torch and Python have no other way to set than a store from outside.
THEIR_ATTRIBUTES = {"grad", "data", "grad_dtype", "__class__", "__name__", "__doc__"}
THEIR_ATTRIBUTES |= {"__signature__"}


def attributes_of(cls: ast.ClassDef) -> set[str]:
    """What the methods of a class store to `self`, and the fields that it declares."""
    stored = {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    fields = (line.target for line in cls.body if isinstance(line, ast.AnnAssign))
    return stored | {field.id for field in fields if isinstance(field, ast.Name)}


def classes_do_one_thing(house: House) -> Iterator[str]:
    """At most 15 attributes and 25 methods; the settings of a user, a dataclass, set aside."""
    for path, tree in house.trees.items():
        for cls in nodes_of(tree):
            if not isinstance(cls, ast.ClassDef) or path.split("/")[0] not in COUNTED:
                continue
            if any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list):
                continue
            methods = {f.name for f in cls.body if isinstance(f, ast.FunctionDef)}
            attributes = attributes_of(cls)
            if len(attributes) > MOST_ATTRIBUTES or len(methods) > MOST_METHODS:
                yield f"{path}: {cls.name} has {len(attributes)} attributes, {len(methods)} methods"


def objects_store_to_themselves(house: House) -> Iterator[str]:
    """Nobody stores to another object's attributes: that object has a method for it.

    Attributes of torch and Python that have no method are set aside, and so is the context of an
    autograd function, which torch makes for that.
    """
    for path, tree in house.trees.items():
        for node in nodes_of(tree) if path.split("/")[0] in ENGINE else ():
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "ctx") and node.attr not in THEIR_ATTRIBUTES:
                yield f"{path}: {owner}.{node.attr}"


RULES: dict[str, Callable[[House], Iterator[str]]] = {
    rule.__name__: rule
    for rule in (
        folders_are_rooms_enough,
        imports_run_downward,
        files_form_no_circle,
        folders_form_no_circle,
        no_small_file_serves_one_sibling,
        faces_alone_list_names,
        public_names_are_for_users,
        file_names_mean_one_thing,
        dead_words_stay_dead,
        names_say_the_thing,
        terms_are_in_use,
        docstrings_are_in_one_style,
        classes_do_one_thing,
        objects_store_to_themselves,
    )
}

# What does not keep a rule yet: complaints without what follows. Take out what is done.
EXCEPTIONS: dict[str, list[str]] = {
    "objects_store_to_themselves": [
        "fsdp/check.py: parser.formatter_class",  # argparse has no other way for a subparser
    ],
}


# ------------------------------------------------------------------------ the packages comply


def glossary() -> tuple[list[str], list[str]]:
    """Return the terms and the dead words of the table "Words" in docs/index.md."""
    text = (ROOT / "docs" / "index.md").read_text()
    table = text[text.index("## Words") : text.index("## Laws")]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    terms = [term.strip("` ") for row in rows[2:] for term in row[0].split(",")]
    dead = [
        "=" * bool(alone) + word
        for row in rows[2:]
        for word, alone in re.findall(r"`([^`]+)`( alone)?", (*row, "", "")[2])
    ]
    return terms, dead


@pytest.fixture(scope="module")
def house() -> House:
    sources = {
        f"{layer}/{path.relative_to(source_of(layer)).as_posix()}": path.read_text()
        for layer in LAYERS
        for path in sorted(source_of(layer).rglob("*.py"))
    }
    patterns = ("README.md", "packages/*/README.md", "docs/*.md", "examples/**/*.md")
    pages = [path for pattern in (*patterns, "examples/**/*.py") for path in ROOT.glob(pattern)]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in pages}
    return House(sources, texts, *glossary())


def is_excused(complaint: str, exception: str) -> bool:
    """Whether the complaint begins with the exception, up to the end of a word."""
    return re.match(rf"{re.escape(exception)}(?!\w)", complaint) is not None


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps(rule, house):
    found = list(RULES[rule](house))
    excused = EXCEPTIONS.get(rule, [])
    wrong = [text for text in found if not any(is_excused(text, by) for by in excused)]
    needless = [by for by in excused if not any(is_excused(text, by) for text in found)]
    assert not wrong, "\n" + "\n".join(wrong)
    assert not needless, f"these exceptions are no longer needed: {needless}"


def test_exceptions_are_to_rules():
    assert set(EXCEPTIONS) <= set(RULES)


# ------------------------------------------------------------------------ the rules can see


def planted(**files: str) -> dict[str, str]:
    """Sources by path: `ddp__group="..."` is the file ddp/group.py."""
    return {f"{name.replace('__', '/')}.py": text for name, text in files.items()}


def folder(layer_folder: str, count: int) -> dict[str, str]:
    return {f"{layer_folder}/file{i}.py": "" for i in range(count)}


LONG = "x = 1\n" * SMALL_FILE
IMPORT = "from lamina.ddp.{} import x\n"
SHOWN = "__all__ = ['shown']\n"

# A rule, what breaks it, and a part of the complaint.
PLANTED: dict[str, tuple[str, House, str]] = {
    "class of 26 methods": (
        "classes_do_one_thing",
        House(planted(ddp__a="class A:\n" + "".join(
            f"    def f{i}(self): ...\n" for i in range(26)
        ))),
        "ddp/a.py: A has 0 attributes, 26 methods",
    ),
    "class of 16 attributes": (
        "classes_do_one_thing",
        House(planted(fsdp__a="class A:\n    def f(self):\n" + "".join(
            f"        self.a{i} = 0\n" for i in range(16)
        ))),
        "fsdp/a.py: A has 16 attributes, 1 methods",
    ),
    "store to another object": (
        "objects_store_to_themselves",
        House(planted(ddp__a="def f(unit):\n    unit.state, x = 1, 2")),
        "ddp/a.py: unit.state",
    ),
    "folder of thirteen": (
        "folders_are_rooms_enough", House(folder("ddp/group", 13)), "ddp/group: 13 files",
    ),
    "large folders all over": (
        "folders_are_rooms_enough",
        House(folder("ddp/group", 10) | folder("ddp/norm", 10) | folder("ddp/inspect", 2)),
        "ddp/group, ddp/norm: too many",
    ),
    "import from above": (
        "imports_run_downward",
        House(planted(ddp__group__a=IMPORT.format("norm.b"), ddp__norm__b="")),
        "ddp/group/a.py: group imports ddp/norm/b.py",
    ),
    "import from above in a function": (
        "imports_run_downward",
        House(planted(
            ddp__group__a="def f():\n    from lamina.ddp.norm import b", ddp__norm__b="",
        )),
        "ddp/group/a.py",
    ),
    "import from above for types": (
        "imports_run_downward",
        House(planted(
            ddp__group__a="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
            + IMPORT.format("norm.b"),
            ddp__norm__b="",
        )),
        "ddp/group/a.py",
    ),
    "import of the layer's own face": (
        "imports_run_downward",
        House(planted(ddp__group__a=IMPORT.format("engine"), ddp__engine="")),
        "ddp/group/a.py: group imports ddp/engine.py",
    ),
    "folder without a floor": (
        "imports_run_downward", House(planted(ddp__misc__a="")), "misc is no floor of ddp",
    ),
    "circle of files": (
        "files_form_no_circle",
        House(planted(
            ddp__group__a=IMPORT.format("group.b"),
            ddp__group__b=IMPORT.format("group.c"),
            ddp__group__c="def f():\n    import lamina.ddp.group.a",
        )),
        "ddp/group/a.py -> ddp/group/b.py -> ddp/group/c.py -> ddp/group/a.py",
    ),
    "circle of folders": (
        "folders_form_no_circle",
        House(planted(
            ddp__group__a=IMPORT.format("norm.a"),
            ddp__norm__a="",
            ddp__norm__b=IMPORT.format("group.b"),
            ddp__group__b="",
        )),
        "ddp/group -> ddp/norm -> ddp/group",
    ),
    "circle of a folder and one within it": (
        "folders_form_no_circle",
        House(planted(
            models__base__a="from lamina.models.base.configs import b\n",
            models__base__configs__b="",
            models__base__configs__c="from lamina.models.base.d import x\n",
            models__base__d="",
        )),
        "models/base -> models/base/configs -> models/base",
    ),
    "satellite": (
        "no_small_file_serves_one_sibling",
        House(planted(ddp__group__a=IMPORT.format("group.b"), ddp__group__b="x = 1")),
        "ddp/group/b.py: 1 lines for a alone",
    ),
    "satellite that a face shows as well": (
        "no_small_file_serves_one_sibling",
        House(planted(
            ddp__group__a=IMPORT.format("group.b"),
            ddp__group__b="x = 1",
            ddp__engine=IMPORT.format("group.b"),
        )),
        "ddp/group/b.py: 1 lines for a alone",
    ),
    "satellite that a face alone shows": (
        "no_small_file_serves_one_sibling",
        House(planted(ddp__group__b="x = 1", ddp__engine=IMPORT.format("group.b"))),
        "ddp/group/b.py: 1 lines that a face alone shows",
    ),
    "face without __all__": (
        "faces_alone_list_names", House(planted(ddp__engine="def f(): ...")), "ddp/engine.py: no",
    ),
    "module with an __all__ of its own names": (
        "faces_alone_list_names",
        House(planted(ddp__group__a="__all__ = ['f']\ndef f(): ...")), "ddp/group/a",
    ),
    "public name that nothing names": (
        "public_names_are_for_users",
        House({"ddp/__init__.py": SHOWN}, {"docs/ddp.md": "it is shown `hidden`"}),
        "ddp: shown is in no example",
    ),
    "name of a sub-face that nothing names": (
        "public_names_are_for_users",
        House({"models/moe/__init__.py": SHOWN}),
        "models/moe: shown is in no example",
    ),
    "name on both faces": (
        "public_names_are_for_users",
        House({"ddp/__init__.py": SHOWN, "ddp/engine.py": SHOWN}, {"examples/a.py": "shown"}),
        "ddp: shown is in ddp.engine as well",
    ),
    "file name in two layers": (
        "file_names_mean_one_thing",
        House(planted(ddp__group__casting="", fsdp__units__casting="")),
        "casting.py: in ddp and fsdp",
    ),
    "dead word in an attribute": (
        "dead_words_stay_dead",
        House(
            planted(ddp__a="class A:\n  def f(self):\n    self.last_seen = 1"), {}, (), ("seen",),
        ),
        "ddp/a.py: last_seen",
    ),
    "dead word in a field": (
        "dead_words_stay_dead",
        House(planted(ddp__a="class A:\n    rest: int"), {}, (), ("rest",)),
        "ddp/a.py: rest",
    ),
    "dead word in a class, in the plural": (
        "dead_words_stay_dead",
        House(planted(ddp__a="class StandIns: ..."), {}, (), ("stand_in",)),
        "ddp/a.py: StandIns",
    ),
    "dead word as a file": (
        "dead_words_stay_dead",
        House(planted(ddp__seen=""), {}, (), ("seen",)),
        "ddp/seen.py: seen",
    ),
    "word that is dead alone": (
        "dead_words_stay_dead",
        House(planted(ddp__a="def _parts(): ..."), {}, (), ("=part",)),
        "ddp/a.py: _parts",
    ),
    "dead word in a variable": (
        "dead_words_stay_dead",
        House(planted(ddp__a="def f(x):\n    last_seen = x"), {}, (), ("seen",)),
        "ddp/a.py: last_seen",
    ),
    "parameter that says nothing": (
        "names_say_the_thing", House(planted(ddp__a="def f(held): ...")), "ddp/a.py: held",
    ),
    "variable that says nothing": (
        "names_say_the_thing", House(planted(ddp__a="def f():\n    found = 1")), "ddp/a.py: found",
    ),
    "variable of a loop that says nothing": (
        "names_say_the_thing", House(planted(ddp__a="for _, told in (): ...")), "ddp/a.py: told",
    ),
    "variable of a comprehension that says nothing": (
        "names_say_the_thing", House(planted(ddp__a="x = [one for one in ()]")), "ddp/a.py: one",
    ),
    "capture that says nothing": (
        "names_say_the_thing",
        House(planted(ddp__a="match 1:\n    case int() as meant: ...")),
        "ddp/a.py: meant",
    ),
    "private method that says nothing": (
        "names_say_the_thing",
        House(planted(ddp__a="class A:\n  def _held(self): ...")),
        "ddp/a.py: _held",
    ),
    "field that says nothing": (
        "names_say_the_thing", House(planted(ddp__a="class A:\n    anew: str")), "ddp/a.py: anew",
    ),
    "term that nothing bears": (
        "terms_are_in_use",
        House(planted(ddp__a="def bucket_size(): ..."), {}, ("bucket", "slot")),
        "glossary: slot",
    ),
    "double backticks": (
        "docstrings_are_in_one_style",
        House(planted(ddp__a='def f():\n    """Return ``x``."""')),
        "f has double backticks",
    ),
    "blank line before closing quotes": (
        "docstrings_are_in_one_style",
        House(planted(ddp__a='class A:\n    """One.\n\n    Two.\n\n    """')),
        "A has a blank line",
    ),
}  # fmt: skip

ALLOWED: dict[str, tuple[str, House]] = {
    "folder of twelve among small ones": (
        "folders_are_rooms_enough",
        House(folder("ddp/a", 12) | {f"ddp/{letter}/a.py": "" for letter in "bcde"}),
    ),
    "import from below": (
        "imports_run_downward",
        House(planted(ddp__norm__a=IMPORT.format("group.b"), ddp__group__b="")),
    ),
    "face that shows a higher floor": (
        "imports_run_downward",
        House(planted(ddp__engine=IMPORT.format("norm.a"), ddp__norm__a="")),
    ),
    "small file with two users": (
        "no_small_file_serves_one_sibling",
        House(planted(ddp__a__b="", ddp__a__c="", ddp__a__d="from lamina.ddp.a import b, c")
              | planted(ddp__a__e="from lamina.ddp.a import b, c")),
    ),
    "small file for another folder": (
        "no_small_file_serves_one_sibling",
        House(planted(ddp__a__b="", ddp__c__d="from lamina.ddp.a import b")),
    ),
    "large file with one user": (
        "no_small_file_serves_one_sibling",
        House(planted(ddp__a__b=LONG, ddp__a__d="from lamina.ddp.a import b")),
    ),
    "module that shows another's names": (
        "faces_alone_list_names",
        House(planted(ddp__group__a="from x import f\n__all__ = ['f']")),
    ),
    "folder marker without __all__": (
        "faces_alone_list_names", House({"ddp/a/__init__.py": '"""What this folder is."""'}),
    ),
    "public name on a page": (
        "public_names_are_for_users",
        House({"ddp/__init__.py": SHOWN}, {"docs/ddp.md": "call `shown(x)`"}),
    ),
    "public name in an example": (
        "public_names_are_for_users", House({"ddp/__init__.py": SHOWN}, {"examples/a.py": SHOWN}),
    ),
    "other words": (
        "dead_words_stay_dead",
        House(
            planted(ddp__a="def restore(at_rest, in_place): ...\ndef tensor_part(): ...\n"
                    "def put_in_place(): ..."),
            {}, (), ("rest", "place", "=part"),
        ),
    ),
    "variable in plain English": (
        "dead_words_stay_dead",
        House(planted(ddp__a="def f(part):\n    first, *rest = part"), {}, (), ("rest", "=part")),
    ),
    "names that say the thing": (
        "names_say_the_thing",
        House(planted(ddp__a="def f(held_bytes, other):\n    for one_rank in other: ...")),
    ),
    "term as a part of a name": (
        "terms_are_in_use", House(planted(ddp__a="def f(buckets): ..."), {}, ("bucket",)),
    ),
    "settings of many fields": (
        "classes_do_one_thing",
        House(planted(ddp__a="@dataclass(frozen=True)\nclass A:\n" + "".join(
            f"    a{i}: int\n" for i in range(16)
        ))),
    ),
    "stores that have no other way": (
        "objects_store_to_themselves",
        House(planted(ddp__a="class A:\n    def f(self, p):\n        self.a = p.grad = None")),
    ),
    "code block and single backticks": (
        "docstrings_are_in_one_style",
        House(planted(ddp__a='def f():\n    """Call `f`.\n\n    ```\n    f()\n    ```\n    """')),
    ),
}  # fmt: skip


def test_every_rule_has_a_planted_case():
    assert {rule for rule, _, _ in PLANTED.values()} == set(RULES)


@pytest.mark.parametrize("name", PLANTED)
def test_a_rule_sees(name):
    rule, house, part = PLANTED[name]
    assert any(part in text for text in RULES[rule](house)), list(RULES[rule](house))


@pytest.mark.parametrize("name", ALLOWED)
def test_a_rule_allows(name):
    rule, house = ALLOWED[name]
    assert not list(RULES[rule](house))
