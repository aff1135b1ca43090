"""What a region's symbol calls on a GPU: Thunder's wrapper, plus the checks that need the real tensors' layouts.

Before a FusionDefinition is built, the descriptors of the real inputs are looked at once: an update of a target that
nvFuser would get wrong (layouts.py) raises or is done by PyTorch for these descriptors, by mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import nvfuser_direct
import torch
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from torch.autograd.graph import increment_version

from guarded_nvfuser.interpreter import eager
from guarded_nvfuser.layouts import Detour, OnGaps, gaps, split_off, update_targets
from guarded_nvfuser.lowering import isolated


@lru_cache(maxsize=4096)
def describe(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[bool | None, ...], tuple[int, ...]]:
    """nvFuser's descriptor of a layout: contiguity and stride order.

    Thunder 0.2.6 asks the legacy `nvfuser` module for it, which nvFuser 0.2.36 no longer ships.
    """
    return tuple(tuple(part) for part in nvfuser_direct.compute_tensor_descriptor(shape, stride))


def guarded_wrapper(
    impl: ModuleType, stock: Any, region: BoundSymbol, on_gaps: OnGaps, stored: frozenset[str] | None = None
) -> Any:
    """Thunder's wrapper of a region with working descriptors and, if the region updates anything, the layout check.

    Args:
        impl: thunder.executors.nvfuserex_impl.
        stock: the `FusionDefinitionWrapper` that Thunder made.
        region: the fusion symbol, whose subsymbols are the final body.
        on_gaps: called once per layout with the region and the offending targets' positions; it may raise.
        stored: names of the results of the updates that need not be isolated (lowering.py); None: of all.

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
        return descriptors(args), gaps(args, targets)

    def define(body: Sequence[BoundSymbol], of_inputs: tuple, outs: Sequence[Proxy]) -> Any:
        body = list(body) if stored is None else isolated(body, stored)
        return impl.create_fd(body, of_inputs, inputs, list(outs))

    @lru_cache(maxsize=2048)
    def definition(found: tuple) -> Any:
        return define(bsyms, found, outputs)

    @lru_cache(maxsize=2048)
    def checked_definition(found: tuple) -> Any:
        of_inputs, positions = found
        if not positions:
            return definition(of_inputs)
        on_gaps(region, positions)
        split = split_off(bsyms, inputs, outputs, positions)
        if split is None:
            run = eager(bsyms, inputs, outputs, region.sym.name)
            return Detour(lambda args, **_: run(*args))
        part = define(split.bsyms, of_inputs, split.outputs)
        return Detour(lambda args, **options: split.finish(part.execute(args, **options), args), part._selected_device)

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
