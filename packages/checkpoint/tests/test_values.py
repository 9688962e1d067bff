from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.checkpoint import CheckpointError, CheckpointManager
from lamina.checkpoint.state.json_values import decode, encode

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.sampled_from([torch.float32, torch.bfloat16, torch.int64])
    | st.floats().map(np.float64)
    | st.floats(width=32).map(np.float32)
    | st.integers(-9, 9).map(np.int16)
    | st.binary().map(bytearray)
)
KEYS = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(KEYS, st.integers(), max_size=4).map(Counter)
        | st.sets(st.integers() | st.text(), max_size=4)
        | st.frozensets(st.integers(), max_size=4)
    ),
    max_leaves=20,
)


def same(a: object, b: object) -> bool:
    """Equal with types, where NaN equals NaN and 0.0 differs from -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(
            same(x, y) for x, y in zip(a.values(), b.values(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (float, np.floating)):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return a == b


@settings(max_examples=300, deadline=None)
@given(TREES)
def test_any_plain_value_comes_back_with_type_and_bits(value):
    text = json.dumps(encode(value, ("x",), {}), allow_nan=False)
    assert same(decode(json.loads(text), pytest.fail), value)


def test_tensors_leave_the_tree_and_come_back_to_their_places():
    a, b = torch.arange(3), torch.ones(2, 2)
    tree = {"a": [a, 1], 7: {"b": b}}
    tensors: dict[tuple[str, ...], torch.Tensor] = {}
    encoded = json.loads(json.dumps(encode(tree, ("x",), tensors)))
    assert set(tensors) == {("x", "a", "0"), ("x", "7", "b")}
    by_name = {".".join(path): tensor for path, tensor in tensors.items()}
    back = decode(encoded, by_name.__getitem__)
    assert back["a"][0] is a
    assert back[7]["b"] is b
    assert back["a"][1] == 1


def test_a_value_that_needs_pickle_is_refused_with_its_place():
    with pytest.raises(TypeError, match=r"'x\.a\.1' is a builtins\.object"):
        encode({"a": [0, object()]}, ("x",), {})


class Kind(str, enum.Enum):  # noqa: UP042
    A = "a"


@pytest.mark.parametrize(
    "value", [Kind.A, enum.IntEnum("Two", "B").B, namedtuple("Pair", "x y")(1, 2), defaultdict(int)]
)
def test_what_would_come_back_as_a_plainer_class_is_refused_with_its_place(value):
    with pytest.raises(TypeError, match=rf"'x\.1' is a .*\.{type(value).__name__}, .*plain"):
        encode([0, value], ("x",), {})
    with pytest.raises(TypeError, match=r"'x' has a tensor for a key"):
        encode({torch.zeros(1): 1}, ("x",), {})


def test_a_string_of_another_class_is_stored_as_what_it_says():
    text = encode({"torch": torch.__version__, np.str_("a"): np.str_("b")}, ("x",), {})
    assert same(
        decode(json.loads(json.dumps(text)), pytest.fail),
        {"torch": f"{torch.__version__}", "a": "b"},
    )


def test_a_user_key_that_looks_like_a_tag_stays_a_key():
    value = {"$tensor": "x.a"}
    assert decode(encode(value, ("x",), {}), pytest.fail) == value


def test_keys_that_look_alike_in_a_name_are_refused_where_one_tensor_would_be_lost():
    with pytest.raises(CheckpointError, match=r"'a\.1'.* 1 and '1'"):
        encode({1: torch.zeros(1), "1": torch.ones(1)}, ("a",), {})
    assert encode({1: 2, "1": 3}, ("a",), {}) == {"$dict": [[1, 2], ["1", 3]]}


FORMS = {
    "sparse_coo": lambda: torch.eye(2).to_sparse(),
    "sparse_csr": lambda: torch.eye(2).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
}


@pytest.mark.filterwarnings("ignore")  # torch says that these are deprecated, or a prototype
@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_that_is_no_plain_array_is_refused_with_its_place(tmp_path, form):
    """A save of a quantized one succeeded, and no restore could read it."""
    manager = CheckpointManager(tmp_path)
    with pytest.raises(TypeError, match=rf"'tables\.0' is a {form} tensor.*plain"):
        manager.save(1, {"tables": [FORMS[form]()]})
    assert manager.latest() is None


def test_a_module_inside_a_plain_value_is_told_its_place(tmp_path):
    with pytest.raises(TypeError, match=r"'parts\.head' is a torch\.nn.*\.Linear inside.*entries"):
        CheckpointManager(tmp_path).save(1, {"parts": {"head": torch.nn.Linear(1, 1)}})
