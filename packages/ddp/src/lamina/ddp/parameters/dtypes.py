"""The dtypes of a group: compute weights, main weights, main grads, the wire and moments."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GroupDtypes:
    """Dtypes of one group of parameters.

    Attributes:
        weights: model weights, what the module computes with.
        main: main weights, what the optimizer updates.
        grads: main grads, what the optimizer reads.
        wire: what gradients travel in; sums are fp32 (fp64 for fp64) whatever it is.
        moments: what Adam keeps its two moments in between steps; None means in the main weights'
            dtype, which is that of the arithmetic in any case.
        given: the parameters as the user made them; None means as they compute.
    """

    weights: torch.dtype
    main: torch.dtype
    grads: torch.dtype
    wire: torch.dtype
    moments: torch.dtype | None = None
    given: torch.dtype | None = None


def resolve_dtypes(
    parameter_dtype: torch.dtype,
    *,
    compute: torch.dtype | None = None,
    main: torch.dtype | None = torch.float32,
    grads: torch.dtype | None = None,
    wire: torch.dtype | None = None,
    moments: torch.dtype | None = None,
) -> GroupDtypes:
    """Dtypes for parameters that were created in `parameter_dtype`.

    Args:
        parameter_dtype: dtype of the parameters as the user made them.
        compute: dtype to compute in; None keeps the parameters' own.
        main: dtype of main weights; never below the parameters' own precision, so that an fp64
            model stays fp64. None keeps the parameters' own.
        grads: dtype of main grads; None means the main weights' dtype, which is what a torch
            optimizer accepts.
        wire: dtype of gradient communication; None means the compute dtype where it is narrower
            than the main grads, which is what autograd produces anyway.
        moments: dtype that Adam's moments are kept in; None means the main weights'.
    """
    if not (parameter_dtype.is_floating_point or parameter_dtype.is_complex):
        # Integers (orders, quantised weights) are frozen. Cast, they would be no indices any more.
        own = parameter_dtype
        return GroupDtypes(own, own, own, own, given=own)
    weights = compute or parameter_dtype
    main_dtype = torch.promote_types(parameter_dtype, main) if main else parameter_dtype
    grads, wire = grads or main_dtype, wire or weights
    # In the main weights' own dtype the optimizer keeps its moments anyway.
    apart = None if moments == main_dtype else moments
    return GroupDtypes(weights, main_dtype, grads, wire, apart, parameter_dtype)
