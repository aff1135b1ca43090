"""The programs of the long explanations, as a user would write them: for each code one that fails and its repair."""

from __future__ import annotations

from thunder.core.proxies import TensorProxy
from thunder.extend import OperatorExecutor


def raw_fails(x, w):
    z = x * w
    x.copy_(z)
    return x + w


def raw_repaired(x, w):
    z = x * w
    x.copy_(z)
    return z + w


def war_fails(x, w):
    y = x.sin()
    x.mul_(2)
    return y + x @ w


def war_repaired(x, w):
    y = x.sin()
    doubled = x * 2
    return y + doubled @ w


def waw_fails(x, w):
    t = x.clone()
    t.mul_(w)
    return t - x


def waw_repaired(x, w):
    t = x * w
    return t - x


def target_fails(x, w):
    h = w * 1.5
    h.view(-1).mul_(x.view(-1))
    return h.sin()


def target_repaired(x, w):
    h = w * 1.5 * x
    return h.sin()


def lost_fails(x, w):
    y = w.sin()
    x.mul_(2)
    return y + w @ w


def lost_repaired(x, w):
    y = w.sin()
    doubled = x.mul_(2)
    return y + w @ w, doubled


def saved_fails(x, w):
    y = w * x
    x.mul_(2)
    return y


def saved_repaired(x, w):
    y = w * x
    doubled = x * 2
    return y, doubled


def untracked_fails(x, w):
    h = w * 1.5
    h.view(-1).mul_(2)
    return h.sin()


def untracked_repaired(x, w):
    h = w * 1.5
    h = h * 2
    return h.sin()


def layout_fails(x):  # called with x = buffer[:, :2]
    x.mul_(2)


def layout_repaired(x):
    return x * 2


def leaf_fails(x, w):
    w.mul_(2)
    return w * x


def leaf_repaired(x, w):
    doubled = w * 2
    return doubled * x


def overlap_fails(a, b):  # called with a, b = buffer[:5], buffer[3:]
    a.add_(1)
    return a + b


def overlap_repaired(a, b):
    return (a + 1) + b


def uncertain_fails(x, w):
    z = x.reshape(16)
    x.mul_(2)
    return z + 1


def uncertain_repaired(x, w):
    z = x.view(16)
    x.mul_(2)
    return z + 1


def _shift_in_eager(x):
    return x.add_(1)


shift_ex = OperatorExecutor("guarded_nvfuser_explain")
shift = shift_ex.register_operator("shift", meta=lambda x: TensorProxy(like=x), fn=_shift_in_eager)


def undeclared_fails(x, w):
    y = shift(x)  # an operator registered with Thunder: its meta function does not say that it writes x
    x.mul_(2)
    return y + w


def undeclared_repaired(x, w):
    y = x + 1
    return y + w, y * 2
