"""The one place that touches how Thunder and nvFuser are imported: finds both, checks that they fit, explains when not.

Thunder imports its nvFuser executor only where a CUDA device is visible, because `nvfuser_version()` answers None
elsewhere. nvfuser_direct 0.2.36 itself imports and defines fusions without a driver, so `load()` imports Thunder's
module with an answer that reports the installed version. It also puts two functions of `thunder.jit` behind this library's
`arguments` module; nothing else of Thunder is replaced, and programs without this library's executor run as before.
"""

from __future__ import annotations

import importlib
import inspect
import platform
import sys
from types import ModuleType

import thunder
import torch
from looseversion import LooseVersion

WHEEL_VERSION = "0.2.36.dev20260301"

# What this library overrides or calls in Thunder's executor: (where, name, parameters). Source:
# thunder/executors/nvfuserex_impl.py.
EXPECTED_SIGNATURES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("nvFuserExecutor", "fusion_pass", ("self", "trace")),
    ("nvFuserExecutor", "fuse", ("self", "region", "fusion_counter")),
    ("nvFuserExecutor", "cse", ("self", "trace")),
    ("nvFuserExecutor", "can_execute", ("self", "bsym")),
    ("nvFuserExecutor", "get_execution_transform", ("self", "bsym")),
    ("nvFuserExecutor", "has_cuda_input_or_output", ("self", "bsym")),
    ("nvFuserExecutor", "register_temporary_operation", ("self", "name", "fn", "inputs", "outputs", "bsyms")),
    ("", "create_fd", ("bsyms", "input_descriptors", "sorted_unique_inputs", "sorted_unique_outputs")),
    ("", "create_fusion_definition_wrapper", ("bsyms", "name", "sorted_unique_inputs", "sorted_unique_outputs")),
    ("", "make_key_from_dtensor", ("tensor",)),
    ("", "rematerialize", ("trace",)),
    ("", "remove_redundant_casts", ("trace",)),
    ("", "update_fusion_call_ctx", ("trace",)),
    ("", "dce", ("trace", "needed_proxies")),
)


def wheel_name(torch_version: str, cuda: str | None) -> str:
    """The requirement that installs nvFuser for a torch.

    Args:
        torch_version: `torch.__version__`, such as "2.10.0+cu128".
        cuda: `torch.version.cuda`, such as "12.8"; None for a torch without CUDA, for which the PyPI build's is named.

    Returns:
        A pip requirement, pinned exactly where this library was tested with the wheel.
    """
    major, minor = torch_version.split(".")[:2]
    name = f"nvfuser-cu{(cuda or '12.8').replace('.', '')}-torch{major}{minor}"
    return f"{name}=={WHEEL_VERSION}" if (major, minor) == ("2", "10") else name


def check_platform(system: str, machine: str) -> None:
    """Refuse platforms for which nvFuser publishes no wheel.

    Args:
        system: `platform.system()`.
        machine: `platform.machine()`.

    Raises:
        ImportError: anywhere but on Linux x86-64.
    """
    if system != "Linux" or machine not in ("x86_64", "AMD64"):
        raise ImportError(
            f"guarded_nvfuser needs Linux x86-64, because nvFuser publishes no wheel for {system} {machine}. "
            "Run the program without this executor there: thunder.jit(fn) uses PyTorch for every op."
        )


def import_nvfuser() -> ModuleType:
    """Import nvfuser_direct or say which wheel is missing.

    Raises:
        ImportError: nvFuser is absent (the message names the wheel for the installed torch and CUDA), or present but
            not importable here (0.2.34 and 0.2.35 need a driver).
    """
    try:
        return importlib.import_module("nvfuser_direct")
    except ModuleNotFoundError as missing:
        wheel = wheel_name(torch.__version__, torch.version.cuda)
        raise ImportError(
            f"guarded_nvfuser needs nvFuser, which is not installed. For torch {torch.__version__} "
            f"(CUDA {torch.version.cuda}) and Python {sys.version_info[0]}.{sys.version_info[1]}: pip install '{wheel}'"
        ) from missing
    except (ImportError, OSError) as broken:
        raise ImportError(
            f"nvFuser is installed but does not import here ({broken}). Releases before 0.2.36 need an NVIDIA "
            f"driver, and every wheel needs the torch it was built for: pip install '{wheel_name(torch.__version__, torch.version.cuda)}'"
        ) from broken


def check_signatures(impl: ModuleType) -> None:
    """Compare what this library overrides or calls in Thunder with what it was written for.

    Args:
        impl: `thunder.executors.nvfuserex_impl`, or a stand-in in tests.

    Raises:
        ImportError: a method or function is gone or takes other parameters.
    """
    for owner, name, expected in EXPECTED_SIGNATURES:
        where = f"{owner}.{name}" if owner else name
        found = getattr(getattr(impl, owner, None) if owner else impl, name, None)
        parameters = tuple(inspect.signature(found).parameters) if callable(found) else None
        if parameters != expected:
            raise ImportError(
                f"guarded_nvfuser was written for lightning-thunder 0.2.6; in the installed {thunder.__version__}, "
                f"{where}{tuple(expected)} {'is missing' if parameters is None else f'takes {parameters}'}. "
                "Install a release that fits: pip install 'lightning-thunder>=0.2.6,<0.3'"
            )


def load() -> ModuleType:
    """Import Thunder's nvFuser executor module, with or without a CUDA device.

    Returns:
        `thunder.executors.nvfuserex_impl`.

    Raises:
        ImportError: the platform, nvFuser or Thunder does not fit; the message says what to install.
    """
    check_platform(platform.system(), platform.machine())
    nvfuser = import_nvfuser()
    import thunder.executors.nvfuserex as gate

    impl = sys.modules.get("thunder.executors.nvfuserex_impl") or _import_impl(gate, nvfuser)
    check_signatures(impl)
    _watch_arguments()
    return impl


def _watch_arguments() -> None:
    """Let `thunder.jit` tell this library how a program's arguments share memory; other executors' programs are not touched.

    A fusion pass comes too late: Thunder has taken arguments for one tensor by then, or failed on their shapes.
    """
    from guarded_nvfuser.arguments import leaving_aliases, watching

    if not hasattr(thunder.thunder_general_jit, "__wrapped__"):
        thunder.thunder_general_jit = watching(thunder.thunder_general_jit)
        thunder.insert_alias_updates = leaving_aliases(thunder.insert_alias_updates)


def _import_impl(gate: ModuleType, nvfuser: ModuleType) -> ModuleType:
    """Import the executor module while `nvfuser_version` reports the installed version; leave no other trace behind.

    The module binds the function by name, so inside it the answer stays. It registers itself as "nvfuser"; where
    Thunder would not have done so (no device), the registration is taken back.
    """
    asked, stock_known = gate.nvfuser_version, "nvfuser" in thunder.extend._executor_map
    gate.nvfuser_version = lambda: LooseVersion(nvfuser.version())
    try:
        impl = importlib.import_module("thunder.executors.nvfuserex_impl")
    finally:
        gate.nvfuser_version = asked
    if not stock_known and gate.nvfuserex is None:
        thunder.extend.deregister_executor(impl.ex)
    return impl
