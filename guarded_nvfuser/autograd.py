"""Gradients of a rewritten program: Thunder derives them before it fuses, so the derivation is done again after the
rewrite.

Autograd follows proxies. In the program as traced it cannot follow a write through a view; in the rewritten one there
is nothing to follow but values (tests/test_autograd.py).
"""

from __future__ import annotations

from thunder.core.compile_data import _compile_data, get_compile_data
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import dce
from thunder.core.update_aliases import insert_alias_updates
from thunder.distributed.transforms.ddp import apply_bucketing_to_grad_allreduce
from thunder.distributed.utils import maybe_sort_waits
from thunder.executors.passes import _transform_for_operator_executor_execution
from thunder.transforms.autodiff import grad_transform_on_trace

from guarded_nvfuser.states import Program, is_joint


def before_gradients(program: Program) -> TraceCtx:
    """The trace from which Thunder derived a joint trace.

    Args:
        program: an analysed joint trace, of the compilation under way.

    Returns:
        The last trace without gradients that Thunder keeps with its compile statistics (thunder/__init__.py, `jit`).
    """
    _, stats = _compile_data.get()
    return next(trace for trace in reversed(stats.last_traces) if not is_joint(trace))


def with_aliases(trace: TraceCtx) -> TraceCtx:
    """Name every state of a tensor, as Thunder's autograd needs it; mode "rewrite" leaves that out until it gives up.

    Args:
        trace: a computation trace without gradients.

    Returns:
        The trace with Thunder's `update_aliases` (thunder/core/update_aliases.py).
    """
    return insert_alias_updates(trace, [])


def with_gradients(trace: TraceCtx) -> TraceCtx:
    """Derive the gradients of a trace and let the executors claim its ops, with the steps of `thunder.jit`.

    Args:
        trace: a computation trace whose arguments require grad.

    Returns:
        The joint trace as a fusion pass gets it (thunder/__init__.py, and transform_for_execution in
        executors/passes.py).
    """
    executors = get_compile_data().executors_list
    joint = grad_transform_on_trace(dce(trace))
    is_sorted, sorted_trace = maybe_sort_waits(_transform_for_operator_executor_execution(joint, executors))
    if is_sorted:
        joint = sorted_trace
    joint = dce(apply_bucketing_to_grad_allreduce(dce(joint)))
    return dce(_transform_for_operator_executor_execution(joint, executors))
