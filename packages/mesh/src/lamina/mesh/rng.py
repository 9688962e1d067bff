"""Random numbers of a distributed run: which ranks draw the same ones, and how to save them.

torch has one default generator per device, and two needs pull it apart. Initial parameters must
come out equal on all ranks that hold copies; dropout must not. So a run has two phases (parameters,
then training), in which the default generators follow different seeds, and a named stream
for the dropout of activations that are sharded over tp.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from lamina.mesh.groups.parallel_mesh import ParallelMesh

_TENSOR_AXES = ("tp", "expert_tp")
_SET_STATE = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}
_SEED = {"cpu": torch.default_generator.manual_seed, "cuda": torch.cuda.manual_seed}


@dataclass
class _Stream:
    """A generator beside the default ones: its seed, and its state on each device it ran on."""

    seed: int
    states: dict[str, torch.Tensor] = field(default_factory=dict)

    def copy(self) -> _Stream:
        """The same stream with states of its own, which nobody draws from."""
        return _Stream(self.seed, {device: state.clone() for device, state in self.states.items()})


# Process-wide, like the default generators that they stand beside: rng_state() has to find them
# without being told, and whoever seeds again replaces them.
_streams: dict[str, _Stream] = {}


class Seeded:
    """A seeded process in its parameter phase. As a context manager, it ends the phase.

    Torch's default generators have `parameter_seed` until training begins, then `training_seed`.
    """

    def __init__(self, parameter_seed: int, training_seed: int) -> None:
        self.parameter_seed = parameter_seed
        self.training_seed = training_seed

    def begin_training(self) -> None:
        """Give torch's default generators the seed of this rank's dropout."""
        torch.manual_seed(self.training_seed)

    def __enter__(self) -> Seeded:
        return self

    def __exit__(self, *exception: object) -> None:
        self.begin_training()


def seed_everything(seed: int, mesh: ParallelMesh | DeviceMesh | None = None) -> Seeded:
    """Seed Python, NumPy (if imported) and torch for this rank's place on `mesh`.

    Use it around the building of the model:

    >>> with seed_everything(1234, ParallelLayout().build()):
    ...     model = torch.nn.Linear(4, 1)  # equal on all ranks of a pipeline stage
    >>> dropped = torch.rand(4) < 0.1  # dropout differs between data-parallel ranks

    | draws | equal along | differ along |
    | --- | --- | --- |
    | torch, inside the `with` (parameters) | dp, cp, tp | pp |
    | torch, after it (dropout) | tp | pp, dp, cp |
    | torch, inside `rng_stream("tp")` | - | pp, dp, cp, tp |
    | Python and NumPy (augmentation) | pp, cp, tp | dp |

    Parameters differ between pipeline stages so that equal layers of two stages don't start as
    twins. Whoever wants initial parameters that don't depend on the layout draws each from
    `derive_seed(seed, parameter_name)`.

    Args:
        seed: any integer, the same on all ranks.
        mesh: on a plain DeviceMesh, dimensions named tp, expert_tp, pp and cp are what they say
            and all others are data-parallel. None: a single rank.

    Returns:
        What ends the parameter phase: leave its `with` block, or call `begin_training()`.

    Raises:
        ValueError: `seed` is not an integer.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed={seed!r}: give an integer, the same on all ranks.")
    place = _coordinates(mesh)
    # What is left after pp, tp, expert_tp and cp are the data-parallel axes, under any name.
    stage = f"pp{place.pop('pp', 0)}"
    tensor = [f"{name}{place.pop(name)}" for name in _TENSOR_AXES if name in place]
    context = f"cp{place.pop('cp', 0)}"
    data = [f"{name}{place[name]}" for name in sorted(place)]
    seeded = Seeded(
        parameter_seed=derive_seed(seed, "parameters", stage),
        training_seed=derive_seed(seed, "training", stage, context, *data),
    )
    _seed_python_and_numpy(derive_seed(seed, "data", *data))
    torch.manual_seed(seeded.parameter_seed)
    # Streams of an earlier seed would go on where they had stopped.
    _streams.clear()
    _streams["tp"] = _Stream(derive_seed(seed, "tp", stage, context, *data, *tensor))
    return seeded


def derive_seed(seed: int, *parts: object) -> int:
    """A seed that depends on `seed` and on every part, the same in every process and version.

    Args:
        seed: any integer.
        parts: anything whose `str` says what the seed is for, such as a parameter's name.

    Returns:
        An integer in 0 .. 2**63 - 1.

    Examples:
        >>> generator = torch.Generator().manual_seed(derive_seed(1234, "head.weight"))
    """
    # A separator that no part contains, so that no two lists of parts read alike.
    text = "\x1f".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def require_stream(name: str) -> None:
    """Refuse a process that nobody seeded: its ranks may draw differently where they must not.

    KeyError: no such stream.
    """
    if name not in _streams:
        raise KeyError(
            f"no random stream '{name}': seed_everything() makes {_names(_streams) or '(none yet)'}"
            "; call it first."
        )


@contextmanager
def rng_stream(name: str) -> Iterator[None]:
    """Inside, torch's default generators draw from the named stream instead of their own.

    `seed_everything` makes the stream "tp", which differs between the ranks of a tp group:
    for dropout of activations that are sharded over tp. Covers the CPU's generator and that of the
    current CUDA device, if CUDA has been used.

    Raises:
        KeyError: no such stream.

    Examples:
        >>> seeded = seed_everything(1234)
        >>> with rng_stream("tp"):
        ...     kept = torch.rand(4) < 0.9
    """
    require_stream(name)
    stream = _streams[name]
    # The default generators are lent to the stream: kernels draw from no others.
    outside = _default_states()
    for device in outside:
        if device in stream.states:
            _SET_STATE[device](stream.states[device])
        else:
            _SEED[device](stream.seed)
    try:
        yield
    finally:
        # Also after an error: what was drawn in here was drawn from the stream.
        stream.states.update(_default_states())
        for device, state in outside.items():
            _SET_STATE[device](state)


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint` for functions that use `rng_stream`.

    checkpoint replays the default generators when it recomputes. This replays the named
    streams too; without it, dropout inside `rng_stream` would draw another mask in
    backward than in forward.
    """
    return nullcontext(), _Replay({name: stream.copy() for name, stream in _streams.items()})


class _Replay(AbstractContextManager[None]):
    """Not a generator: a graph that is kept is recomputed at each of its backwards."""

    def __init__(self, recorded: dict[str, _Stream]) -> None:
        self._recorded = recorded
        self._outside: list[dict[str, _Stream]] = []

    def __enter__(self) -> None:
        self._outside.append(dict(_streams))
        _streams.update({name: stream.copy() for name, stream in self._recorded.items()})

    def __exit__(self, *exception: object) -> None:
        _streams.update(self._outside.pop())


def rng_state() -> dict[str, Any]:
    """All generators of this rank as tensors, numbers, strings and None, nested in dicts.

    Holds Python's and NumPy's (if imported) global generators, torch's for the CPU and for the
    current CUDA device (if CUDA has been used), and the named streams. It is small (about 20 KB)
    and belongs to one rank: another rank's numbers must not be loaded in its place.

    Examples:
        >>> state, first = rng_state(), torch.rand(3)
        >>> set_rng_state(state)
        >>> torch.equal(first, torch.rand(3))
        True
    """
    # As tensors and numbers: checkpoints load without unpickling (weights_only=True).
    version, internal, gauss = random.getstate()
    states = _default_states()
    return {
        "python": {"version": version, "words": torch.tensor(internal), "gauss": gauss},
        "numpy": _numpy_state(),
        "torch_cpu": states["cpu"],
        "torch_cuda": states.get("cuda"),
        "streams": {
            name: {"seed": stream.seed, "states": stream.copy().states}
            for name, stream in _streams.items()
        },
    }


def set_rng_state(state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Set all generators of this rank to what `rng_state` returned.

    Args:
        state: from `rng_state`, here or in another process.
        strict: refuse a state that holds less or more than this process has: CUDA's generator
            on one side only, or NumPy's. With False, what has no counterpart is left as it is.

    Raises:
        ValueError: it isn't such a state, or it doesn't fit this process.

    Examples:
        >>> set_rng_state(rng_state())
    """
    missing = {"python", "numpy", "torch_cpu", "torch_cuda", "streams"} - set(state)
    if missing:
        raise ValueError(
            f"this is no state from rng_state(): {_names(missing)} missing, it holds "
            f"{_names(state)}."
        )
    # All is checked before anything is set, so that a refusal changes nothing.
    if strict:
        _check_counterparts(state)
    python = state["python"]
    words = tuple(int(word) for word in python["words"].tolist())
    random.setstate((int(python["version"]), words, python["gauss"]))
    if state["numpy"] is not None and "numpy" in sys.modules:
        _set_numpy_state(state["numpy"])
    _SET_STATE["cpu"](state["torch_cpu"])
    if state["torch_cuda"] is not None and torch.cuda.is_available():
        _SET_STATE["cuda"](state["torch_cuda"])
    _streams.clear()
    for name, stream in state["streams"].items():
        _streams[name] = _Stream(int(stream["seed"]), dict(stream["states"])).copy()


def _check_counterparts(state: Mapping[str, Any]) -> None:
    if state["torch_cuda"] is not None and not torch.cuda.is_available():
        raise ValueError(
            "the state was saved on a GPU and this process has none, so its CUDA draws can't be "
            "continued. Resume on a GPU, or pass strict=False and accept another sequence."
        )
    if state["numpy"] is not None and "numpy" not in sys.modules:
        raise ValueError(
            "the state holds NumPy's generator and NumPy is not imported here. Import numpy "
            "first, or pass strict=False."
        )


def _coordinates(mesh: ParallelMesh | DeviceMesh | None) -> dict[str, int]:
    if mesh is None:
        return {}
    # A ParallelMesh has two meshes over its ranks; draws follow the dense one.
    dense = mesh if isinstance(mesh, DeviceMesh) else mesh.mesh
    names, places = dense.mesh_dim_names, dense.get_coordinate()
    if names is None or places is None:
        raise ValueError(
            f"{dense} has no dimension names, or this rank is not on it: random numbers follow a "
            "rank's place along named axes."
        )
    return dict(zip(names, places, strict=True))


def _seed_python_and_numpy(seed: int) -> None:
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])


def _default_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _numpy_state() -> dict[str, Any] | None:
    # A program that has not imported NumPy draws nothing from it, and need not import it to save.
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    state = numpy.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise ValueError(
            f"NumPy's global generator is {state['bit_generator']}; rng_state() can save MT19937, "
            "NumPy's default, only. Keep own generators in own checkpoint entries."
        )
    _, words, position, has_gauss, gauss = numpy.random.get_state()
    # A tensor can be saved by DCP, and torch has few operators for uint32.
    words = torch.from_numpy(words.astype("int64"))
    return {"words": words, "position": position, "has_gauss": has_gauss, "gauss": gauss}


def _set_numpy_state(state: Mapping[str, Any]) -> None:
    words = state["words"].numpy().astype("uint32")
    rest = int(state["position"]), int(state["has_gauss"]), float(state["gauss"])
    sys.modules["numpy"].random.set_state(("MT19937", words, *rest))


def _names(items: Any) -> str:
    return ", ".join(sorted(items))
