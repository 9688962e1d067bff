"""How gradients become what travels, and how what arrives becomes summands.

Note [A wire is a row of blocks]
A codec turns a block of elements into as many codes, and may add side data to it, such as a scale.
On the wire a block's side data lie directly before its codes. So any run of whole blocks is one run
of bytes, and every transport can send, read and receive a part of it without knowing the codec:
messages in parts, reads from another process's memory, sums block by block. A rank's own piece
takes the same way, so that its bits do not depend on the rank that owns it. See
docs/decisions/0307-wires-are-rows-of-blocks.md.
"""

from typing import Protocol

import torch
import torch.distributed as dist

from lamina.collectives.call.collective import DamagedMessageError
from lamina.collectives.transport.lanes import lane_of
from lamina.collectives.transport.transport import Completion
from lamina.mesh.engine import GroupRef, live_group

MOST_BLOCK = 1 << 12  # elements; the sums' own blocks and rows are multiples of it


class GradientCodec(Protocol):
    """How a block of gradients is encoded."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes, one per element."""

    @property
    def side_dtype(self) -> torch.dtype | None:
        """Of the side data, one number per block; None where there is none."""

    @property
    def block(self) -> int:
        """Elements per block: a power of two, at most 4096. A piece's last block ends in zeros."""

    def encode(self, values: torch.Tensor, codes: torch.Tensor, side: torch.Tensor | None) -> None:
        """Write codes and side data of gradients.

        Args:
            values: [blocks, block], in the dtype of the reduction's input.
            codes: [blocks, block], in `dtype`; perhaps with strides.
            side: [blocks], in `side_dtype`, perhaps with strides; None where there is none.
        """
        ...

    def decode(self, codes: torch.Tensor, side: torch.Tensor | None, values: torch.Tensor) -> None:
        """Write summands from codes and side data, of the same shapes; they are float32."""
        ...


class Cast:
    """The codec that is a cast: codes are the gradients in another dtype.

    Args:
        dtype: float32, bfloat16, float16 or float64.
    """

    side_dtype: torch.dtype | None = None
    block = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, values: torch.Tensor, codes: torch.Tensor, side: torch.Tensor | None) -> None:
        """Round to the nearest."""
        codes.copy_(values)

    def decode(self, codes: torch.Tensor, side: torch.Tensor | None, values: torch.Tensor) -> None:
        """Widen; exact."""
        values.copy_(codes)


class Int8Blocks:
    """Eight bits per element and one float32 scale per block, which is its largest magnitude / 127.

    A block of zeros stays zeros. One that holds an infinity or a NaN decodes to what is not finite.

    Args:
        block: elements per block: with 128 a gradient takes 0.258 of its bytes in float32.
    """

    dtype, side_dtype = torch.int8, torch.float32

    def __init__(self, block: int = 128) -> None:
        self.block = block

    def encode(self, values: torch.Tensor, codes: torch.Tensor, side: torch.Tensor | None) -> None:
        """Round to the nearest multiple of the scale."""
        assert side is not None  # noqa: S101 - `side_dtype` asks for it
        # An infinity or a NaN makes the scale infinite or NaN, and so all that is decoded.
        scales = values.abs().amax(dim=1).float().div_(127)
        side.copy_(scales)
        steps = values / torch.where(scales == 0, 1, scales)[:, None]
        codes.copy_(steps.round_().clamp_(-127, 127))

    def decode(self, codes: torch.Tensor, side: torch.Tensor | None, values: torch.Tensor) -> None:
        """Multiply by the scale."""
        assert side is not None  # noqa: S101 - `side_dtype` asks for it
        values.copy_(codes).mul_(side[:, None])


class ErrorFeedback:
    """A codec that adds what one encoding has lost to the next one's values.

    Note [What a wire loses comes later]
    A coarse code loses small gradients beside large ones in every step, always the same ones. Kept
    and added to the next step's, they add up until they are large enough to be sent, so over the
    steps nothing is lost (Seide et al., 2014; Karimireddy et al., 2019). It costs one float32
    number for each element that a rank sends. What is lost by an infinity or a NaN is forgotten, so
    that a step that a loss scaler skips does not spoil the next. See
    docs/decisions/0309-int8-wires-keep-what-they-lose.md.

    Args:
        codec: what encodes. This object belongs to one buffer, and is called once for each of its
            reductions.
    """

    def __init__(self, codec: GradientCodec) -> None:
        self._codec = codec
        self.dtype, self.side_dtype, self.block = codec.dtype, codec.side_dtype, codec.block
        self._lost: torch.Tensor | None = None

    def encode(self, values: torch.Tensor, codes: torch.Tensor, side: torch.Tensor | None) -> None:
        """Encode the values and what is owed to them; keep what this loses."""
        # See Note [What a wire loses comes later].
        owed = values.float() if self._lost is None else self._lost.add_(values)
        self._codec.encode(owed, codes, side)
        kept = torch.empty_like(owed)
        self._codec.decode(codes, side, kept)
        self._lost = torch.sub(owed, kept, out=kept).nan_to_num_(0, 0, 0)

    def decode(self, codes: torch.Tensor, side: torch.Tensor | None, values: torch.Tensor) -> None:
        """As the codec does."""
        self._codec.decode(codes, side, values)


class Checksums(Cast):
    """The gradients as they are, and a checksum of each block of 1,024.

    The checksum is the sum of the block's 32-bit words modulo 2^32: exact in any order, and no
    single bit can flip without changing it. On CPUs only, because the host looks at each.

    Args:
        dtype: of the gradients.
    """

    block = 1 << 10
    side_dtype = torch.int64  # as wide as the widest gradient, so that all of it is aligned

    def encode(self, values: torch.Tensor, codes: torch.Tensor, side: torch.Tensor | None) -> None:
        """Copy the gradients, and sum their bits before anybody else can touch the copy."""
        assert side is not None  # noqa: S101 - `side_dtype` asks for it
        if values.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"the host looks at checksums, and would wait for {values.device} at each sum: "
                "leave them out (reduction='ordered')"
            )
        side.copy_(_checksums(values))
        codes.copy_(values)


def _checksums(rows: torch.Tensor) -> torch.Tensor:
    """Of each row: int64, the sum of its 32-bit words modulo 2^32."""
    return rows.view(torch.int32).sum(1, dtype=torch.int32).to(torch.int64)


class Wire:
    """A codec at work on flat tensors.

    Attributes:
        dtype: of what travels: the codes' where there is no side data, else bytes.
        sum_dtype: of the summands: float64 for codes in float64, else float32.
        block: elements per block.
        unit: items of `dtype` per block.
        plain: whether what travels are numbers in `dtype`, one per element.
        summable: whether they are summed just as they are.
        checked: whether checksums are among them, so that a sum has to end `guarded`.
        damaged: ranks of which something arrived that they have not sent.

    Raises:
        ValueError: a block that is no power of two, too large, or that side data do not align with.
    """

    def __init__(self, codec: GradientCodec) -> None:
        self.codec, self.block = codec, codec.block
        if not 0 < codec.block <= MOST_BLOCK or codec.block & (codec.block - 1):
            raise ValueError(
                f"{type(codec).__name__}.block={codec.block} must be a power of two, at most "
                f"{MOST_BLOCK}"
            )
        self.sum_dtype = torch.float64 if codec.dtype == torch.float64 else torch.float32
        # Side data stands before the codes of each block, in one message of bytes. Without side
        # data the message is the codes themselves.
        self._side = 0 if codec.side_dtype is None else codec.side_dtype.itemsize
        self.dtype = torch.uint8 if self._side else codec.dtype
        self.unit = self._side + codec.block * codec.dtype.itemsize if self._side else codec.block
        self.plain = not self._side and self.block == 1
        self.summable = self.plain and self.dtype == self.sum_dtype
        self.checked = isinstance(codec, Checksums)
        self.damaged: set[int] = set()
        # Side data and codes are read as views of the bytes, and a view begins at a multiple of its
        # item's size.
        if self._side and (self.unit % self._side or self._side % codec.dtype.itemsize):
            raise ValueError(
                f"{type(codec).__name__}: {codec.side_dtype} side data and {codec.block} codes in "
                f"{codec.dtype} would not be aligned; take larger blocks or narrower side data"
            )

    def of_sums(self) -> "Wire":
        """How sums of what travels here go on to other hosts: uncoded, with checksums if any."""
        return Wire((Checksums if self.checked else Cast)(self.sum_dtype))

    def items(self, numel: int) -> int:
        """Items that a piece of `numel` elements takes on the wire."""
        return -(-numel // self.block) * self.unit

    def _split(self, wire: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Codes [blocks, block] and side data [blocks] of a run of whole blocks."""
        rows = wire.view(-1, self.unit)
        if self.codec.side_dtype is None:
            return rows, None
        side = rows[:, : self._side].view(self.codec.side_dtype)
        return rows[:, self._side :].view(self.codec.dtype), side.view(-1)

    def encode(self, values: torch.Tensor, wire: torch.Tensor, piece: int) -> None:
        """Write all pieces to their places on the wire, in one call of the codec.

        `values` are flat pieces of `piece` elements, of which the last may be shorter. `wire` has
        `items(piece)` for each. A piece that does not end with a block is filled with zeros.
        """
        codes, side = self._split(wire)
        whole = values
        if values.numel() != codes.numel():
            # Each piece ends with a block of its own, so that it is decoded without the next one.
            full, rest = divmod(values.numel(), piece)
            whole = values.new_zeros(codes.numel())
            width = self.items(piece) // self.unit * self.block
            rows = whole[: full * width].view(full, width)
            rows[:, :piece].copy_(values[: full * piece].view(full, piece))
            whole[full * width :][:rest].copy_(values[full * piece :])
        self.codec.encode(whole.view(codes.shape), codes, side)

    def encoded(self, values: torch.Tensor, piece: int) -> torch.Tensor:
        """What travels of whole pieces; the values themselves if they are plain."""
        if self.plain or values.is_meta:
            return values
        size = values.numel() // piece * self.items(piece)
        wire = torch.empty(size, dtype=self.dtype, device=values.device)
        self.encode(values, wire, piece)
        return wire

    def decode(self, wire: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write the summands of a run of blocks to `values`, flat; return that."""
        codes, side = self._split(wire)
        whole = values.numel() % self.block == 0
        rows = values if whole else values.new_empty(codes.numel())
        self.codec.decode(codes, side, rows.view(codes.shape))
        return values if whole else values.copy_(rows[: values.numel()])

    def check(self, wire: torch.Tensor, sender: int) -> None:
        """Note it in `damaged` if a run of blocks is not what a rank has encoded."""
        if isinstance(self.codec, Checksums):
            codes, side = self._split(wire)
            if side is not None and not torch.equal(_checksums(codes), side):
                self.damaged.add(sender)

    def guarded(self, ends: Completion, ref: GroupRef | None) -> Completion:
        """What ends a sum over a group; then DamagedMessageError is raised for what is noted.

        Only then: the other ranks wait for this one's part of the collective.
        """

        def guarded() -> None:
            """End the sum, and only then say what was damaged."""
            ends()
            if self.damaged:
                group = live_group(ref)
                known = [0] if group is None else dist.get_process_group_ranks(group)
                senders = " and ".join(str(known[at]) for at in sorted(self.damaged))
                here = known[lane_of(group).rank]
                self.damaged.clear()
                raise DamagedMessageError(
                    f"what rank {senders} sent was not what was summed on rank {here}: a bit "
                    "flipped in memory or on the way. Restore a checkpoint, and have the memory of "
                    "both hosts tested"
                )

        return guarded
