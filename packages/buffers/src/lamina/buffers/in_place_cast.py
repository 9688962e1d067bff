"""Casts a region of memory to another dtype within the same storage."""

import torch

__all__ = ["cast_in_place"]

# Elements that go through a temporary where source and destination overlap.
_HEAD = 1 << 16


def cast_in_place(region: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a flat tensor to `dtype` inside its own storage and return a view of the result.

    The result starts at the region's first byte. `region` itself must not be read afterwards.

    Args:
        region: flat and contiguous.
        dtype: as wide, narrower, or wider where the storage has room behind the region.

    Raises:
        ValueError: not flat, or the storage is too small for the wider result. Says both sizes.
    """
    if region.dim() != 1 or not region.is_contiguous():
        raise ValueError(f"cast_in_place needs a flat, contiguous tensor, got {region.shape}")
    numel, old, new = region.numel(), region.element_size(), dtype.itemsize
    byte = region.storage_offset() * old
    storage = region.untyped_storage()
    if byte % new or byte + numel * new > storage.nbytes():
        raise ValueError(
            f"cast_in_place: {numel} elements of {dtype} need {numel * new} bytes from byte {byte} "
            f"(a multiple of {new}); the storage has {storage.nbytes()}"
        )
    result = torch.empty(0, dtype=dtype, device=region.device).set_(
        storage, byte // new, (numel,), (1,)
    )
    with torch.no_grad():
        if new <= old:
            _shrink(region, result)
        else:
            _grow(region, result)
    return result


def _shrink(source: torch.Tensor, target: torch.Tensor) -> None:
    """Forwards in pieces that double: the second half of a prefix is written over its first."""
    numel = source.numel()
    same = source.element_size() == target.element_size()
    done = 0
    while done < numel:
        # With equal widths each piece lies exactly on itself, so all go through the temporary.
        stop = min(numel, done + _HEAD if same or done < _HEAD else 2 * done)
        piece = source[done:stop]
        target[done:stop].copy_(piece.to(target.dtype) if same or done < _HEAD else piece)
        done = stop


def _grow(source: torch.Tensor, target: torch.Tensor) -> None:
    """Backwards in pieces that halve: the second half of a prefix lands behind its source."""
    stop = source.numel()
    while stop:
        start = (stop + 1) // 2 if stop > _HEAD else 0
        piece = source[start:stop]
        target[start:stop].copy_(piece if start else piece.to(target.dtype))
        stop = start
