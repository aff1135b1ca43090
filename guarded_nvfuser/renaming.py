"""Bound symbols with other operands, all names changed at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol


def renamed(bsym: BoundSymbol, swap: Mapping[str, Proxy], *, outputs: bool = False) -> BoundSymbol:
    """A symbol that reads other tensors.

    Args:
        bsym: any bound symbol; its parts are renamed too.
        swap: the proxy that stands for each name. All are swapped at once, where thunder's `from_bsym_swap_proxies`
            follows chains: with x -> y and y -> z it takes x for z
            (tests/test_rewrite.py::test_a_copy_and_its_changed_source_are_read_together).
        outputs: rename what the symbol defines too.

    Returns:
        The renamed symbol; the same one if nothing is swapped.
    """
    if not swap:
        return bsym

    def other(value: Any) -> Any:
        return swap.get(value.name, value) if isinstance(value, Proxy) else value

    return bsym.from_bsym(
        args=tree_map(other, bsym.args),
        kwargs=tree_map(other, bsym.kwargs),
        output=tree_map(other, bsym.output) if outputs else bsym.output,
        subsymbols=tuple(renamed(part, swap, outputs=outputs) for part in bsym.subsymbols),
    )
