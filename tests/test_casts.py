"""Casts that cancel: removed where they lose nothing, kept where they round."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from thunder.core import prims
from thunder.core.dtypes import to_dtype, to_torch_dtype
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from guarded_nvfuser.casts import _WIDER, remove_lossless_casts
from guarded_nvfuser.hazards import is_region
from tests.support import Config, compare
from tests.traces import calls, flat, one_region, ops

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FLOATS = (F16, BF16, F32, F64)


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All values of a 16-bit type; of a wider one, many, of every exponent, with their neighbours."""
    if dtype in (F16, BF16):
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    kind, bits = (torch.int32, 2**31) if dtype is F32 else (torch.int64, 2**63)
    patterns = torch.randint(-bits, bits - 1, (50_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    return patterns.to(kind).view(dtype)


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(torch.nan_to_num(a, nan=7.0), torch.nan_to_num(b, nan=7.0))


def is_wider(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """What the pass claims: a cast from the second type to the first only widens."""
    claims = {to_torch_dtype(a): [to_torch_dtype(b) for b in wider] for a, wider in _WIDER.items()}
    return wide in claims.get(narrow, ())


@pytest.mark.parametrize("first", FLOATS)
@pytest.mark.parametrize("second", FLOATS)
def test_widening_loses_nothing(first: torch.dtype, second: torch.dtype) -> None:
    values = every_value(first)
    lossless = same_values(values.to(second).to(first), values)
    assert lossless == (first == second or is_wider(second, first))


@pytest.mark.parametrize("wide", FLOATS)
@pytest.mark.parametrize("narrow", FLOATS)
def test_what_is_cast_from_a_widened_value_is_cast_from_the_value(narrow: torch.dtype, wide: torch.dtype) -> None:
    if not is_wider(wide, narrow):
        return
    values = every_value(narrow)
    assert all(same_values(values.to(wide).to(other), values.to(other)) for other in FLOATS)


def test_every_claim_is_tried() -> None:
    assert {to_torch_dtype(dtype) for part in _WIDER.items() for dtype in (part[0], *part[1])} <= set(FLOATS)


# --- the pass


def cast(value: TensorProxy, *kinds: torch.dtype) -> TensorProxy:
    for dtype in kinds:
        value = prims.convert_element_type(value, to_dtype(dtype))
    return value


def casting(*kinds: torch.dtype) -> Callable:
    """A function that casts a computed value again and again, and computes with it."""

    def casts(x: TensorProxy) -> TensorProxy:
        value = cast(prims.neg(x), *kinds)
        return prims.maximum(value, value)

    return casts


def region_of(trace: TraceCtx) -> BoundSymbol:
    [region] = [bsym for bsym in trace.bound_symbols if is_region(bsym)]
    return region


def left_of(start: torch.dtype, *kinds: torch.dtype) -> list[torch.dtype]:
    """The casts that the pass leaves between `neg` and `maximum`, in the order in which they happen."""
    region = region_of(remove_lossless_casts(one_region(casting(*kinds), torch.zeros(8, dtype=start)).fused))
    made = {out.name: bsym for bsym in region.subsymbols for out in bsym.flat_proxy_outs}
    bsym, found = made[ops(region, "maximum")[0].flat_proxy_args[0].name], []
    while bsym.sym.name == "convert_element_type":
        found.append(to_torch_dtype(bsym.output.dtype))
        bsym = made[bsym.flat_proxy_args[0].name]
    assert bsym.sym.name == "neg"
    return found[::-1]


@pytest.mark.parametrize(
    ("start", "kinds", "left"),
    [
        (F32, (F64, F32), []),  # widened and back
        (BF16, (F32, F64, BF16), []),
        (F32, (BF16, F32), [BF16, F32]),  # rounded
        (F32, (F16, F32), [F16, F32]),
        (F64, (F32, F64), [F32, F64]),
        (F32, (F64, BF16, F64), [BF16, F64]),  # the widening before the rounding goes
        (F32, (BF16, F32, F64), [BF16, F64]),  # the one before another widening too
        (F32, (BF16, F32, BF16), [BF16]),  # the second rounding rounds nothing
        (F32, (BF16, F32, F16), [BF16, F16]),
        (F32, (BF16, F16, BF16), [BF16, F16, BF16]),  # neither holds the other's values
        (F32, (torch.int32, F32), [torch.int32, F32]),
        (torch.int32, (F64, torch.int32), [F64, torch.int32]),
        (F32, (F64,), [F64]),
        (F32, (), []),
    ],
    ids=str,
)
def test_which_casts_are_left(start: torch.dtype, kinds: tuple[torch.dtype, ...], left: list[torch.dtype]) -> None:
    assert left_of(start, *kinds) == left


@pytest.mark.parametrize("start", FLOATS)
@pytest.mark.parametrize("second", FLOATS)
def test_casts_that_are_left_give_what_all_of_them_give(start: torch.dtype, second: torch.dtype) -> None:
    values = every_value(start)[:8000]
    for third in FLOATS:
        for fourth in FLOATS:
            kinds = [dtype for dtype in (second, third, fourth) if dtype is not None]
            everything, kept = values, values
            for dtype in kinds:
                everything = everything.to(dtype)
            for dtype in left_of(start, *kinds):
                kept = kept.to(dtype)
            assert same_values(everything, kept), (third, fourth)


def test_results_of_a_region_keep_their_names() -> None:
    """A result is known by its name, and it is memory of its own."""

    def both(x):
        value = prims.neg(x)
        return value, cast(value, F64, F32)

    fusion = one_region(both, torch.zeros(8))
    region = region_of(remove_lossless_casts(fusion.fused))
    made = {out.name for bsym in region.subsymbols for out in bsym.flat_proxy_outs}
    assert [out.name for out in region.flat_proxy_outs] == [out.name for out in fusion.regions[0].flat_proxy_outs]
    assert {out.name for out in region.flat_proxy_outs} <= made


def test_region_without_such_casts_stays_as_it_is() -> None:
    fusion = one_region(casting(BF16, F32), torch.zeros(8))
    assert region_of(remove_lossless_casts(fusion.fused)) is fusion.regions[0]


def test_ops_outside_regions_are_left_to_pytorch() -> None:
    trace = flat(casting(F64, F32), torch.zeros(8))
    cleaned = remove_lossless_casts(trace)
    assert all(a is b for a, b in zip(cleaned.bound_symbols, trace.bound_symbols, strict=True))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_copy_into_a_narrower_tensor_rounds(dtype: torch.dtype) -> None:
    def update(x, narrow):
        narrow.copy_(x.exp())
        return narrow.float() * 2

    def args() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.linspace(0, 1, 8), torch.zeros(8, dtype=dtype)

    assert not torch.equal(update(*args()), args()[0].exp() * 2)
    assert compare(update, args, Config()) == []


def test_time_is_linear() -> None:
    def repeat(times: int) -> TraceCtx:
        def steps(x):
            for _ in range(times):
                x = cast(prims.neg(x), F64, F32)
            return prims.neg(x)

        return one_region(steps, torch.zeros(8)).fused

    # of each pair the widening is left, for DCE: nobody reads it any more
    assert len(ops(remove_lossless_casts(repeat(60)), "convert_element_type")) == 60
    assert calls(remove_lossless_casts, repeat(480)) < 8 * 1.3 * calls(remove_lossless_casts, repeat(60))
