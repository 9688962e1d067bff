"""What users and the libraries they come from call things, translated at the door.

A keyword that a function does not have is refused with the name of what does the same here.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from torch.distributed.device_mesh import DeviceMesh

__all__ = ["named_mesh", "translates"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
MeshT = TypeVar("MeshT")


def translates(words: Mapping[str, str]) -> Callable[[FunctionT], FunctionT]:
    """Refuse keywords that a function does not have, and say what to write instead.

    Args:
        words: what each foreign keyword is here: the rest of a sentence that begins "use".
    """

    def decorate(function: FunctionT) -> FunctionT:
        title = function.__qualname__.removesuffix(".__init__")
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: Any, **settings: Any) -> Any:
            for name in settings:
                if name not in known:
                    raise TypeError(_refusal(title, name, known, words))
            return function(*args, **settings)

        return checked  # type: ignore[return-value]  # the same signature, as `wraps` says

    return decorate


def _refusal(title: str, name: str, known: list[str], words: Mapping[str, str]) -> str:
    refusal = f"{title}({name}=) is not an argument"
    if name in words:
        return f"{refusal}: use {words[name]}"
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"{refusal}: did you mean {near[0]}=?"
    return f"{refusal}: {title} takes {', '.join(known)}"


def named_mesh(mesh: MeshT) -> MeshT:
    """A mesh whose dimensions have names: a DeviceMesh of one unnamed dimension is `dp_shard`.

    That is how most users of FSDP2 make theirs. It keeps its process group. Other meshes come back
    as they are.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names or mesh.ndim != 1:
        return mesh
    named = DeviceMesh.from_group(
        mesh.get_group(), mesh.device_type, mesh=mesh.mesh, mesh_dim_names=("dp_shard",)
    )
    return cast("MeshT", named)
