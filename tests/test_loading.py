"""Finding Thunder and nvFuser: what is refused, what is left alone, and what the executor is to Thunder."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import thunder
import torch
from thunder.core.proxies import TensorProxy

import guarded_nvfuser
from guarded_nvfuser import GuardedNvFuserExecutor, cost, guarded_nvfuser_ex, loading, verdicts
from guarded_nvfuser.executor import impl
from guarded_nvfuser.hazards import is_region

ROOT = Path(guarded_nvfuser.__file__).parents[1]
IMPORTED_EARLY = "modules import nvfuser_direct at their top, before `loading` can say which wheel is missing"


def run_python(source: str, *paths: Path, **variables: str) -> subprocess.CompletedProcess:
    """A script in a process of its own that sees no GPU and has none of this library's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GUARDED_NVFUSER_")}
    search = os.pathsep.join(map(str, (*paths, ROOT)))
    return subprocess.run(
        [sys.executable, "-c", source],
        env=kept | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": search} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def scale_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Two regions with a matmul between them, and one write."""
    x.mul_(2)
    y = (x + 1) @ w
    return (y * 3).sin()


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(3, 3), torch.eye(3)


def regions(jitted: Callable) -> list[str]:
    return [bsym.sym.name for bsym in thunder.last_traces(jitted)[-1].bound_symbols if is_region(bsym)]


# --- wheels and platforms


@pytest.mark.parametrize(
    "torch_version, cuda, requirement",
    [
        ("2.10.0+cu128", "12.8", "nvfuser-cu128-torch210==0.2.36.dev20260301"),
        ("2.10.1", "12.6", "nvfuser-cu126-torch210==0.2.36.dev20260301"),
        ("2.10.0+cu130", "13.0", "nvfuser-cu130-torch210==0.2.36.dev20260301"),
        ("2.10.0+cpu", None, "nvfuser-cu128-torch210==0.2.36.dev20260301"),
        ("2.9.1+cu130", "13.0", "nvfuser-cu130-torch29"),
        ("2.11.0a0+git1234", "13.0", "nvfuser-cu130-torch211"),
    ],
)
def test_wheel_name(torch_version: str, cuda: str | None, requirement: str) -> None:
    """The wheel is named after torch and CUDA, and pinned only where this library was tested with it."""
    assert loading.wheel_name(torch_version, cuda) == requirement


@pytest.mark.parametrize("system, machine", [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "aarch64")])
def test_other_platforms_are_refused(system: str, machine: str) -> None:
    """nvFuser has no wheel there; the message says so and what to do instead."""
    with pytest.raises(ImportError, match=f"no wheel for {system} {machine}.*thunder.jit"):
        loading.check_platform(system, machine)


@pytest.mark.parametrize("machine", ["x86_64", "AMD64"])
def test_linux_is_accepted(machine: str) -> None:
    """The one platform with wheels passes, under both of its names."""
    assert loading.check_platform("Linux", machine) is None


@pytest.mark.xfail(strict=True, raises=AssertionError, reason=IMPORTED_EARLY)
def test_missing_nvfuser_names_the_wheel() -> None:
    """Without nvFuser, importing the library fails with the command that installs the right wheel."""
    done = run_python("import sys; sys.modules['nvfuser_direct'] = None; import guarded_nvfuser")
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: guarded_nvfuser needs nvFuser, which is not installed.")
    assert f"pip install '{loading.wheel_name(torch.__version__, torch.version.cuda)}'" in message


@pytest.mark.xfail(strict=True, raises=AssertionError, reason=IMPORTED_EARLY)
def test_broken_nvfuser_says_why(tmp_path: Path) -> None:
    """An nvFuser that does not import here (a release that needs a driver) is reported with its own error."""
    package = tmp_path / "nvfuser_direct"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')")
    done = run_python("import guarded_nvfuser", tmp_path)
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert "does not import here (libcuda.so.1: cannot open shared object file)" in message
    assert "Releases before 0.2.36 need an NVIDIA driver" in message


# --- Thunder's signatures


def copied_impl() -> types.SimpleNamespace:
    """Thunder's module as far as this library calls it, to be changed in a test."""
    methods = {name: getattr(impl.nvFuserExecutor, name) for owner, name, _ in loading.EXPECTED_SIGNATURES if owner}
    functions = {name: getattr(impl, name) for owner, name, _ in loading.EXPECTED_SIGNATURES if not owner}
    return types.SimpleNamespace(nvFuserExecutor=type("nvFuserExecutor", (), methods), **functions)


def test_installed_thunder_fits() -> None:
    """Everything that the library overrides or calls has the parameters that it was written for."""
    assert loading.check_signatures(impl) is None
    assert loading.check_signatures(copied_impl()) is None


@pytest.mark.parametrize("owner, name, parameters", loading.EXPECTED_SIGNATURES, ids=lambda value: str(value)[:30])
def test_missing_function_is_refused(owner: str, name: str, parameters: tuple[str, ...]) -> None:
    """A release of Thunder without one of them is refused by name, with the releases that fit."""
    changed = copied_impl()
    delattr(changed.nvFuserExecutor if owner else changed, name)
    with pytest.raises(ImportError) as refused:
        loading.check_signatures(changed)
    assert f"{owner}.{name}".lstrip(".") in str(refused.value)
    assert "is missing" in str(refused.value)
    assert "lightning-thunder>=0.2.6,<0.3" in str(refused.value)


def test_changed_signature_is_refused() -> None:
    """A method that takes other parameters is refused, with both lists."""
    changed = copied_impl()
    changed.nvFuserExecutor.fuse = lambda self, region, fusion_counter, options: None
    with pytest.raises(
        ImportError, match=r"nvFuserExecutor\.fuse.*takes \('self', 'region', 'fusion_counter', 'options'"
    ):
        loading.check_signatures(changed)


def test_expected_signatures_cover_the_overrides() -> None:
    """Every method of Thunder's executor that the library overrides is compared before it is overridden."""
    compared = {name for owner, name, _ in loading.EXPECTED_SIGNATURES if owner == "nvFuserExecutor"}
    own = [cls for cls in GuardedNvFuserExecutor.__mro__ if cls.__module__ == "guarded_nvfuser.executor"]
    overridden = {
        name
        for cls in own
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and name != "__init__" and hasattr(impl.nvFuserExecutor, name)
    }
    assert overridden
    assert overridden <= compared


# --- what importing changes


def test_stock_registry_is_untouched_without_a_device() -> None:
    """Importing registers one executor, leaves the default list and Thunder's own answers as they were."""
    source = """
import thunder
from thunder.executors import nvfuserex
before, default = set(thunder.extend._executor_map), list(thunder.extend.get_default_executors())
always = list(thunder.extend.get_always_executors())
import guarded_nvfuser
assert set(thunder.extend._executor_map) - before == {"guarded_nvfuser"}, thunder.extend._executor_map
assert "nvfuser" not in thunder.extend._executor_map
assert list(thunder.extend.get_default_executors()) == default
assert list(thunder.extend.get_always_executors()) == always
assert nvfuserex.nvfuserex is None
assert nvfuserex.nvfuser_version() is None
assert guarded_nvfuser.guarded_nvfuser_ex not in thunder.extend.get_default_executors()
print("untouched")
"""
    done = run_python(source)
    assert done.stdout == "untouched\n", done.stderr


def test_programs_without_this_executor_are_not_touched() -> None:
    """A function compiled without the executor has the traces that Thunder gives it without the library."""
    source = """
import sys, torch, thunder
if sys.argv[1:] == ["with"]:
    import guarded_nvfuser
def fn(x, y):
    x.mul_(2)
    return x + y
x = torch.zeros(4)
jitted = thunder.jit(fn, executors=[])
jitted(x, x)
for trace in (thunder.last_prologue_traces(jitted)[-1], thunder.last_traces(jitted)[-1]):
    print("\\n".join(line for line in str(trace).splitlines() if "milliseconds" not in line))
"""
    plain, loaded = run_python(source), run_python(source.replace("sys.argv[1:]", "['with']"))
    assert "mul" in plain.stdout, plain.stderr
    assert loaded.stdout == plain.stdout


@pytest.mark.gpu
def test_stock_stays_registered_with_a_device() -> None:
    """Where Thunder registers nvFuser itself, it is still there, and still Thunder's."""
    assert thunder.extend.get_executor("nvfuser") is impl.ex
    assert thunder.get_executor("guarded_nvfuser") is guarded_nvfuser_ex


# --- the executor


def test_executor_is_thunders_with_its_op_tables() -> None:
    """A real subclass, whose tables are the stock instance's own: what is registered there later holds here too."""
    assert issubclass(GuardedNvFuserExecutor, impl.nvFuserExecutor)
    for table in ("_implmap", "_opmap", "_lookasides"):
        assert getattr(guarded_nvfuser_ex, table) is getattr(impl.ex, table)
    assert len(guarded_nvfuser_ex.implmap) > 100
    assert guarded_nvfuser_ex != impl.ex


def test_executor_is_registered_under_its_name() -> None:
    """Thunder finds it by name, and a user may give the name instead of the object."""
    assert thunder.extend.get_executor("guarded_nvfuser") is guarded_nvfuser_ex
    by_name = thunder.jit(scale_twice, executors=["guarded_nvfuser"])
    expected, found = operands(), operands()
    assert torch.equal(by_name(*found), scale_twice(*expected))
    assert torch.equal(found[0], expected[0])
    assert len(regions(by_name)) == 2


def test_regions_are_named_as_thunder_names_them() -> None:
    """Region names are nvFusion<N>, counted from 0, in every mode: Thunder's check, examine and passes rely on it."""
    for mode in ("rewrite", "raise", "fallback"):
        jitted = thunder.jit(scale_twice, executors=[guarded_nvfuser_ex], guard_on_hazard=mode)
        jitted(*operands())
        names = regions(jitted)
        assert names == [f"nvFusion{index}" for index in range(len(names))]
        assert len(names) >= 2


@pytest.mark.parametrize("mode", ["rewrite", "raise", "fallback"])
@pytest.mark.parametrize("fuel", [0, 1])
def test_fuel(mode: str, fuel: int) -> None:
    """Fuel limits how many regions are formed; without any, PyTorch runs every op, with the same results."""
    executor = GuardedNvFuserExecutor()
    executor.set_fuel(fuel)
    jitted = thunder.jit(scale_twice, executors=[executor], guard_on_hazard=mode)
    expected, found = operands(), operands()
    assert torch.equal(jitted(*found), scale_twice(*expected))
    assert torch.equal(found[0], expected[0])
    assert len(regions(jitted)) == fuel


def test_nvfuser_options_are_accepted(capsys: pytest.CaptureFixture) -> None:
    """The stock executor's compile options are asked for, so that Thunder does not call them unused."""
    options = {
        "nv_enable_shape_only_fusion": True,
        "nv_enable_options": ["fusion_debug"],
        "nv_disable_options": ["parallel_compile"],
        "nv_store_fusion_inputs": True,
        "nv_save_fake_inputs": True,
        "nv_skip_cache": True,
        "guard_elide": True,
        "guard_on_hazard": "rewrite",
    }
    jitted = thunder.jit(scale_twice, executors=[guarded_nvfuser_ex], **options)
    jitted(*operands())
    thunder.last_compile_options(jitted)
    assert "No unused options" in capsys.readouterr().out


def test_shape_only_fusion_is_an_option() -> None:
    """A region of shape ops alone is formed only where the user asks for it, also after a rewrite."""

    def shapes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.mul_(2)
        return (x @ x).reshape(9).unsqueeze(0) @ (x @ x).reshape(9)

    found = {}
    for allowed in (False, True):
        jitted = thunder.jit(shapes, executors=[guarded_nvfuser_ex], nv_enable_shape_only_fusion=allowed)
        jitted(*operands())
        bsyms = thunder.last_traces(jitted)[-1].bound_symbols
        found[allowed] = any("reshape" in sub.sym.name for bsym in bsyms if is_region(bsym) for sub in bsym.subsymbols)
    assert found == {False: False, True: True}


@pytest.mark.parametrize("order", ["first", "last"])
def test_stock_beside_it_is_refused(order: str) -> None:
    """With both executors in one list, the stock one would fuse without a check: an error says to leave it out."""
    executors = [impl.ex, guarded_nvfuser_ex] if order == "first" else [guarded_nvfuser_ex, impl.ex]
    jitted = thunder.jit(scale_twice, executors=executors)
    with pytest.raises(ValueError, match="holds both 'nvfuser' and 'guarded_nvfuser'.*Leave 'nvfuser' out"):
        jitted(*operands())


@pytest.mark.parametrize("question", [verdicts, cost])
def test_what_was_never_called_has_no_answer(question: Callable) -> None:
    """Asking before the first call, or about a plain function, is an error that says what to do."""
    with pytest.raises(RuntimeError, match="was never called.*call it once, then ask again"):
        question(thunder.jit(scale_twice, executors=[guarded_nvfuser_ex]))
    with pytest.raises(
        TypeError, match=re.escape("pass what thunder.jit(fn, executors=[guarded_nvfuser_ex]) returned")
    ):
        question(scale_twice)


def test_support_is_asked_as_on_a_gpu_only_when_interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are fused only under the interpreter, which is never chosen silently."""
    counts = {}
    for value in ("0", "1"):
        monkeypatch.setenv("GUARDED_NVFUSER_INTERPRET", value)
        jitted = thunder.jit(scale_twice, executors=[guarded_nvfuser_ex])
        expected, found = operands(), operands()
        assert torch.equal(jitted(*found), scale_twice(*expected))
        counts[value] = len(regions(jitted))
    assert counts == {"0": 0, "1": 2}


def test_temporary_regions_keep_their_parts() -> None:
    """A region's symbol holds the ops that it stands for and names what it reads: Thunder's examine looks at them."""
    jitted = thunder.jit(scale_twice, executors=[guarded_nvfuser_ex])
    jitted(*operands())
    [first, second] = [bsym for bsym in thunder.last_traces(jitted)[-1].bound_symbols if is_region(bsym)]
    assert [sub.sym.name for sub in first.subsymbols] == ["mul", "add", "copy_"]
    assert all(isinstance(arg, TensorProxy) for arg in first.flat_proxy_args)
    assert second.sym.executor is guarded_nvfuser_ex
