"""Programs with in-place updates, each written afresh after a public report about mutation.

`CASES` is a list of `Case`: a function (or, with `module=True`, a maker of an nn.Module), a maker of fresh CPU
arguments, what kind of hazard it carries (`no_hazard`: must be fused and must not be refused), the report that made
the shape interesting, and one line on what went wrong there. `eager` is the twin to compare with where `fn` calls
Thunder's raw `prims.copy_`; `backward` asks for gradients too; `warm_args` is a first call before the compared one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from thunder.core import prims
from torch import nn

KINDS = (
    "raw",
    "war",
    "waw",
    "cse",
    "remat",
    "reorder",
    "view",
    "runtime_alias",
    "output_alias",
    "cross_element",
    "dtype_cast",
    "overlap_internal",
    "autograd_saved",
    "duplicate_arg",
    "dead_copy",
    "copy_of_input",
    "broadcast",
    "reduction",
    "no_hazard",
)


@dataclass(frozen=True)
class Case:
    name: str
    source: str
    fn: Callable
    make_args: Callable
    kinds: tuple
    note: str
    eager: Callable | None = None  # what to compare with, where fn cannot run outside Thunder
    backward: bool = False  # compare gradients too
    module: bool = False  # fn makes an nn.Module
    warm_args: Callable | None = None  # a first call with these, then the compared one (cache reuse)


CASES: list[Case] = []


def _r(*shape, seed=0, dtype=torch.float32, grad=False):
    t = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return t.requires_grad_() if grad else t


def _args(*specs, dtype=torch.float32):
    """A maker of fresh random tensors, one per shape."""
    return lambda: tuple(_r(*s, seed=11 + i, dtype=dtype) for i, s in enumerate(specs))


def case(source, make_args, *kinds, note, name=None, **kw):
    assert all(k in KINDS for k in kinds), kinds

    def deco(fn):
        CASES.append(Case(name or fn.__name__, source, fn, make_args, kinds, note, **kw))
        return fn

    return deco


THUNDER = "Lightning-AI/lightning-thunder#"
FUSER = "NVIDIA/Fuser#"
TORCH = "pytorch/pytorch#"

# ---------------------------------------------------------------- Thunder: method in-place ops


@case(
    THUNDER + "720",
    _args((4, 6)),
    "raw",
    "waw",
    note="two updates of one argument, then a read: the argument ended with the first update's value",
)
def halve_floor_read(level):
    level.mul_(0.5)
    level.clamp_(min=-0.2)
    return level - 3


@case(
    THUNDER + "1110",
    _args((2, 6), (2, 6), (3,), (3,)),
    "copy_of_input",
    "output_alias",
    note="a region with nothing but copies; what is returned must stay apart",
)
def keep_previous(old_a, a, old_b, b):
    old_a.copy_(a)
    old_b.copy_(b)
    return a, old_a, old_b


@case(
    THUNDER + "791",
    _args((2, 6), (2, 6)),
    "copy_of_input",
    "dead_copy",
    note="a copy whose result nobody reads: lost when the region has no output",
)
def snapshot_quietly(dst, src):
    dst.copy_(src)


@case(
    THUNDER + "877",
    lambda: (lambda t: (t, t))(_r(2, 5)),
    "duplicate_arg",
    "raw",
    "runtime_alias",
    note="one tensor passed under two names, both updated, the sum read",
)
def lift_and_lower(left, right):
    mixed = left.mul_(3) * right.sub_(1)
    return mixed, left


def _twelve():
    first = torch.zeros(2) + 0.5
    return (first, first, *[torch.full((), float(i)) for i in range(10)])


@case(
    THUNDER + "1172",
    _twelve,
    "duplicate_arg",
    "broadcast",
    note="a dozen arguments, the first two the same tensor, a scalar one updated: the prologue sorted names as text",
)
def dozen_weights(w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11):
    w11.mul_(3)
    total = w0 * w1
    for w in (w2, w3, w4, w5, w6, w7, w8, w9, w10, w11):
        total = total + w
    return total


def _with_corner():
    a = _r(5, 5) * 0.5
    return a, a[1, 2]


@case(
    THUNDER + "2766",
    _with_corner,
    "runtime_alias",
    "raw",
    "broadcast",
    note="a matrix and one of its cells, 0-d, as arguments, both updated in one expression",
)
def matrix_plus_cell(a, cell):
    return a.mul_(2) + cell.neg_()


@case(
    THUNDER + "2766",
    _args((5, 5)),
    "view",
    "raw",
    "broadcast",
    note="the cell taken inside; its update must reach the matrix before the sum",
)
def matrix_plus_inner_cell(a):
    cell = a[1, 2]
    return a.mul_(2) - cell.add_(1)


@case(
    THUNDER + "2766",
    _args((5, 5)),
    "view",
    "raw",
    note="an inner cell updated after the matrix, then the matrix read again",
)
def cell_update_then_read(a):
    cell = a[2, 3]
    b = a.abs_()
    cell.sub_(5)
    return b * 2


@case(
    THUNDER + "2768",
    _args((5, 5)),
    "no_hazard",
    note="one update then pure arithmetic: safe, but an alias update before each product breaks the fusion",
)
def update_then_arithmetic(a):
    a.cos_()
    b = a + a
    return b * a - a


@case(
    THUNDER + "2776",
    _args((4, 4)),
    "dead_copy",
    note="an update of a temporary nobody reads; under the dataflow fusion it landed after the return",
)
def scratch_nobody_reads(x):
    scratch = x + 1
    scratch.mul_(2)
    return x * 3


@case(
    THUNDER + "2793",
    _args((8,)),
    "copy_of_input",
    "output_alias",
    "raw",
    note="a clone updated in place also changed the original: nvFuser returned the clone as an alias",
)
def scaled_private_copy(x):
    draft = x.clone()
    draft.mul_(4)
    return draft - x


@case(
    THUNDER + "1893",
    _args((2, 3)),
    "view",
    note="a flattened view updated and returned; nvFuser cannot write to what is not its input",
)
def scale_regrouped(x):
    rows = x.view(3, 2)
    rows.mul_(-2)
    return rows


@case(
    THUNDER + "652",
    _args((2, 2), (2, 2)),
    "view",
    "war",
    note="a temporary updated through a flat view, its neighbour then divided: stale operand used",
)
def cross_update_temps(a, b):
    u = a.sin()
    v = b.abs()
    line = u.view(-1)
    line.sub_(v.view(-1))
    v.mul_(a)
    return u + v, line


@case(
    THUNDER + "657",
    _args((2, 2), (2, 2)),
    "view",
    "raw",
    note="an argument updated first, then temporaries of it updated through views",
)
def lead_update_then_temps(a, b):
    a.mul_(b)
    u = a.cos()
    line = u.view(-1)
    line.add_(b.reshape(-1))
    w = torch.sigmoid(b)
    w.sub_(a)
    return u, w, line * 0.25


def _adam_state():
    n = 2
    p = [_r(4, 3, seed=i) for i in range(n)]
    g = [_r(4, 3, seed=10 + i) for i in range(n)]
    m = [torch.zeros(4, 3) for _ in range(n)]
    v = [torch.zeros(4, 3) for _ in range(n)]
    t = [torch.tensor(3.0) for _ in range(n)]
    return (*p, *g, *m, *v, *t)


@case(
    THUNDER + "657",
    _adam_state,
    "no_hazard",
    note="Adam over two parameters with tensor steps, all state updated in place",
)
def adam_two_parameters(p0, p1, g0, g1, m0, m1, v0, v1, t0, t1):
    for p, g, m, v, t in ((p0, g0, m0, v0, t0), (p1, g1, m1, v1, t1)):
        t.add_(1)
        m.mul_(0.8).add_(g, alpha=0.2)
        v.mul_(0.95).add_(g * g * 0.05)
        rate = 0.01 / (1 - 0.8**t)
        scale = (v / (1 - 0.95**t)).sqrt() + 1e-6
        p.sub_(rate * (m / scale))


def _kv_args():
    return (
        _r(4, 8, seed=1),
        torch.zeros(6, 8),
        torch.zeros(6, 8),
        _r(2, 8, seed=2),
        _r(2, 8, seed=3),
        torch.tensor([0, 1]),
    )


@case(THUNDER + "1194", _kv_args, "no_hazard", note="two caches filled by index_copy_, then attention over them")
def cached_attention(q, kcache, vcache, k, v, pos):
    kcache.index_copy_(0, pos, k)
    vcache.index_copy_(0, pos, v)
    w = torch.softmax(q @ kcache.t() / 8**0.5, dim=-1)
    return w @ vcache


@case(
    THUNDER + "1985",
    _args((3, 5)),
    "view",
    note="zero_ on a slice of an argument: refused at the time, must reach the argument",
)
def blank_left_columns(x):
    x[:, :2].zero_()
    return x


@case(
    THUNDER + "1780",
    _args((6,)),
    "view",
    note="an element set through a chained index of a view; the setitem has no output and was dropped",
)
def set_cell_through_view(x):
    grid = x.view(2, 3)
    grid[1][2] = -7.0
    return x


@case(
    THUNDER + "1458",
    _args((2, 3)),
    "no_hazard",
    "dtype_cast",
    note="an update of a widened copy; nvFuser refused the copy_ spelling of it",
)
def widen_and_cosine(x):
    wide = x.to(torch.float64)
    wide.cos_()
    return wide + 1


@case(
    THUNDER + "1173",
    _args(*[(3, 2)] * 6),
    "no_hazard",
    note="many parameters pulled towards targets, each update fused with its copy",
)
def pull_towards(a, b, c, ta, tb, tc):
    a.lerp_(ta, 0.25)
    b.lerp_(tb, 0.25)
    c.lerp_(tc, 0.25)
    return a, b, c


@case(
    THUNDER + "1858",
    lambda: (_r(3, 4), torch.tensor([4, 1, 2])),
    "no_hazard",
    note="rows placed into a fresh zero tensor by index; dataflow fusion made an invalid trace of it",
)
def place_rows(values, where):
    out = torch.zeros(6, 4)
    out[where] = values * 2
    return out


class _Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.tensor([1.0]))

    def forward(self, x):
        self.seen.add_(2)
        return x * self.seen


case(
    THUNDER + "646",
    _args((3,)),
    "raw",
    "broadcast",
    name="counting_buffer",
    module=True,
    note="a buffer bumped in forward and then used",
)(_Counting)


def _bn1d():
    torch.manual_seed(0)
    return nn.BatchNorm1d(3).train()


def _bn2d():
    torch.manual_seed(0)
    return nn.BatchNorm2d(2).train()


case(
    THUNDER + "22",
    _args((6, 3)),
    "no_hazard",
    "reduction",
    name="batch_norm_1d",
    module=True,
    note="running statistics written in train mode",
)(_bn1d)
case(
    THUNDER + "584",
    _args((4, 2, 3, 3)),
    "no_hazard",
    "reduction",
    name="batch_norm_2d",
    module=True,
    note="running statistics and the batch counter, 4-d input",
)(_bn2d)
case(
    THUNDER + "139",
    lambda: (_r(4, 2, 3, 3, grad=True),),
    "no_hazard",
    "reduction",
    "autograd_saved",
    name="batch_norm_2d_backward",
    module=True,
    backward=True,
    note="the same with gradients: saved statistics must not be the overwritten ones",
)(_bn2d)


class _ResBlock(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.c1, self.c2 = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.b1, self.b2 = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.act(self.b1(self.c1(x)))
        out = self.b2(self.c2(out))
        out += x
        return self.act(out)


case(
    THUNDER + "633",
    lambda: (_r(2, 2, 4, 4, grad=True),),
    "no_hazard",
    "autograd_saved",
    name="resnet_block",
    module=True,
    backward=True,
    note="a stock residual block: in-place ReLU, in-place residual add, batch norm in train mode",
)(_ResBlock)

# ---------------------------------------------------------------- Thunder: the raw primitive


def _put(src, dst):
    return prims.copy_(src, dst, grad_enabled=False)


def _e_store_then_read(x, y):
    z = torch.abs(x) - y
    x.copy_(z)
    return x * y


@case(
    THUNDER + "285",
    _args((4, 4), (4, 4)),
    "raw",
    eager=_e_store_then_read,
    note="a target read after its copy in one region: the case the sanity check exists for",
)
def prim_store_then_read(x, y):
    z = torch.abs(x) - y
    _put(z, x)
    return x * y


def _e_hand_down(x, y):
    z = x + 2 * y
    x.copy_(z)
    y.copy_(x)
    return z - 1


@case(
    THUNDER + "2314",
    _args((4, 4), (4, 4)),
    "raw",
    "copy_of_input",
    eager=_e_hand_down,
    note="a target copied on into another argument: the second copy may take the old value",
)
def prim_hand_down(x, y):
    z = x + 2 * y
    _put(z, x)
    _put(x, y)
    return z - 1


@case(
    FUSER + "2566",
    _args((4, 4), (4, 4)),
    "no_hazard",
    "output_alias",
    eager=lambda x, y: (lambda o: (o * 2, o))(x.copy_(x + y)),
    note="the copy's own result is used and returned: it is the target and must alias it",
)
def prim_use_copy_result(x, y):
    o = _put(x + y, x)
    return o * 2, o


def _e_track_mean(x, run):
    m = x.mean(0)
    run.copy_(0.9 * run + 0.1 * m)
    return x - m


def _e_store_into_temp(x):
    t = torch.relu(x)
    t.copy_(torch.sin(x))
    return t + 1


@case(
    FUSER + "2910",
    _args((4, 3)),
    "raw",
    eager=_e_store_into_temp,
    note="the target is a temporary of the region itself: nvFuser takes none, and used to say so badly",
)
def prim_store_into_temp(x):
    t = torch.relu(x)
    _put(torch.sin(x), t)
    return t + 1


@case(
    THUNDER + "139",
    _args((6, 3), (3,)),
    "no_hazard",
    "reduction",
    "broadcast",
    eager=_e_track_mean,
    note="a running mean stored, the batch mean used: batch norm's shape",
)
def prim_track_mean(x, run):
    m = torch.mean(x, 0)
    _put(0.9 * run + 0.1 * m, run)
    return x - m


def _e_twice(x, y):
    a = x * y
    x.copy_(a - 2)
    b = x * y
    return a, b


@case(
    TORCH + "183969",
    _args((4, 4), (4, 4)),
    "cse",
    "raw",
    eager=_e_twice,
    note="one expression written before and after a store: CSE takes the second for the first",
)
def prim_product_before_and_after(x, y):
    a = x * y
    _put(a - 2, x)
    b = x * y
    return a, b


def _e_around(x, src):
    a = torch.sigmoid(x)
    x.copy_(src)
    b = torch.sigmoid(x)
    return a, b


@case(
    TORCH + "183969",
    _args((4, 4), (4, 4)),
    "cse",
    "copy_of_input",
    eager=_e_around,
    note="the same with the store taking a plain argument",
)
def prim_sigmoid_around_store(x, src):
    a = torch.sigmoid(x)
    _put(src, x)
    b = torch.sigmoid(x)
    return a, b


def _e_matmul_between(x, w):
    x.copy_(x * 2)
    y = x @ w
    return y + 1


@case(
    THUNDER + "936",
    _args((4, 4), (4, 4)),
    "reorder",
    "raw",
    eager=_e_matmul_between,
    note="a store, then a matmul left to PyTorch reads the target: nothing ties the two together",
)
def prim_store_then_matmul(x, w):
    _put(x * 2, x)
    y = x @ w
    return y + 1


def _e_matmul_then_store(x, w):
    y = x @ w
    x.copy_(w * 2)
    return y + 1


@case(
    THUNDER + "936",
    _args((4, 4), (4, 4)),
    "reorder",
    "war",
    eager=_e_matmul_then_store,
    note="a matmul reads an argument that a fused store then overwrites: dataflow may swap them",
)
def prim_matmul_then_store(x, w):
    y = x @ w
    _put(w * 2, x)
    return y + 1


# ---------------------------------------------------------------- nvFuser's aliased outputs


@case(
    FUSER + "2664",
    _args((6, 1), (6, 8)),
    "war",
    "broadcast",
    note="a broadcast column read, then lowered in place: wrong on large arrays",
)
def scale_by_column_then_lower(col, grid):
    out = grid * col
    col.sub_(1)
    return out


@case(
    FUSER + "2839",
    _args((10, 2), (3, 10, 2)),
    "war",
    "broadcast",
    note="read before an update in place: the answer depended on how the fusion was segmented",
)
def batch_minus_then_abs(t, batch):
    out = batch - t
    t.abs_()
    return out


@case(
    FUSER + "4028",
    lambda: (_r(4, 6)[:, 1:4],),
    "view",
    note="a strided window as argument, updated in place: the kernel took the output's strides from the wrong tensor",
)
def squash_window(w):
    w.tanh_()
    return w


@case(
    FUSER + "2564",
    _args((4, 3), (4, 3)),
    "output_alias",
    "raw",
    note="the updated argument is returned beside its source and something derived",
)
def update_and_return_all(a, b):
    c = a - b
    a.copy_(c)
    return a, c, a * 0.5


# ---------------------------------------------------------------- PyTorch's compilers


@case(
    TORCH + "198094",
    _args((4, 6), (2, 6)),
    "war",
    "copy_of_input",
    "output_alias",
    note="a patched private copy outlives a clearing of the argument: it was built in the argument's memory",
)
def patch_then_clear(x, patch):
    y = x.clone()
    y[1:3] = patch
    x.zero_()
    return y


@case(
    TORCH + "198101",
    _args((4, 6)),
    "war",
    "view",
    note="a sum with a reshaped argument, the argument then overwritten in part: the read slid past the write",
)
def flat_sum_then_overwrite(x):
    z = x.reshape(-1) + 5
    z.mul_(3)
    x[:, 1:3] = -1
    return z.view(4, 6)


@case(
    TORCH + "198102",
    _args((4, 6)),
    "view",
    note="a gapped view lowered in place: every element between its windows turned to zero",
)
def lower_every_fourth(x):
    v = x[:, ::4]
    v.sub_(10)
    return x


def _overlapping_slices():
    b = torch.arange(9.0)
    return b[1:5], b[3:7]


@case(
    TORCH + "139789",
    _overlapping_slices,
    "runtime_alias",
    "raw",
    warm_args=lambda: (_r(4), _r(4, seed=1)),
    note="compiled for separate tensors, then called with overlapping ones: the cached program does not know",
)
def lower_then_multiply(x, y):
    x.sub_(3)
    return y * x


@case(TORCH + "139789", _overlapping_slices, "runtime_alias", "raw", note="overlapping slices from the first call on")
def lower_then_multiply_cold(x, y):
    x.sub_(3)
    return y * x


@case(
    TORCH + "114302",
    lambda: (torch.arange(4.0),),
    "overlap_internal",
    "view",
    note="an element written through an expanded view: must show in every row and in the argument",
)
def write_through_expand(x):
    wide = x.expand(3, 4)
    wide[1, 2] = -8.0
    return wide


@case(
    TORCH + "94693",
    _args((3, 8)),
    "cross_element",
    "reduction",
    note="a smoothing step that stores the mean of neighbours, with a total of the result",
)
def smooth_columns(x):
    left = torch.cat([x[:, :1], x[:, :-1]], 1)
    x.copy_(0.5 * (x + left))
    return x.sum()


@case(
    TORCH + "183575",
    _args(*[(4, 4)] * 6),
    "no_hazard",
    note="momentum by lerp, then the parameter, twice: a read-only operand was taken for a written one",
)
def momentum_by_lerp(p1, m1, g1, p2, m2, g2):
    m1.lerp_(g1, 0.05)
    p1.add_(m1, alpha=-0.01)
    m2.lerp_(g2, 0.05)
    p2.add_(m2, alpha=-0.01)


@case(TORCH + "97130", _args((3, 4)), "raw", "reduction", "view", note="a row set to a sentinel, then the total tested")
def poke_row_then_test(x):
    x[1] = 50.0
    return x.sum(1) > 10


@case(
    TORCH + "159855",
    _args((6, 4), (1, 4)),
    "cross_element",
    "war",
    note="a sliding cache moved down by one and refilled: reads and writes of one buffer at unequal offsets",
)
def slide_cache(keys, new):
    keys.copy_(torch.cat([keys[1:], new], 0))
    return keys.mean(0)


@case(
    TORCH + "174938",
    _args((5,)),
    "war",
    "copy_of_input",
    note="multiplying by one makes a snapshot; dropped as a no-op, it follows the later update",
)
def snapshot_times_one(x):
    snap = x * 1
    x.sub_(2)
    return snap


@case(
    TORCH + "185876",
    lambda: (_r(3, 4), _r(4, 3, seed=2, grad=True)),
    "autograd_saved",
    "view",
    "copy_of_input",
    backward=True,
    note="a transposed clone is saved for backward, then the original scaled: the clone was elided",
)
def product_with_frozen_transpose(x, y):
    frozen = x.t().clone()
    out = y * frozen
    x.mul_(3)
    return out


@case(
    TORCH + "197039",
    lambda: (_r(5, 3, grad=True), torch.full((3,), 2.0)),
    "autograd_saved",
    "remat",
    "broadcast",
    backward=True,
    note="scaled by a tracked variance that is then updated: backward may recompute from the new one",
)
def scale_by_tracked_variance(x, var):
    y = x * torch.rsqrt(var + 1e-5)
    var.mul_(0.9).add_(0.3)
    return y


@case(
    "pytorch/functorch#565",
    lambda: (_r(4, 3), _r(5, 3, seed=2, grad=True), _r(5, seed=3, grad=True)),
    "autograd_saved",
    "remat",
    backward=True,
    note="an activation in place on a linear's output, recomputed in backward",
)
def linear_tanh_in_place(x, w, b):
    h = F.linear(x, w, b)
    h.tanh_()
    return h * h


@case(
    "tenstorrent/pytorch2.0_ttnn#871",
    _args((4, 4), dtype=torch.bfloat16),
    "raw",
    "dtype_cast",
    note="a fresh mask cleared in place, then cast: the clearing was removed as dead",
)
def causal_mask_product(x):
    mask = torch.full((4, 4), 1.0)
    rows = torch.arange(4)
    mask.masked_fill_(rows.unsqueeze(0) > rows.unsqueeze(1), 0.0)
    return x * mask.to(torch.bfloat16)


@case(
    THUNDER + "1458",
    lambda: (_r(4, 4, dtype=torch.bfloat16), _r(4, 4, seed=2)),
    "no_hazard",
    "dtype_cast",
    note="a bf16 accumulator takes a float addend",
    name="half_accumulator",
)
def half_accumulator(acc, x):
    acc.add_(x)
    return acc


class _Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x):
        self.last[1] = x.mean()
        return x - 1.0


case(
    TORCH + "114967",
    _args((3, 5)),
    "dead_copy",
    "reduction",
    "view",
    name="cache_cell",
    module=True,
    note="one cell of a buffer set to a mean and not read in this call",
)(_Cache)


@case(
    "pytorch/torchdynamo#1406",
    _args((4, 5)),
    "no_hazard",
    "output_alias",
    note="an in-place activation returned: the result is the argument",
)
def squash_and_return(a):
    return a.tanh_()


# ---------------------------------------------------------------- other compilers


@case(
    "numba/numba#230",
    lambda: (torch.arange(12.0).reshape(2, 6),),
    "cross_element",
    "view",
    note="columns moved by two places into themselves: copied in ascending order they repeat the head",
)
def move_right(m):
    m[:, 2:] = m[:, :-2].clone()
    return m


@case(
    "numba/numba#5942",
    _args((4, 2), (4, 2)),
    "view",
    "copy_of_input",
    "raw",
    note="rows copied over, then their first cells bumped through an indexed +=: the copy was lost",
)
def copy_rows_bump_cells(rows, out):
    out[:, :] = rows[:, :]
    out[:, 0] += 1
    return out


@case(
    "numba/numba#7201",
    _args((5,)),
    "output_alias",
    "raw",
    note="a second name for the argument, scaled through it, both used",
)
def second_name(a):
    b = a
    b.mul_(2)
    return b, a + 1


@case(
    "tinygrad/tinygrad#17074",
    lambda: (torch.tensor([4, 1, 7, 2]),),
    "war",
    "view",
    note="a value built before a slice is overwritten: read late it shows the new element (integers)",
)
def reader_before_patch(x):
    seen = x * 3
    x[1:] = -4
    return seen, x


@case(
    "openxla/xla#49176",
    _args((2, 5)),
    "cross_element",
    "view",
    "copy_of_input",
    note="a temporary whose columns move by one, then reshaped",
)
def temp_columns_along(x):
    temp = x * 2
    temp[:, 1:] = temp[:, :-1].clone()
    return temp.reshape(10)


@case(
    "jax-ml/jax#39625",
    lambda: (torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0), torch.tensor(0.5)),
    "output_alias",
    note="a repeated output among three updated states: donated buffers were mixed up by output order",
)
def outputs_among_states(s0, s1, s2, val):
    y = val + val
    s0.add_(val)
    s1.mul_(2)
    s2.sub_(val)
    return y, s2, y, s0, y, s1


@case(
    "jax-ml/jax#9635",
    lambda: (lambda t: (t, t))(_r(6)),
    "duplicate_arg",
    "raw",
    note="a donated buffer given twice: here target and addend",
)
def add_self_by_name(x, y):
    x.add_(y)
    return x * y


@case(
    "libxsmm/tpp-mlir#588",
    _args((3, 3)),
    "raw",
    "output_alias",
    note="added to itself in place, then used under both names",
)
def add_self_then_use(x):
    t = x.add_(x)
    return t + x


@case(
    "llvm/llvm-project#90019",
    _args((4, 2), (4, 2), (4, 2)),
    "war",
    "raw",
    note="one scratch buffer written and read in every step of a loop",
)
def scratch_in_loop(a, b, scratch):
    total = torch.zeros(4, 2)
    for i in range(3):
        scratch.copy_(a * i - b)
        total = total + scratch * scratch
    return total


@case(
    "rosinality/vq-vae-2-pytorch#60",
    _args((4, 3), (3, 5), (5, 3)),
    "raw",
    note="a pre-activation block whose in-place ReLU changes the skip path too: eager's meaning, kept",
)
def preactivation_block(x, w1, w2):
    h = F.relu(x, inplace=True)
    h = F.relu(h @ w1)
    out = h @ w2
    out += x
    return out


@case(
    "pytorch/vision#807",
    _args((4, 3), (3, 3)),
    "no_hazard",
    note="the safe spelling of a residual: in-place add on a fresh tensor, then in-place ReLU",
)
def residual_add_then_clamp(x, w):
    out = x @ w
    out += x
    return F.relu(out, inplace=True)


@case(
    "NVIDIA/TransformerEngine#600",
    lambda: (torch.arange(1.0, 9.0), _r(4, 4)),
    "cross_element",
    "reduction",
    note="a ring of maxima rolled by one, its head set, a scale from its maximum",
)
def roll_amax_history(history, x):
    history.copy_(torch.cat([history[1:], history[:1]]))
    history[0] = x.abs().amax()
    return 448.0 / history.amax()


@case(
    "kvcache-ai/sglang#31",
    _args((2, 3, 8), (3, 4), (3, 4)),
    "raw",
    "view",
    "broadcast",
    note="the careless spelling: the second half reads the first after it was overwritten, and eager says so",
)
def rotate_careless(q, cos, sin):
    a, b = q[..., :4], q[..., 4:]
    q[..., :4] = a * cos - b * sin
    q[..., 4:] = a * sin + b * cos
    return q * 1.0


@case("facebookresearch/d2go#493", _args((4, 4), (4, 4)), "no_hazard", note="moving average of weights, spelled lerp")
def ema_lerp(avg, new):
    avg.lerp_(new, 0.01)


@case(
    "huggingface/optimum-habana#1069",
    lambda: (torch.zeros(2, 5, 4), torch.zeros(2, 5, 4), _r(2, 1, 4), _r(2, 1, 4, seed=2)),
    "no_hazard",
    "view",
    note="one decoding step: a slot of each cache set, the filled part used",
)
def decode_step(kcache, vcache, k, v):
    kcache[:, 2:3] = k
    vcache[:, 2:3] = v
    return (kcache[:, :3] * vcache[:, :3]).sum(-1)


@case(
    TORCH + "26550",
    lambda: (torch.tensor(4), torch.zeros(3), _r(6, 3)),
    "no_hazard",
    "raw",
    "reduction",
    note="an integer batch counter bumped and used as the weight of a cumulative mean",
)
def cumulative_mean(batches, mean, x):
    batches.add_(1)
    mean.add_((x.mean(0) - mean) / batches)
    return mean


@case(
    "huggingface/transformers#21705",
    lambda: (torch.tensor([False, True, False]), torch.tensor([3, 5, 4]), torch.tensor([2, 7, 9])),
    "raw",
    note="a decoding loop's bookkeeping: done flags updated, lengths grown where not done",
)
def grow_unfinished(done, lengths, token):
    done.logical_or_(token == 2)
    lengths.add_(torch.logical_not(done).to(torch.int64))
    return done, lengths


def _base_and_wide():
    b = _r(4)
    return b, b.expand(3, 4)


@case(
    TORCH + "139628",
    _base_and_wide,
    "runtime_alias",
    "raw",
    "overlap_internal",
    note="a vector bumped under an expanded view of it that is also an argument",
)
def bump_under_expand(base, wide):
    base.add_(1)
    return wide * 2


@case(
    "pytorch/xla#8768",
    _args((4, 4), (4, 4), (4, 4)),
    "no_hazard",
    note="gradients accumulated over two micro-batches, then averaged",
)
def accumulate_gradient(acc, g1, g2):
    acc.add_(g1)
    acc.add_(g2)
    acc.div_(2)
    return acc
