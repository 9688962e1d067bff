"""Cross-entropy without full logits: cut over ranks, and a chunk of tokens at a time.

The loss of a token is `ln(sum(exp(logits))) - logits[label]`. If each rank holds some columns of
the logits, three numbers per token are exchanged: the largest logit, the sum of exponentials, and
the label's logit.

An id that the vocabulary does not have is an error on a CPU, and makes the loss NaN on a GPU, where
the host would have to wait for the device in every forward to read ids.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.collectives.engine import all_reduce_small
from lamina.ddp.engine import gradient_sink
from lamina.mesh.engine import MeshAxis
from lamina.models.base.applied import applied
from lamina.models.base.computing_device import computes_on
from lamina.models.base.mesh_axes import MeshLike, axis_of
from lamina.models.compat import graph_is_kept
from lamina.models.layers.matmul_products import under_autocast, write_product


def check_ids(
    name: str,
    ids: Tensor,
    vocab_size: int,
    ignored: int | None = None,
    *,
    remedy: str | None = None,
) -> None:
    """Raise ValueError for ids outside of `0 .. vocab_size - 1` but for `ignored`; on a CPU only.

    They are not read on another device or while compiling. `name` and `remedy` are for the message,
    which by default asks about the tokenizer.

    The error has the first id that does not exist, and how many do not. TypeError: the ids are not
    integers.
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} are {ids.dtype}: ids are integers, such as torch.int64")
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or type(ids) is not Tensor:
        return  # a tensor subclass, such as a fake tensor, may have no values
    if ids.numel() and ignored is None:
        low, high = ids.aminmax()
        if int(low) >= 0 and int(high) < vocab_size:
            return
    strange = (ids < 0) | (ids >= vocab_size)
    if ignored is not None:
        strange &= ids != ignored
    if not strange.any():
        return
    left_out = "" if ignored is None else f" or {ignored} (left out)"
    if remedy is None:
        remedy = f"is the tokenizer larger than vocab_size {vocab_size}, or should a label be -100?"
    raise ValueError(
        f"{name} hold {int(ids[strange][0])} (and {int(strange.sum())} ids in all that do not "
        f"exist): they must be 0 to {vocab_size - 1}{left_out}; {remedy}"
    )


def label_weights(labels: Tensor, vocab_size: int, ignored: int, dtype: torch.dtype) -> Tensor:
    """The weight of each label: 1, or 0 if it is ignored, or NaN if there is no such id."""
    exists = (labels >= 0) & (labels < vocab_size)
    weights = torch.where(exists, 1.0, torch.nan).to(dtype)
    return torch.where(labels == ignored, 0.0, weights)


IGNORED = -100
"""The label of tokens that are left out of the loss, as in torch."""


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    mesh: MeshLike = None,
    *,
    ignore_index: int = IGNORED,
    chunk: int | None = None,
) -> Tensor:
    """Cross-entropy of each token from logits whose vocabulary is cut over ranks.

    Exponentials are in float32, for one chunk of tokens at a time. So the peak memory for logits in
    bf16 is the logits and their gradient.

    Args:
        logits: `[..., vocabulary / size]`: this rank's run of columns, in rank order.
        labels: int64 `[...]`, ids of the whole vocabulary, the same on every rank.
        mesh: has an axis `tp`, or is that axis; None where this process holds all columns.
        ignore_index: tokens with this label have loss 0 and no gradient.
        chunk: tokens at a time; by default at least 1,024, more for small vocabularies.

    Returns:
        Losses `[...]` in nats, float32 (float64 for float64 logits). On a GPU a label that does
        not exist makes its loss and gradients NaN.

    Raises:
        ValueError: for shapes that do not fit and a `chunk` below 1; on a CPU, for labels that do
            not exist.

    Examples:
        >>> loss = vocab_parallel_cross_entropy(torch.randn(4, 256), torch.randint(256, (4,)))
    """
    _check("logits", logits, labels, chunk)
    axis = axis_of(mesh, "tp")
    check_ids("labels", labels, _total(logits.shape[-1], axis), ignore_index)
    chunk = chunk or tokens_at_a_time(logits.shape[-1])
    return applied(_CrossEntropy, logits, labels, axis, ignore_index, chunk)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mesh: MeshLike = None,
    *,
    vocab_size: int | None = None,
    chunk: int | None = None,
    ignore_index: int = IGNORED,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Sum of cross-entropies of `hidden @ weight.T + bias`, a chunk of tokens at a time.

    Only the logits of one chunk exist at a time. If gradients are required, forward computes them
    too, so that backward need not compute the logits again. What is saved for backward is as large
    as `hidden` and `weight` together.

    Args:
        hidden: `[tokens, hidden]`, the same on every rank. Its gradient is the contribution of
            this rank's columns, so make it by `copy_to` or by a gather that sums in backward.
        weight: `[vocabulary / size, hidden]`: this rank's rows.
        labels: int64 `[tokens]`, ids of the whole vocabulary.
        mesh: has an axis `tp`, or is that axis; None where this process holds all rows.
        vocab_size: ids that exist; rows from there on are padding and get no probability.
        chunk: tokens at a time; by default at least 1,024, more for small vocabularies.
        ignore_index: tokens with this label are left out.
        bias: `[vocabulary / size]`: added to this rank's logits; None is zeros.
        softcap: a logit l becomes `softcap * tanh(l / softcap)`; None leaves it.

    Returns:
        The sum in nats, a scalar in float32 (float64 for float64 weights). On a GPU a label that
        does not exist makes the sum and the gradients NaN.

    Raises:
        ValueError: for shapes that do not fit, a `chunk` below 1, and a `vocab_size` above the
            number of rows; on a CPU, for labels that do not exist.

    Examples:
        >>> hidden, weight, labels = torch.randn(4, 8), torch.randn(256, 8), torch.arange(4)
        >>> loss = linear_cross_entropy(hidden, weight, labels)
    """
    if hidden.ndim != 2:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}: need [tokens, hidden]")
    _check("hidden", hidden, labels, chunk)
    axis = axis_of(mesh, "tp")
    hidden, weight, _ = under_autocast(hidden, weight)
    chunk = chunk or tokens_at_a_time(weight.shape[0])
    rows = _total(weight.shape[0], axis)
    vocab_size = rows if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= rows:
        raise ValueError(
            f"vocab_size is {vocab_size}, weight has {rows} rows over all ranks: it "
            f"must be 1 to {rows}"
        )
    check_ids("labels", labels, vocab_size, ignore_index)
    grad_enabled = torch.is_grad_enabled()
    asked = (hidden, weight) if bias is None else (hidden, weight, bias)
    needed = tuple(grad_enabled and tensor.requires_grad for tensor in asked)
    how = (axis, vocab_size, chunk, ignore_index, needed, softcap)
    return applied(_LinearCrossEntropy, hidden, weight, bias, labels, *how)


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """`softcap * tanh(logits / softcap)`, or the logits themselves without one."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def check_reduction(reduction: str) -> None:
    """Raise ValueError unless the reduction is `mean` or `sum`."""
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"reduction is {reduction!r}: it must be 'mean' or 'sum'; for a loss of each token "
            "give the logits to vocab_parallel_cross_entropy"
        )


def _check(name: str, rows: Tensor, labels: Tensor, chunk: int | None) -> None:
    """Raise ValueError unless there is one label per row, and for a chunk below 1."""
    if rows.ndim < 2 or rows.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, {name} {tuple(rows.shape)}: labels need "
            "that shape without its last dimension, and at least one of tokens"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}: it must be at least 1, or None")


def _total(columns: int, axis: MeshAxis | None) -> int:
    return columns * (1 if axis is None else axis.size)


def tokens_at_a_time(columns: int) -> int:
    """The number of tokens whose logits of so many columns are in memory at a time."""
    return int(max(1024, 2**22 // max(columns, 1)))


class _Softmax(NamedTuple):
    """The results of one pass over a chunk of logits."""

    losses: Tensor
    """`[tokens]`; meaningless for labels that are left out."""
    exponentials: Tensor
    """`[tokens, columns]` of this rank; divided by `total` they are probabilities."""
    total: Tensor
    """`[tokens]`: the sum of the exponentials over the columns of all ranks."""
    log_total: Tensor
    """`[tokens]`: the log of the sum of the exponentials of the original logits, of all ranks."""
    column: Tensor
    """int64 `[tokens]`: the label's column; arbitrary if the label is not `here`."""
    here: Tensor
    """bool `[tokens]`: whether the label is not left out and is one of this rank's columns."""


def _columns(
    labels: Tensor, columns: int, axis: MeshAxis | None, ignored: int
) -> tuple[Tensor, Tensor]:
    """Which of this rank's columns each label is, and whether it is one; see `_Softmax`."""
    column = labels - (0 if axis is None else axis.rank * columns)
    here = (column >= 0) & (column < columns) & (labels != ignored)
    return torch.where(here, column, 0), here


# Note [Passes over a chunk of logits]
# Logits are the largest tensors of a step, and on a GPU a pass over them takes longer than what it
# computes. So narrow logits are widened by the pass that subtracts the largest, and the gradient is
# rounded by the pass that divides. Both give the bits of a pass of its own, which a CPU takes:
# there torch's operators are slower where a result has another dtype.
def _as_read(logits: Tensor, wide: torch.dtype) -> Tensor:
    """Logits as the next operator reads them: on a GPU as they are, and it widens them."""
    return logits if computes_on(logits) == "cuda" else logits.to(wide)


def _softmax(
    logits: Tensor,
    labels: Tensor,
    axis: MeshAxis | None,
    ignored: int,
    wide: torch.dtype,
    *,
    in_place: bool = False,
) -> _Softmax:
    """Make exponentials in `wide` of logits `[tokens, columns]`, in place if they are wide."""
    group = None if axis is None else axis.group
    column, here = _columns(labels, logits.shape[1], axis, ignored)
    read = _as_read(logits, wide)
    largest = read.amax(dim=1).to(wide)
    all_reduce_small([largest], group, op="max")
    own = read.dtype == wide and (in_place or read is not logits)
    less = torch.sub(read, largest[:, None], out=read if own else None)
    chosen = torch.where(here, less.gather(1, column[:, None]).squeeze(1), 0.0)
    exponentials = less.exp_()
    total = exponentials.sum(dim=1)
    all_reduce_small([total, chosen], group)
    log = total.log()
    return _Softmax(log - chosen, exponentials, total, largest + log, column, here)


def _gradient(soft: _Softmax, total: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the losses by the logits in a dtype; uses up the exponentials.

    Probabilities are exponentials divided by `total` `[tokens]`, and one is subtracted at each
    label before anything is rounded.
    """
    label, exponentials, total = soft.column[:, None], soft.exponentials, total[:, None]
    at_label = exponentials.gather(1, label).div_(total) - soft.here[:, None].to(total.dtype)
    rounds = exponentials.dtype != dtype and computes_on(exponentials) == "cuda"
    place = torch.empty_like(exponentials, dtype=dtype) if rounds else exponentials
    probabilities = torch.div(exponentials, total, out=place)
    return probabilities.scatter_(1, label, at_label.to(place.dtype)).to(dtype)


def _subtract_labels(probabilities: Tensor, column: Tensor, here: Tensor) -> Tensor:
    """Subtract one at each label, in place: this gives the gradient of the loss by the logits."""
    minus_ones = -here[:, None].to(probabilities.dtype)
    return probabilities.scatter_add_(1, column[:, None], minus_ones)


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits, and the log of the sum of exponentials of each token."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, axis: MeshAxis | None, ignored: int, chunk: int
    ) -> Tensor:
        flat, names = logits.flatten(0, -2), labels.flatten()
        wide = torch.promote_types(logits.dtype, torch.float32)
        losses = torch.empty(names.shape, dtype=wide, device=logits.device)
        log_total = torch.empty_like(losses)
        for start in range(0, flat.shape[0], chunk):
            rows = slice(start, start + chunk)
            soft = _softmax(flat[rows], names[rows], axis, ignored, wide)
            losses[rows], log_total[rows] = soft.losses, soft.log_total
        counts = label_weights(names, _total(flat.shape[1], axis), ignored, wide)
        ctx.save_for_backward(logits, names, log_total, counts)
        ctx.axis, ctx.ignored, ctx.chunk = axis, ignored, chunk
        return torch.where(names == ignored, 0.0, losses * counts).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, names, log_total, counts = ctx.saved_tensors
        flat, factor = logits.flatten(0, -2), grad.flatten() * counts
        grad_logits = torch.empty_like(flat)
        for start in range(0, flat.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            wide = _as_read(flat[rows], log_total.dtype) - log_total[rows, None]
            columns = _columns(names[rows], flat.shape[1], ctx.axis, ctx.ignored)
            by_loss = _subtract_labels(wide.exp_(), *columns)
            if computes_on(flat) == "cuda":
                torch.mul(by_loss, factor[rows, None], out=grad_logits[rows])
            else:
                grad_logits[rows] = by_loss.mul_(factor[rows, None])
        return grad_logits.view(logits.shape), None, None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes both gradients in forward, for a loss whose own gradient is one.

    See Note [Gradients that forward has computed].
    """

    # Note [Gradients that forward has computed]
    # Forward saves the finished gradients, and backward multiplies them by the loss's own gradient,
    # in place if it can (decision 0603). It must not do so if the graph is kept, because another
    # backward through it reads the same tensors, nor while compiling, where the compiler decides
    # what may be overwritten. When they are overwritten, the saved tensors are cleared first, so
    # that whoever receives the gradients owns them and need not copy.

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        axis: MeshAxis | None,
        vocab_size: int,
        chunk: int,
        ignored: int,
        needed: tuple[bool, ...],
        softcap: float | None,
    ) -> Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        first = 0 if axis is None else axis.rank * weight.shape[0]
        kept = max(vocab_size - first, 0)
        counts = label_weights(labels, vocab_size, ignored, wide)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needed[0] else None
        grad_weight = None
        if needed[1]:
            make = torch.empty_like if hidden.shape[0] else torch.zeros_like
            grad_weight = make(weight, dtype=wide)
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = _as_read(hidden[rows] @ weight.t(), wide)
            if bias is not None or softcap is not None:
                logits = logits.to(wide)
                logits = softcapped(logits if bias is None else logits.add_(bias), softcap)
            # The derivative of the cap, before the exponentials are written over the logits.
            slope = None if softcap is None else 1.0 - (logits / softcap).square()
            logits[:, kept:] = -torch.inf
            soft = _softmax(logits, labels[rows], axis, ignored, wide, in_place=True)
            del logits  # narrow ones would lie beside the exponentials and their gradient
            losses = torch.where(labels[rows] == ignored, 0.0, soft.losses * counts[rows])
            total = total + losses.sum()  # see Note [Results that are another tensor]
            # A label of weight 0 divides by infinity, one that does not exist by NaN.
            grad = _gradient(
                soft, soft.total / counts[rows], weight.dtype if slope is None else wide
            )
            if slope is not None:
                grad = grad.mul_(slope).to(weight.dtype)
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                write_product(grad.t(), hidden[rows], grad_weight, accumulate=start > 0)
            del soft, grad, slope  # otherwise two chunks would be in memory at once
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.weight_dtype = weight.dtype
        ctx.parameter = weight if weight.is_leaf else None
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        # See Note [Gradients that forward has computed].
        kept = torch.compiler.is_compiling() or graph_is_kept()
        if not kept:
            ctx.maybe_clear_saved_tensors()
        if grad_hidden is not None:
            # The factor is [1, 1], as a scalar [] would first be rounded to the gradient's dtype.
            into = torch.empty_like(grad_hidden) if kept else grad_hidden
            grad_hidden = torch.mul(grad_hidden, grad.view(1, 1), out=into)
        if grad_weight is not None:
            grad_weight = _scaled(grad_weight, grad, ctx.parameter, ctx.weight_dtype, kept)
        if grad_bias is not None:
            grad_bias = (grad_bias * grad).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, grad_bias, *(None,) * 7


def _scaled(
    gradient: Tensor, factor: Tensor, parameter: Tensor | None, dtype: torch.dtype, kept: bool
) -> Tensor | None:
    """The gradient of the head's weight; None if it was written into a wrapper's bucket."""
    sink = None if parameter is None else gradient_sink(parameter)
    if sink is None or sink.dtype not in (gradient.dtype, dtype):
        return (gradient * factor if kept else gradient.mul_(factor)).to(dtype)
    if sink.dtype != gradient.dtype:
        gradient = gradient * factor if kept else gradient.mul_(factor)
        if sink.accumulate:
            sink.view.add_(gradient.to(dtype))
        else:
            sink.view.copy_(gradient)
    elif sink.accumulate:
        sink.view.addcmul_(gradient, factor)
    elif kept or not sink.adopt(gradient):
        torch.mul(gradient, factor, out=sink.view)
    else:
        gradient.mul_(factor)
    sink.written()
    return None
