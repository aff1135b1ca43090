"""How benchmarks are collected, where they run, and what is written down about the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import nvfuser_direct
import pytest
import thunder
import torch

from benchmarks.structure import interpreted
from guarded_nvfuser.options import INTERPRET_VARIABLE, ON_HAZARD_VARIABLE
from tests.conftest import pytest_runtest_setup, pytest_terminal_summary  # noqa: F401  (hooks: skip without a device)


@pytest.fixture(autouse=True)
def environment(request: pytest.FixtureRequest) -> Iterator[None]:
    """No variable of the caller's decides what is measured; benchmarks marked `interpreted` run regions on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (INTERPRET_VARIABLE, ON_HAZARD_VARIABLE):
            patch.delenv(name, raising=False)
        if request.node.get_closest_marker("interpreted") is None:
            yield
        else:
            with interpreted():
                yield


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreted: run regions on the CPU")


def cpu_model() -> str:
    """The processor's name as Linux gives it."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def pytest_benchmark_generate_machine_info() -> dict[str, object]:
    """What figures depend on, and nothing that tells whose machine it was."""
    found = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "thunder": thunder.__version__,
        "nvfuser": nvfuser_direct.version(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def pytest_benchmark_generate_commit_info() -> dict[str, object]:
    """Nothing of the checkout."""
    return {}
