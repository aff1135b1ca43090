"""What a region's symbol calls on a GPU: Thunder's wrapper, plus the checks that need the real tensors' layouts.

Before a FusionDefinition is built, the descriptors of the real inputs are looked at once: nvFuser writes a target with
gaps contiguously (NVIDIA/Fuser#5356) and an overlapping one once per element, so a region with such a target raises
or runs in PyTorch for these descriptors, by mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import nvfuser_direct
import torch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from torch.autograd.graph import increment_version

from guarded_nvfuser.effects import prim_id, tensors
from guarded_nvfuser.interpreter import eager


@lru_cache(maxsize=4096)
def describe(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[bool | None, ...], tuple[int, ...]]:
    """nvFuser's descriptor of a layout: contiguity and stride order.

    Thunder 0.2.6 asks the legacy `nvfuser` module for it, which nvFuser 0.2.36 no longer ships.
    """
    return tuple(tuple(part) for part in nvfuser_direct.compute_tensor_descriptor(shape, stride))


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


class EagerRegion:
    """Stands where a FusionDefinition would, for layouts that nvFuser gets wrong: runs the region's ops in PyTorch."""

    _selected_device = None

    def __init__(self, run: Callable) -> None:
        self._run = run

    def execute(self, args: Sequence[Any], **_: Any) -> list:
        """Run the region; same parameters as `FusionDefinition.execute`, of which only the tensors matter."""
        return self._run(*args)


def guarded_wrapper(
    impl: ModuleType, stock: Any, region: BoundSymbol, refuse: Callable[[BoundSymbol, Sequence[int]], None] | None
) -> Any:
    """Thunder's wrapper of a region with working descriptors and, if the region updates anything, the layout check.

    Args:
        impl: thunder.executors.nvfuserex_impl.
        stock: the `FusionDefinitionWrapper` that Thunder made.
        region: the fusion symbol, whose subsymbols are the final body.
        refuse: called with the region and the offending target positions to raise; None: run in PyTorch instead.

    Returns:
        A `FusionDefinitionWrapper`.
    """
    inputs, bsyms = list(region.args), list(region.subsymbols)
    outputs = list(region.flat_proxy_outs)
    targets = update_targets(bsyms, inputs)

    def descriptors(args: Sequence[Any]) -> tuple:
        return tuple(
            (*describe(arg.shape, arg.stride()), impl.make_key_from_dtensor(arg))
            if isinstance(arg, torch.Tensor)
            else None
            for arg in args
        )

    def descriptors_and_gaps(args: Sequence[Any]) -> tuple:
        return descriptors(args), tuple(i for i in targets if not is_dense(args[i].shape, args[i].stride()))

    @lru_cache(maxsize=2048)
    def definition(found: tuple) -> Any:
        return impl.create_fd(bsyms, found, inputs, outputs)

    @lru_cache(maxsize=2048)
    def checked_definition(found: tuple) -> Any:
        of_inputs, gaps = found
        if not gaps:
            return definition(of_inputs)
        if refuse is not None:
            refuse(region, gaps)
        return EagerRegion(eager(bsyms, inputs, outputs, region.sym.name))

    get_fd, to_descriptors = (checked_definition, descriptors_and_gaps) if targets else (definition, descriptors)
    kind = _updating(impl.FusionDefinitionWrapper) if targets else impl.FusionDefinitionWrapper
    wrapper = kind(
        get_fd,
        to_descriptors,
        stock.name,
        stock.use_cache
        or bool(targets),  # without the cache a layout with gaps would reuse another layout's definition
        get_fd.cache_info,
        get_fd.cache_clear,
        store_inputs=stock.store_inputs,
        save_fake_inputs=stock.save_fake_inputs,
        enable_options=stock.enable_options,
        disable_options=stock.disable_options,
    )
    if targets:
        wrapper.targets = targets
    return wrapper


@cache
def _updating(wrapper: type) -> type:
    """A wrapper class whose calls bump the versions of what they update, so that autograd notices, as after eager
    writes.
    """

    class UpdatingFusion(wrapper):
        """A fusion that updates some of its inputs."""

        def __call__(self, *args: Any) -> Any:
            results = super().__call__(*args)
            for index in self.targets:
                increment_version(args[index])
            return results

    return UpdatingFusion
