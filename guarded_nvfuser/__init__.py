"""guarded_nvfuser: nvFuser under Lightning Thunder for programs that mutate tensors, with PyTorch eager's results or
an error.

import thunder
from guarded_nvfuser import guarded_nvfuser_ex

fast = thunder.jit(fn, executors=[guarded_nvfuser_ex])
"""

from thunder.extend import register_executor

from guarded_nvfuser.cost import Cost, cost
from guarded_nvfuser.errors import HazardError, HazardWarning
from guarded_nvfuser.executor import GuardedNvFuserExecutor
from guarded_nvfuser.hazards import Hazard, Kind
from guarded_nvfuser.options import on_hazard
from guarded_nvfuser.verdict import Verdict, verdicts

__version__ = "0.1.0"

guarded_nvfuser_ex = GuardedNvFuserExecutor()
register_executor(guarded_nvfuser_ex)

__all__ = [
    "Cost",
    "GuardedNvFuserExecutor",
    "Hazard",
    "HazardError",
    "HazardWarning",
    "Kind",
    "Verdict",
    "cost",
    "guarded_nvfuser_ex",
    "on_hazard",
    "verdicts",
]
