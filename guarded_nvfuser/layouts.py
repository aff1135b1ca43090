"""Layouts of a region's real inputs for which nvFuser would get an update wrong, and what runs instead.

nvFuser writes a target with gaps contiguously (NVIDIA/Fuser#5356) and an overlapping one once per element. For such
targets the region computes the value only, and PyTorch copies it to where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy, Variable
from thunder.core.symbol import BoundSymbol

from guarded_nvfuser.contract import Body
from guarded_nvfuser.effects import prim_id, tensors
from guarded_nvfuser.moved import moved_results

OnGaps = Callable[[BoundSymbol, Sequence[int]], None]


@lru_cache(maxsize=4096)
def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether every address in a tensor's span belongs to exactly one element: contiguous up to a permutation.

    Args:
        shape: extents, in elements.
        stride: strides, in elements.
    """
    if 0 in shape:
        return True
    expected = 1
    for step, extent in sorted((step, extent) for step, extent in zip(stride, shape) if extent != 1):
        if step != expected:
            return False
        expected *= extent
    return True


def update_targets(bsyms: Sequence[BoundSymbol], inputs: Sequence[Proxy]) -> tuple[int, ...]:
    """Positions among a region's inputs of the tensors that it updates."""
    targets = {tensors(bsym.flat_args)[1].name for bsym in bsyms if prim_id(bsym) is PrimIDs.COPY_}
    return tuple(index for index, proxy in enumerate(inputs) if proxy.name in targets)


def gaps(args: Sequence[Any], targets: Sequence[int]) -> tuple[int, ...]:
    """Positions of the updated inputs that are not dense."""
    return tuple(index for index in targets if not is_dense(args[index].shape, args[index].stride()))


@dataclass(frozen=True)
class Split:
    """A region without some of its updates, which PyTorch does behind it.

    Attributes:
        bsyms: the region's symbols without those updates.
        outputs: its outputs: for each removed update its source.
        stores: (position among `outputs`, position among the inputs) of each removed update.
        results: where the region's own outputs come from: positions among `outputs`, or, where a removed update made
            them, -1 - the position among the inputs.
    """

    bsyms: tuple[BoundSymbol, ...]
    outputs: tuple[TensorProxy, ...]
    stores: tuple[tuple[int, int], ...]
    results: tuple[int, ...]

    def finish(self, values: Sequence[torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor]:
        """Do the removed updates.

        Args:
            values: what the region gave for `outputs`.
            args: its inputs.

        Returns:
            What the whole region would have returned.
        """
        for value, target in self.stores:
            args[target].copy_(values[value])
        return [values[position] if position >= 0 else args[-1 - position] for position in self.results]


def split_off(
    bsyms: Sequence[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy], positions: Sequence[int]
) -> Split | None:
    """Take the updates of some inputs off a region.

    Args:
        bsyms: the region's symbols, outputs and inputs as they are defined.
        positions: the inputs.

    Returns:
        None where the rest would not mean the same: an input is updated twice, or with what is no value of its own.
    """
    names = {inputs[position].name: position for position in positions}
    removed = [b for b in bsyms if prim_id(b) is PrimIDs.COPY_ and tensors(b.flat_args)[1].name in names]
    sources = {Variable(out): tensors(b.flat_args)[0] for b in removed for out in tensors(b.flat_outs)}
    target_of = {out.name: names[tensors(b.flat_args)[1].name] for b in removed for out in tensors(b.flat_outs)}
    gone = set(map(id, removed))
    kept = [b for b in bsyms if id(b) not in gone]
    computed = {out.name for b in kept for out in tensors(b.flat_outs)}
    if len(removed) != len(names) or not all(source.name in computed for source in sources.values()):
        return None
    rest = [b.from_bsym_swap_proxies(sources, skip_output=True) for b in kept]
    needed = [out for out in outputs if out.name not in target_of] + list(sources.values())
    unique = {out.name: out for out in needed}
    places = {name: index for index, name in enumerate(unique)}
    split = Split(
        tuple(rest),
        tuple(unique.values()),
        tuple((places[sources[result].name], target_of[result.proxy.name]) for result in sources),
        tuple(-1 - target_of[out.name] if out.name in target_of else places[out.name] for out in outputs),
    )
    moved = moved_results(Body(split.bsyms, tensors(inputs), split.outputs))
    return split if next(moved, None) is None else None


class Detour:
    """Stands where a FusionDefinition would, for layouts that nvFuser would get wrong."""

    def __init__(self, run: Callable, device: Any = None) -> None:
        self._run, self._selected_device = run, device

    def execute(self, args: Sequence[Any], **options: Any) -> list:
        """Run the region; parameters as of `FusionDefinition.execute`."""
        return self._run(args, **options)
