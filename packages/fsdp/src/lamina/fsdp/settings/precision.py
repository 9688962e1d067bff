"""Mixed precision: which dtype each copy of the weights and gradients has."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from lamina.ddp.engine import GroupDtypes, resolve_dtypes
from lamina.mesh.engine import check_fields


class WeightCodec(Protocol):
    """How a block of weights is encoded.

    Attributes:
        dtype: of the codes, one per element.
        side_dtype: of the side data.
        block: elements per block; a divisor of 128, at which tensors start and shards are cut, so
            that no block spans two tensors or two ranks. A tensor's last block ends in zeros.
    """

    dtype: torch.dtype
    side_dtype: torch.dtype
    block: int

    def encode(self, weights: torch.Tensor, codes: torch.Tensor, side: torch.Tensor) -> None:
        """Write codes and side data of weights.

        Args:
            weights: [blocks, block], in the compute dtype.
            codes: [blocks, block], in `dtype`.
            side: [blocks], in `side_dtype`.
        """
        ...

    def decode(self, codes: torch.Tensor, side: torch.Tensor, weights: torch.Tensor) -> None:
        """Write weights from codes and side data, of the same shapes."""
        ...


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of the four copies, and what is cast at the model's door.

    Attributes:
        main_params_dtype: dtype of main weights, what the optimizer updates; never below the
            parameters' own precision. None keeps the parameters' own.
        main_grads_dtype: dtype of main grads; None means that of the main weights.
        moments_dtype: dtype that Adam and AdamW keep their moments in between steps, such as
            `torch.bfloat16`; None means that of the main weights, in which steps are made anyway.
        grad_comm_dtype: dtype of gradients on the wire; None means the compute dtype. Sums are
            fp32 whatever it is.
        param_dtype: dtype to compute in; None keeps the parameters' own.
        output_dtype: dtype of the root module's floating outputs; None leaves them.
        cast_forward_inputs: cast the root module's floating inputs to `param_dtype`.
        buffer_dtype: dtype of floating buffers; None leaves them as they are.
        keep_full_precision: names (`fnmatch` patterns over qualified names) of the parameters that
            are left out of `param_dtype`, and of the buffers that are left out of `buffer_dtype`,
            such as "*norm*". A module all of whose parameters are kept has its inputs of
            `param_dtype` cast to theirs, and its outputs back, unless its attribute `casts_itself`
            is True. Buffers named in a module's `full_precision_buffers` are always left out.
        weight_codec: keeps and gathers weights in another dtype with side data per block (see
            `WeightCodec`); needs `zero_dp_strategy=3`. Frozen parameters and those left out of
            `param_dtype` are encoded too.
        encoded: names (`fnmatch` patterns) of the parameters that `weight_codec` encodes; the
            others are gathered as they are. All by default.

    Raises:
        TypeError: for a value of another type.
        ValueError: for a dtype that is not floating.

    Examples:
        >>> policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, keep_full_precision=["*bias"])
        >>> model = fully_shard(torch.nn.Linear(8, 1), mixed_precision_policy=policy)
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    param_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    buffer_dtype: torch.dtype | None = None
    keep_full_precision: Sequence[str] = ()
    weight_codec: WeightCodec | None = None
    encoded: Sequence[str] = ("*",)
    moments_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for each in fields(self):
            dtype = getattr(self, each.name)
            if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
                raise ValueError(
                    f"MixedPrecisionPolicy({each.name}={dtype}): weights and gradients are "
                    "computed in floating dtypes, such as torch.bfloat16; weight_codec= keeps "
                    "weights in other ones"
                )

    def keeps(self, name: str) -> bool:
        """Whether a parameter or buffer of this name is kept in full precision."""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.keep_full_precision)

    def dtypes(self, parameter_dtype: torch.dtype, *, keep: bool = False) -> GroupDtypes:
        """The dtypes of a group whose parameters were made in `parameter_dtype`."""
        return resolve_dtypes(
            parameter_dtype,
            compute=None if keep else self.param_dtype,
            main=self.main_params_dtype,
            grads=self.main_grads_dtype,
            wire=self.grad_comm_dtype,
            moments=self.moments_dtype,
        )


def policy_from(given: Any, argument: str = "mp_policy") -> MixedPrecisionPolicy | None:
    """Lamina's policy from torch FSDP2's (or from itself, or from None).

    torch's `reduce_dtype` is the dtype on the wire; sums are fp32 whatever it is. The optimizer
    updates the parameters in the dtype they were made in. TypeError, which calls it `argument`,
    refuses anything else.
    """
    if given is None or isinstance(given, MixedPrecisionPolicy):
        return given
    # By its fields and not its class, so that a policy of another version of torch's will do.
    try:
        return MixedPrecisionPolicy(
            main_params_dtype=None,
            grad_comm_dtype=given.reduce_dtype,
            param_dtype=given.param_dtype,
            output_dtype=given.output_dtype,
            cast_forward_inputs=given.cast_forward_inputs,
        )
    except AttributeError as error:
        raise TypeError(
            f"{argument}={given!r}: use lamina.fsdp.MixedPrecisionPolicy(param_dtype=...) or "
            "torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=...)"
        ) from error
