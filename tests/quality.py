"""Programs that mutate, each with its functional twin: the same maths, final values written back at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Pair:
    """A program, its twin, and a maker of arguments."""

    name: str
    program: Callable
    twin: Callable
    make_args: Callable


def _r(*shape: int, seed: int = 0, positive: bool = False) -> torch.Tensor:
    t = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return t.abs() + 0.1 if positive else t


def _many(count: int, *shape: int, start: int = 0) -> list[torch.Tensor]:
    return [_r(*shape, seed=start + i) for i in range(count)]


def tanh_power(a):
    a.tanh_()
    return a * a * a * a


def tanh_power_twin(a):
    v = a.tanh()
    out = v * v * v * v
    a.copy_(v)
    return out


def add_mul_relu(x, y, z):
    return x.add_(y).mul_(z).relu_()


def add_mul_relu_twin(x, y, z):
    x.copy_(((x + y) * z).relu())
    return x


def _statistics(x, mean, var, count, dims, keep):
    m = x.mean(dims)
    v = x.var(dims, correction=0)
    n = x.numel() / m.numel()
    shape = [1, -1] + [1] * (x.ndim - 2)
    y = (x - m.view(shape)) * torch.rsqrt(v.view(shape) + 1e-5)
    new = (mean * 0.9 + m * 0.1, var * 0.9 + v * (0.1 * n / (n - 1)), count + 1)
    if keep:
        mean.copy_(new[0])
        var.copy_(new[1])
        count.copy_(new[2])
    return y, new


def batch_norm_1d(x, weight, bias, mean, var, count):
    count.add_(1)
    return F.batch_norm(x, mean, var, weight, bias, True, 0.1, 1e-5)


def batch_norm_1d_twin(x, weight, bias, mean, var, count):
    y, _ = _statistics(x, mean, var, count, (0,), True)
    return y * weight + bias


def batch_norm_2d_twin(x, weight, bias, mean, var, count):
    y, _ = _statistics(x, mean, var, count, (0, 2, 3), True)
    return y * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)


def ema(*tensors):
    for avg, new in zip(tensors[:8], tensors[8:]):
        avg.mul_(0.99).add_(new, alpha=0.01)


def ema_twin(*tensors):
    values = [avg * 0.99 + new * 0.01 for avg, new in zip(tensors[:8], tensors[8:])]
    for avg, value in zip(tensors[:8], values):
        avg.copy_(value)


def _adam_args():
    return (*_many(8, 32, 16), *_many(8, 32, 16, start=8), *[torch.zeros(32, 16) for _ in range(16)], torch.tensor(3.0))


def _adam(tensors, decay):
    p, g, m, v, step = tensors[:8], tensors[8:16], tensors[16:24], tensors[24:32], tensors[32]
    step.add_(1)
    for pi, gi, mi, vi in zip(p, g, m, v):
        if decay:
            pi.mul_(1 - 0.001 * 0.01)
        mi.mul_(0.9).add_(gi, alpha=0.1)
        vi.mul_(0.999).addcmul_(gi, gi, value=0.001)
        denominator = (vi / (1 - 0.999**step)).sqrt().add_(1e-8)
        pi.sub_(0.001 * (mi / (1 - 0.9**step)) / denominator)


def _adam_twin(tensors, decay):
    p, g, m, v, step = tensors[:8], tensors[8:16], tensors[16:24], tensors[24:32], tensors[32]
    next_step = step + 1
    values = []
    for pi, gi, mi, vi in zip(p, g, m, v):
        pn = pi * (1 - 0.001 * 0.01) if decay else pi
        mn = mi * 0.9 + gi * 0.1
        vn = vi * 0.999 + 0.001 * (gi * gi)
        denominator = (vn / (1 - 0.999**next_step)).sqrt() + 1e-8
        values.append((pn - 0.001 * (mn / (1 - 0.9**next_step)) / denominator, mn, vn))
    step.copy_(next_step)
    for pi, mi, vi, (pn, mn, vn) in zip(p, m, v, values):
        pi.copy_(pn)
        mi.copy_(mn)
        vi.copy_(vn)


def adam(*tensors):
    _adam(tensors, False)


def adam_twin(*tensors):
    _adam_twin(tensors, False)


def adamw(*tensors):
    _adam(tensors, True)


def adamw_twin(*tensors):
    _adam_twin(tensors, True)


def sgd_momentum(*tensors):
    for p, g, b in zip(tensors[:4], tensors[4:8], tensors[8:]):
        b.mul_(0.9).add_(g)
        p.add_(b, alpha=-0.01)


def sgd_momentum_twin(*tensors):
    values = []
    for p, g, b in zip(tensors[:4], tensors[4:8], tensors[8:]):
        bn = b * 0.9 + g
        values.append((p - 0.01 * bn, bn))
    for p, b, (pn, bn) in zip(tensors[:4], tensors[8:], values):
        p.copy_(pn)
        b.copy_(bn)


def kv_cache(q, k, v, kcache, vcache):
    kcache[:, 4:5] = k
    vcache[:, 4:5] = v
    scores = torch.softmax(q @ kcache[:, :5].transpose(-1, -2) * 0.25, -1)
    return scores @ vcache[:, :5]


def kv_cache_twin(q, k, v, kcache, vcache):
    kn = torch.slice_scatter(kcache, k, 1, 4, 5)
    vn = torch.slice_scatter(vcache, v, 1, 4, 5)
    scores = torch.softmax(q @ kn[:, :5].transpose(-1, -2) * 0.25, -1)
    out = scores @ vn[:, :5]
    kcache.copy_(kn)
    vcache.copy_(vn)
    return out


def _norm(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w


def transformer_block(x, w1, w2, wq, wo, wu, wd):
    x.add_(torch.softmax(_norm(x, w1) @ wq, -1) @ wo)
    x.add_(F.gelu(_norm(x, w2) @ wu) @ wd)
    return x


def transformer_block_twin(x, w1, w2, wq, wo, wu, wd):
    a = x + torch.softmax(_norm(x, w1) @ wq, -1) @ wo
    b = a + F.gelu(_norm(a, w2) @ wu) @ wd
    x.copy_(b)
    return x


def softmax(x):
    x.sub_(x.amax(-1, keepdim=True))
    x.exp_()
    x.div_(x.sum(-1, keepdim=True))
    return x


def softmax_twin(x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    x.copy_(e / e.sum(-1, keepdim=True))
    return x


def rms_norm(x, w):
    x.mul_(torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5))
    x.mul_(w)
    return x


def rms_norm_twin(x, w):
    x.copy_(_norm(x, w))
    return x


def running_statistics(x, mean, var):
    mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    var.mul_(0.9).add_(x.var(0), alpha=0.1)
    return (x - mean) * torch.rsqrt(var + 1e-5)


def running_statistics_twin(x, mean, var):
    mn = mean * 0.9 + x.mean(0) * 0.1
    vn = var * 0.9 + x.var(0) * 0.1
    out = (x - mn) * torch.rsqrt(vn + 1e-5)
    mean.copy_(mn)
    var.copy_(vn)
    return out


def clip_gradients(*grads):
    total = sum((g * g).sum() for g in grads).sqrt()
    scale = (1.0 / (total + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return total


def clip_gradients_twin(*grads):
    total = sum((g * g).sum() for g in grads).sqrt()
    scale = (1.0 / (total + 1e-6)).clamp(max=1.0)
    values = [g * scale for g in grads]
    for g, value in zip(grads, values):
        g.copy_(value)
    return total


def _bn_args(*shape):
    c = shape[1]
    return lambda: (
        _r(*shape),
        _r(c, seed=1),
        _r(c, seed=2),
        torch.zeros(c),
        torch.ones(c),
        torch.tensor(0),
    )


PAIRS = [
    Pair("tanh_power", tanh_power, tanh_power_twin, lambda: (_r(16, 32),)),
    Pair("add_mul_relu", add_mul_relu, add_mul_relu_twin, lambda: tuple(_many(3, 16, 32))),
    Pair("batch_norm_1d", batch_norm_1d, batch_norm_1d_twin, _bn_args(16, 8)),
    Pair("batch_norm_2d", batch_norm_1d, batch_norm_2d_twin, _bn_args(4, 8, 6, 6)),
    Pair("ema", ema, ema_twin, lambda: tuple(_many(16, 16, 32))),
    Pair("adam", adam, adam_twin, _adam_args),
    Pair("adamw", adamw, adamw_twin, _adam_args),
    Pair("sgd_momentum", sgd_momentum, sgd_momentum_twin, lambda: tuple(_many(12, 16, 32))),
    Pair(
        "kv_cache",
        kv_cache,
        kv_cache_twin,
        lambda: (
            _r(2, 1, 16),
            _r(2, 1, 16, seed=1),
            _r(2, 1, 16, seed=2),
            torch.zeros(2, 64, 16),
            torch.zeros(2, 64, 16),
        ),
    ),
    Pair(
        "transformer_block",
        transformer_block,
        transformer_block_twin,
        lambda: (_r(8, 16), _r(16, seed=1), _r(16, seed=2), *[_r(16, 16, seed=s) * 0.2 for s in (3, 4, 5, 6)]),
    ),
    Pair("softmax", softmax, softmax_twin, lambda: (_r(16, 32),)),
    Pair("rms_norm", rms_norm, rms_norm_twin, lambda: (_r(16, 32), _r(32, seed=1))),
    Pair(
        "running_statistics",
        running_statistics,
        running_statistics_twin,
        lambda: (_r(16, 8), _r(8, seed=1), _r(8, seed=2, positive=True)),
    ),
    Pair("clip_gradients", clip_gradients, clip_gradients_twin, lambda: tuple(_many(4, 16, 32))),
]
