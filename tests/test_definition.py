"""Real FusionDefinitions, and the layouts for which there is none.

Without a GPU, arguments are fake CUDA tensors: compiling goes through to a real definition and stops at the launch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import nvfuser_direct
import pytest
import thunder
import torch
from thunder.core.dtypes import to_torch_dtype
from thunder.core.symbol import BoundSymbol
from torch._subclasses.fake_tensor import FakeTensorMode

from guarded_nvfuser import HazardError, HazardWarning, Kind, guarded_nvfuser_ex, on_hazard
from guarded_nvfuser.definition import describe
from guarded_nvfuser.executor import InterpretableNvFuserExecutor, impl
from guarded_nvfuser.hazards import is_region
from guarded_nvfuser.layouts import Detour
from guarded_nvfuser.options import INTERPRET_VARIABLE
from tests.quality import PAIRS

DENSE = ((4, 6), (6, 1))


@pytest.fixture(autouse=True)
def real_nvfuser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERPRET_VARIABLE, raising=False)


@dataclass(frozen=True)
class Region:
    """A region's symbol in the final trace, and what it calls."""

    bsym: BoundSymbol
    wrapper: Any

    def define(self, *tensors: Any) -> Any:
        """What the region would execute for arguments with these layouts."""
        return self.wrapper.get_fd(self.wrapper.to_descriptors(tensors))


def compiled(fn: Callable, *layouts: tuple, mode: str = "rewrite", executor: Any = guarded_nvfuser_ex, **options: Any):
    """The regions of a function for CUDA arguments of some layouts: (shape, strides), or (shape, strides, dtype)."""
    jitted = thunder.jit(fn, executors=[executor], guard_on_hazard=mode, **options)
    if torch.cuda.is_available():
        jitted(*[cuda_tensor(*layout) for layout in layouts])
    else:
        with FakeTensorMode():
            args = [cuda_tensor(*layout) for layout in layouts]
        with pytest.raises(RuntimeError, match="CUDA"):  # at the launch: the definition is made
            jitted(*args)
    bsyms = filter(is_region, thunder.last_traces(jitted)[-1].bound_symbols)
    return [Region(bsym, bsym._call_ctx[bsym.sym.name]) for bsym in bsyms]


def cuda_tensor(shape: tuple, strides: tuple, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


def zeros(layout: tuple = DENSE) -> torch.Tensor:
    return torch.zeros(layout[0]).as_strided(*layout)


def double(x, y):
    return x.mul_(2) + y


def scale(x, y):
    return x.mul_(y)


# --- what is defined


def test_update_is_an_aliased_output() -> None:
    """The written argument is an output that nvFuser stores into the input, found by name in the real definition."""
    [region] = compiled(scale, DENSE, DENSE)
    definition = region.define(zeros(), zeros())
    assert isinstance(definition, nvfuser_direct.FusionDefinition)
    text = repr(definition)
    assert re.search(r"tv2 = fd\.ops\.mul\(tv0, tv1\)", text)
    [aliased] = re.findall(r"fd\.add_output\((tv\d+), (tv\d+)\)", text)
    assert aliased[1] == "tv0"


def test_untouched_arguments_are_no_aliased_outputs() -> None:
    """Only what the program writes is an aliased output, each of several to its own input."""

    def fn(x, y, z):
        x.add_(z)
        y.mul_(z)
        return z + 1

    [region] = compiled(fn, DENSE, DENSE, DENSE)
    names = [arg.name for arg in region.bsym.args]
    text = repr(region.define(zeros(), zeros(), zeros()))
    inputs = re.findall(r"(tv\d+) = fd\.define_tensor", text)
    aliased = {target for _, target in re.findall(r"fd\.add_output\((tv\d+), (tv\d+)\)", text)}
    assert aliased == {inputs[names.index(name)] for name in ("x", "y")}
    assert region.wrapper.targets == tuple(sorted(names.index(name) for name in ("x", "y")))


def test_without_an_update_the_wrapper_is_thunders() -> None:
    """A region that writes nothing gets Thunder's own wrapper, no check, and no aliased output."""
    [region] = compiled(lambda x, y: x * y, DENSE, DENSE)
    assert type(region.wrapper) is impl.FusionDefinitionWrapper
    assert region.wrapper.to_descriptors((zeros(), zeros())) == (((True, True), (1, 0), ()),) * 2
    assert re.search(r"add_output\(tv\d+, ", repr(region.define(zeros(), zeros()))) is None


def test_wrapper_is_a_thunder_wrapper_with_the_users_options() -> None:
    """What Thunder's tools ask of a region's wrapper holds for an updating one, options included."""
    options = {
        "nv_store_fusion_inputs": True,
        "nv_save_fake_inputs": False,
        "nv_enable_options": ["fuse_matmul"],
        "nv_disable_options": ["kernel_reuse"],
    }
    for fn in (scale, lambda x, y: x * y):
        [region] = compiled(fn, DENSE, DENSE, **options)
        wrapper = region.wrapper
        assert isinstance(wrapper, impl.FusionDefinitionWrapper)
        assert wrapper.name.startswith("nvFusion0: (mul")
        assert (wrapper.store_inputs, wrapper.save_fake_inputs) == (True, False)
        assert (wrapper.enable_options, wrapper.disable_options) == (["fuse_matmul"], ["kernel_reuse"])
        assert [tuple(value.shape) for value in wrapper.last_inputs] == [(4, 6), (4, 6)]


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.name != "adamw"], ids=lambda pair: pair.name)
def test_every_region_of_the_quality_programs_is_defined(pair: Any) -> None:
    """nvFuser accepts each region that the rewrite makes of real programs, with every write-back that joined it."""
    args = pair.make_args()
    regions = compiled(pair.program, *[(arg.shape, arg.stride(), arg.dtype) for arg in args])
    assert regions
    for region in regions:
        inputs = [
            torch.zeros(tuple(proxy.shape), dtype=to_torch_dtype(proxy.dtype)) for proxy in region.bsym.flat_proxy_args
        ]
        text = repr(region.define(*inputs))
        updates = [sub for sub in region.bsym.subsymbols if sub.sym.name == "copy_"]
        assert len(re.findall(r"add_output\(tv\d+, tv\d+\)", text)) == len(updates)


# --- descriptors


@pytest.mark.parametrize(
    "tensor, contiguity, order",
    [
        (torch.zeros(4, 6), (True, True), (1, 0)),
        (torch.zeros(6, 4).t(), (True, True), (0, 1)),
        (torch.zeros(4, 12)[:, :6], (False, True), (1, 0)),
        (torch.zeros(4, 12)[:, ::2], (True, False), (1, 0)),
        (torch.zeros(4, 1).expand(4, 6), (True, None), (1, 0)),
        (torch.zeros(4, 1), (True, None), (1, 0)),
        (torch.zeros(()), (), ()),
    ],
)
def test_descriptors_say_how_a_tensor_lies(tensor: torch.Tensor, contiguity: tuple, order: tuple) -> None:
    """Contiguity and stride order are nvFuser's own answer for the layout, computed once per layout."""
    assert describe(tensor.shape, tensor.stride()) == (contiguity, order)
    before = describe.cache_info().misses
    describe(tuple(tensor.shape), tensor.stride())
    assert describe.cache_info().misses == before


def test_numbers_have_no_descriptor() -> None:
    """Arguments that are no tensors are described by nothing."""
    [region] = compiled(lambda x, y: x * y, DENSE, DENSE)
    assert region.wrapper.to_descriptors((zeros(), 2.5))[1] is None


# --- layouts that nvFuser gets wrong

GAPS = {
    "columns": lambda: torch.zeros(4, 12)[:, :6],
    "every second row": lambda: torch.zeros(8, 6)[::2],
    "every second column": lambda: torch.zeros(4, 12)[:, ::2],
    "chunk of packed": lambda: torch.zeros(4, 18).chunk(3, 1)[1],
    "permuted with gaps": lambda: torch.zeros(6, 8)[:, ::2].t(),
}
OVERLAPPING = {
    "expanded": lambda: torch.zeros(1, 6).expand(4, 6),
    "sliding": lambda: torch.zeros(9).as_strided((4, 6), (1, 1)),
}
BAD_LAYOUTS = GAPS | OVERLAPPING
GOOD_LAYOUTS = {
    "contiguous": lambda: torch.zeros(4, 6),
    "transposed": lambda: torch.zeros(6, 4).t(),
    "offset": lambda: torch.zeros(30)[5:29].view(4, 6),
    "rows of a buffer": lambda: torch.zeros(10, 6)[2:6],
}


def with_target(region: Region, target: torch.Tensor) -> list[torch.Tensor]:
    """Arguments for a region of two inputs and one target."""
    return [target if index in region.wrapper.targets else zeros() for index in range(2)]


def filled(make: Callable, value: float, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of a layout, and all the memory around it, both full of a value."""
    layout = make()
    memory = torch.full((layout.untyped_storage().nbytes() // 4,), value, device=device)
    return memory.as_strided(layout.shape, layout.stride(), layout.storage_offset()), memory


@pytest.mark.parametrize("make", BAD_LAYOUTS.values(), ids=list(BAD_LAYOUTS))
@pytest.mark.parametrize("mode", ["rewrite", "fallback"])
def test_bad_targets_are_written_by_pytorch(make: Callable, mode: str) -> None:
    """nvFuser writes an updated input contiguously: a target that does not lie so is left to PyTorch, once warned of."""
    [region] = compiled(scale, DENSE, DENSE, mode=mode)
    with pytest.warns(HazardWarning, match=r"GNV008.*`x.mul_\(y\)`") as told:
        for _ in range(2):
            assert isinstance(region.define(*with_target(region, make())), Detour)
    assert len(told) == 1


@pytest.mark.parametrize("make", BAD_LAYOUTS.values(), ids=list(BAD_LAYOUTS))
def test_targets_with_gaps_are_refused_in_mode_raise(make: Callable) -> None:
    """In mode raise such a target is an error when the region is called with it, at the user's line."""
    [region] = compiled(scale, DENSE, DENSE, mode="raise")
    with pytest.raises(HazardError) as refused:
        region.define(*with_target(region, make()))
    [hazard] = refused.value.hazards
    assert (hazard.kind, hazard.region) == (Kind.LAYOUT, "nvFusion0")
    assert "error[GNV008]" in str(refused.value)
    assert "x.mul_(y)" in str(refused.value)
    assert region.define(zeros(), zeros()) is region.define(zeros(), zeros())


@pytest.mark.parametrize("make", GOOD_LAYOUTS.values(), ids=list(GOOD_LAYOUTS))
@pytest.mark.parametrize("mode", ["rewrite", "raise", "fallback"])
def test_dense_targets_stay_with_nvfuser(make: Callable, mode: str) -> None:
    """A target without gaps, permuted or not, wherever it lies in a buffer, is nvFuser's, with its strides kept."""
    [region] = compiled(scale, DENSE, DENSE, mode=mode)
    definition = region.define(*with_target(region, make()))
    assert isinstance(definition, nvfuser_direct.FusionDefinition)
    assert ("stride_order=[0, 1]" in repr(definition)) == (make().stride() == (1, 4))


def test_gaps_in_what_is_only_read_do_not_matter() -> None:
    """Layouts of tensors that a region does not write are nvFuser's business."""
    [region] = compiled(double, DENSE, DENSE)
    names = [arg.name for arg in region.bsym.args]
    args = [GAPS["columns"]() if name == "y" else zeros() for name in names]
    assert isinstance(region.define(*args), nvfuser_direct.FusionDefinition)


def test_each_layout_is_decided_once() -> None:
    """The check costs one definition per layout: later calls with the layout find it in the cache."""
    [region] = compiled(scale, DENSE, DENSE)
    wrapper = region.wrapper
    wrapper.cache_clear()
    layouts = [zeros(), GAPS["columns"](), zeros(((4, 6), (1, 4)))]
    first = [region.define(*with_target(region, layout)) for layout in layouts]
    assert (wrapper.cache_info().misses, wrapper.cache_info().hits) == (3, 0)
    again = [region.define(*with_target(region, layout)) for layout in layouts]
    assert (wrapper.cache_info().misses, wrapper.cache_info().hits) == (3, 3)
    assert [a is b for a, b in zip(first, again)] == [True] * 3
    assert [isinstance(each, Detour) for each in first] == [False, True, False]


def test_refusals_are_not_kept() -> None:
    """A refused layout is refused again, and does not stand in the way of a good one."""
    [region] = compiled(scale, DENSE, DENSE, mode="raise")
    for _ in range(2):
        with pytest.raises(HazardError):
            region.define(*with_target(region, GAPS["columns"]()))
    assert isinstance(region.define(zeros(), zeros()), nvfuser_direct.FusionDefinition)


def test_the_mode_is_that_of_the_compilation() -> None:
    """What happens on a bad layout is decided when the region is compiled, not when it is called."""
    [region] = compiled(scale, DENSE, DENSE, mode="fallback")
    with on_hazard("raise"):
        assert isinstance(region.define(*with_target(region, GAPS["columns"]())), Detour)


@pytest.mark.parametrize("skip", [False, True])
def test_skipping_the_cache_does_not_skip_the_check(skip: bool) -> None:
    """Thunder's option reuses the last definition for any layout; a region that updates something still looks."""
    [updating] = compiled(scale, DENSE, DENSE, nv_skip_cache=skip)
    [pure] = compiled(lambda x, y: x * y, DENSE, DENSE, nv_skip_cache=skip)
    assert updating.wrapper.use_cache is True
    assert pure.wrapper.use_cache is not skip


def test_stock_stand_in_checks_layouts_too() -> None:
    """The executor that guards nothing else never writes over neighbours: the demo calls it on a GPU."""
    stock = InterpretableNvFuserExecutor("stock_nvfuser")
    [region] = compiled(scale, DENSE, DENSE, executor=stock)
    assert isinstance(region.define(*with_target(region, GAPS["columns"]())), Detour)


# --- versions, which autograd compares


class Stored:
    """Stands in for a FusionDefinition, none of which can be executed without a device."""

    _selected_device = None

    def execute(self, args: Any, **_: Any) -> list:
        """Store through a pointer, as nvFuser does: PyTorch does not notice."""
        before = [arg._version for arg in args]
        args[0].numpy()[...] = 7.0
        assert [arg._version for arg in args] == before
        return [args[0]]


def test_versions_of_updated_inputs_are_bumped() -> None:
    """nvFuser stores behind PyTorch's back; the version counter of each updated input, and of no other, moves on."""
    [region] = compiled(scale, DENSE, DENSE)
    assert region.wrapper.targets == (0,)
    region.wrapper.get_fd = lambda descriptors: Stored()
    x, y = zeros(), zeros()
    for call in (1, 2):
        [result] = region.wrapper(x, y)
        assert result is x
        assert (x._version, y._version) == (call, 0)
    assert x.eq(7.0).all()


def test_a_stale_save_is_noticed_by_autograd() -> None:
    """So a tensor that eager saved for backward, then updated by a region, makes the backward fail as in eager."""
    [region] = compiled(scale, DENSE, DENSE)
    region.wrapper.get_fd = lambda descriptors: Stored()
    x, w = zeros(), zeros().requires_grad_()
    loss = (w * x).sum()
    region.wrapper(x, zeros())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.gpu
@pytest.mark.parametrize("make", [*GAPS.values(), *GOOD_LAYOUTS.values()], ids=[*GAPS, *GOOD_LAYOUTS])
def test_layouts_on_a_gpu(make: Callable) -> None:
    """Real nvFuser, or PyTorch in its place, changes the target and nothing beside it, and bumps its version."""
    x, memory = filled(make, 5.0, "cuda")
    y, version = torch.full((4, 6), 3.0, device="cuda"), x._version
    thunder.jit(scale, executors=[guarded_nvfuser_ex])(x, y)
    assert x.eq(15.0).all()
    assert memory.eq(5.0).sum() == memory.numel() - x.numel()
    assert x._version > version
    assert y._version == 0
