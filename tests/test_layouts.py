"""Layouts that nvFuser would get wrong: which they are, and what runs instead of an update of such a tensor."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch
from thunder.core.symbol import BoundSymbol

from guarded_nvfuser import HazardError, HazardWarning, Kind, cost, guarded_nvfuser_ex
from guarded_nvfuser.executor import InterpretableNvFuserExecutor
from guarded_nvfuser.hazards import is_region
from guarded_nvfuser.layouts import gaps, is_dense, split_off, update_targets
from guarded_nvfuser.options import INTERPRET_VARIABLE, Schedule, schedule
from tests.generator import put

GAPS = {
    "columns": lambda: torch.zeros(4, 12)[:, :6],
    "every second row": lambda: torch.zeros(8, 6)[::2],
    "every second column": lambda: torch.zeros(4, 12)[:, ::2],
    "chunk of a packed buffer": lambda: torch.zeros(4, 18).chunk(3, dim=1)[1],
}


@pytest.fixture(autouse=True)
def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERPRET_VARIABLE, "1")


def every_layout() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes with extents to 3 and strides to 6, in up to two dimensions, and a few in three."""
    found = [((), ())]
    for extent, stride in itertools.product(range(4), range(7)):
        found.append(((extent,), (stride,)))
    for shape in itertools.product(range(1, 4), repeat=2):
        found += [(shape, strides) for strides in itertools.product(range(7), repeat=2)]
    for strides in itertools.product((0, 1, 2, 3, 4, 6), repeat=3):
        found.append(((2, 3, 1), strides))
    return found


def test_dense_means_every_address_once() -> None:
    """A layout is dense exactly where its elements lie on one address each, without gaps: tried on every address."""
    counts = {True: 0, False: 0}
    for shape, strides in every_layout():
        addresses = [
            sum(index * stride for index, stride in zip(indices, strides))
            for indices in itertools.product(*map(range, shape))
        ]
        every_address_once = sorted(addresses) == list(range(len(addresses)))
        assert is_dense(shape, strides) is every_address_once, (shape, strides)
        counts[every_address_once] += 1
    assert min(counts.values()) > 50


def two(x, y, w):
    total = (x * w).sum(0)
    x.mul_(w)
    y.add_(x)
    return total


def regions(jitted: Callable) -> list[BoundSymbol]:
    return [bsym for bsym in thunder.last_traces(jitted)[-1].bound_symbols if is_region(bsym)]


def filled(make: Callable[[], torch.Tensor], value: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of a layout, and all the memory around it, both full of a value."""
    layout = make()
    memory = torch.full((layout.untyped_storage().nbytes() // 4,), value)
    return memory.as_strided(layout.shape, layout.stride(), layout.storage_offset()), memory


def dense() -> torch.Tensor:
    return torch.zeros(4, 6)


def outcome(fn: Callable, *makes: Callable) -> tuple[Any, list[torch.Tensor]]:
    args, memories = zip(*[filled(make, 2.0 + index) for index, make in enumerate(makes)])
    return fn(*args), list(memories)


@pytest.mark.parametrize("which", list(Schedule))
@pytest.mark.parametrize("make", GAPS.values(), ids=list(GAPS))
@pytest.mark.parametrize("mode", ["rewrite", "fallback"])
def test_only_the_copy_leaves_the_region(mode: str, make: Callable, which: Schedule) -> None:
    """A target with gaps is written by PyTorch, its neighbours stay, and one compiled function takes any layout."""
    jitted = thunder.jit(two, executors=[guarded_nvfuser_ex], guard_on_hazard=mode)
    for makes in ((dense, dense, dense), (make, dense, dense), (dense, make, dense), (make, make, make)):
        with schedule(which), warnings.catch_warnings():
            warnings.simplefilter("ignore", HazardWarning)
            got, memories = outcome(jitted, *makes)
        expected, eager_memories = outcome(two, *makes)
        assert torch.equal(got, expected)
        assert all(map(torch.equal, memories, eager_memories))


def test_the_rest_of_the_region_stays_fused() -> None:
    """What is split off is the update alone; the region computes its value, and every other update."""
    jitted = thunder.jit(two, executors=[guarded_nvfuser_ex])
    jitted(dense(), dense(), dense())
    [region] = regions(jitted)
    inputs, outputs = region.flat_proxy_args, region.flat_proxy_outs
    targets = update_targets(region.subsymbols, inputs)
    assert [inputs[index].name for index in targets] == ["x", "y"]
    for positions in ((targets[0],), (targets[1],), targets):
        split = split_off(region.subsymbols, inputs, outputs, positions)
        assert sum(bsym.sym.name == "copy_" for bsym in split.bsyms) == 2 - len(positions)
        assert len(split.bsyms) == len(region.subsymbols) - len(positions)
        assert [target for _, target in split.stores] == list(positions)
        assert len(split.results) == len(outputs)
        assert [-1 - at for at in split.results if at < 0] == list(positions)


def test_results_that_were_updated_come_back_as_themselves() -> None:
    """As from the whole region, an updated input that is a result is that tensor."""
    jitted = thunder.jit(lambda x, w: x.mul_(w), executors=[guarded_nvfuser_ex])
    x, _ = filled(GAPS["columns"], 2.0)
    with pytest.warns(HazardWarning):
        assert jitted(x, dense()) is x


def swapped(x, y):
    t = x * 1.5
    put(y, x)
    put(t, y)
    return t.sum()


def test_what_cannot_be_split_off_runs_in_pytorch() -> None:
    """An update whose source is an input, not a value of the region, is done where it stands, in program order."""
    stock = thunder.jit(
        swapped,
        executors=[InterpretableNvFuserExecutor("stock")],
        skip_inplace_alias_updates=True,
        disable_inplace_copy_check=True,
    )
    stock(dense(), dense())
    [region] = regions(stock)
    inputs = region.flat_proxy_args
    assert split_off(region.subsymbols, inputs, region.flat_proxy_outs, update_targets(region.subsymbols, inputs)) is None
    jitted = thunder.jit(swapped, executors=[guarded_nvfuser_ex])
    for makes in itertools.product((dense, GAPS["columns"]), repeat=2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HazardWarning)
            got, memories = outcome(jitted, *makes)
        expected, eager_memories = outcome(swapped, *makes)
        assert torch.allclose(got, expected)
        assert all(map(torch.equal, memories, eager_memories))


def test_layouts_are_told_once() -> None:
    """The warning names the write in the source, once per region and layout; later calls are quiet."""
    jitted = thunder.jit(two, executors=[guarded_nvfuser_ex])
    with warnings.catch_warnings():
        warnings.simplefilter("error", HazardWarning)
        jitted(dense(), dense(), dense())
    with pytest.warns(HazardWarning) as told:
        for _ in range(3):
            jitted(filled(GAPS["columns"], 1.0)[0], dense(), dense())
    [warning] = [each for each in told if each.category is HazardWarning]
    assert "[GNV008]" in str(warning.message)
    assert "x.mul_(w)" in str(warning.message)


@pytest.mark.parametrize("make", GAPS.values(), ids=list(GAPS))
def test_mode_raise_refuses_before_anything_is_written(make: Callable) -> None:
    """In mode raise the layout is an error at the call, with every tensor untouched, and the next call works."""
    jitted = thunder.jit(scale, executors=[guarded_nvfuser_ex], guard_on_hazard="raise")
    for _ in range(2):
        x, memory = filled(make, 5.0)
        with pytest.raises(HazardError) as refused:
            jitted(x, torch.full((4, 6), 3.0))
        [hazard] = refused.value.hazards
        assert hazard.kind is Kind.LAYOUT
        assert "x.mul_(w)" in str(refused.value)
        assert memory.eq(5.0).all()
        assert jitted(torch.full((4, 6), 5.0), torch.full((4, 6), 3.0)).eq(15.0).all()


def scale(x, w):
    return x.mul_(w)


def test_expanded_targets_are_refused_as_in_eager() -> None:
    """PyTorch refuses to write several elements to one address, and so does what stands in the region's place."""
    jitted = thunder.jit(scale, executors=[guarded_nvfuser_ex])
    for fn in (scale, jitted):
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", HazardWarning)
                fn(torch.ones(4, 1).expand(4, 6), dense())


def test_one_region_and_no_more_bytes() -> None:
    """Looking at layouts costs no structure: the function stays one region."""
    jitted = thunder.jit(two, executors=[guarded_nvfuser_ex])
    jitted(dense(), dense(), dense())
    assert (cost(jitted).regions, cost(jitted).ops) == (1, 0)


def test_gaps_are_asked_of_targets_only() -> None:
    """Positions of the targets that are not dense, whatever the other arguments look like."""
    columns = GAPS["columns"]()
    assert gaps([columns, dense(), columns], (0, 1)) == (0,)
    assert gaps([columns, 2.5], ()) == ()
