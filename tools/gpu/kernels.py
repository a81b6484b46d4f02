"""Check kernels against float64, then compare their speed with the bandwidth of a large copy and with torch.

``python tools/gpu/kernels.py [OUT.jsonl]`` writes one line of JSON a cell. With ``SMALL=1`` (for compute-sanitizer), or
in Triton's interpreter, sizes are tiny and no times are measured.
"""

from __future__ import annotations

import mmap
import os
import sys
import time

import torch
import triton
from cells import write
from prototype import operations as ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" or os.environ.get("SMALL") == "1"

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET = float(os.environ.get("SECONDS_LEFT", "150"))
BEGAN = time.time()


def clock(run):
    """Return median milliseconds."""
    if INTERPRETED:
        run()
        return float("nan")
    return triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median")


def power_law(count, rows, alpha, generator):
    """Draw ids as dynamicemb's benchmark does: 1 <= x < rows with density x ** -alpha."""
    x = torch.rand(count, generator=generator, device=DEVICE, dtype=torch.float64)
    gamma = 1 - alpha
    y = (x * (float(rows) ** gamma - 1) + 1) ** (1 / gamma)
    return y.clamp(max=rows - 1).to(torch.int64)


def copy_rate():
    size = 1 << 12 if INTERPRETED else 1 << 30
    source, target = torch.randn(size // 4, device=DEVICE), torch.empty(size // 4, device=DEVICE)
    ms = clock(lambda: target.copy_(source))
    return 2 * size / ms / 1e6  # GB/s


class Case:
    """T tables of R rows of D floats, B samples, bags of L ids."""

    def __init__(self, name, T, R, D, B, L, alpha, kind="sgd"):
        if INTERPRETED:
            T, R, B, L = min(T, 2), 97, 23, min(L, 3)
        self.name, self.T, self.R, self.D, self.B, self.L, self.kind = name, T, R, D, B, L, kind
        g = torch.Generator(device=DEVICE).manual_seed(1)
        n = T * B * L
        ids = power_law(n, R, alpha, g) if alpha else torch.randint(0, R, (n,), generator=g, device=DEVICE)
        self.rows = (ids + torch.arange(T, device=DEVICE).repeat_interleave(B * L) * R).int()
        self.weights = torch.randn(T * R * D, generator=g, device=DEVICE) * 0.1
        self.offsets = torch.arange(0, n + 1, L, device=DEVICE, dtype=torch.int32)
        self.columns = torch.arange(T, device=DEVICE) * D
        self.mean = torch.zeros(T, dtype=torch.int64, device=DEVICE)
        self.out = torch.full((B, T * D), float("nan"), device=DEVICE)
        self.gradient = torch.randn(B, T * D, generator=g, device=DEVICE)
        self.n, self.distinct = n, int(torch.unique(self.rows).numel())
        state = {"sgd": (0, 0), "rowwise_adagrad": (1, 0), "adagrad": (0, 1), "adam": (0, 2)}[kind]
        self.slots = (
            self.weights,
            torch.zeros(T * R * state[0], device=DEVICE),
            torch.zeros(T * R * D * state[1], device=DEVICE),
            torch.zeros(0, dtype=torch.int32, device=DEVICE),
        )
        self.kind_number = ["sgd", "rowwise_adagrad", "adagrad", "rowwise_adam", "adam"].index(kind)
        self.state_floats = state[0] + state[1] * D
        self.DP = 1 << (D - 1).bit_length()

    def forward(self, K, U, warps):
        bags = self.T * self.B
        ops.pool[(-(-bags // K),)](
            self.weights,
            self.rows,
            self.offsets,
            None,
            self.columns,
            self.mean,
            self.out,
            bags,
            self.B,
            self.T * self.D,
            D=self.D,
            DP=self.DP,
            K=K,
            U=U,
            SINGLE=self.L == 1,
            WEIGHTED=False,
            BY=4,
            num_warps=warps,
            enable_fp_fusion=False,
        )

    def forward_bytes(self, rows):
        """Bytes of the forward pass if so many rows are read from memory; others come from caches."""
        return 4 * self.D * (rows + self.T * self.B) + 4 * self.n

    def group(self):
        rows, order = torch.sort(self.rows, stable=True)
        new = torch.ones_like(rows)
        new[1:] = rows[1:] != rows[:-1]
        run = (new.cumsum(0) - 1).int()
        first = torch.full((self.n + 1,), self.n, dtype=torch.int32, device=DEVICE)
        ops.starts[(-(-self.n // 1024),)](rows, run, first, self.n, BLOCK=1024)
        bag = order // self.L
        at = bag % self.B * (self.T * self.D) + self.columns[bag // self.B]
        return rows, run, first, at

    def update(self, grouped, K, U, L, warps):
        rows, run, first, at = grouped
        blocks = -(-self.n // L)
        parts = torch.empty(2 * blocks * self.D, device=DEVICE)
        static = dict(D=self.D, DP=self.DP, L=L, SCALED=False, SEQUENCES=False, BY=4, enable_fp_fusion=False)
        ops.part_sums[(blocks,)](
            rows, run, first, at, None, self.gradient, None, parts, self.n, K=8, num_warps=warps, **static
        )
        pace, rule = (0.05, 0.05, 1.0), (1.0, 1e-8, 0.0, 0.0, 0.9, 0.1, 0.999, 0.001)
        ops.train[(-(-self.n // K),)](
            self.slots,
            rows,
            first,
            run[-1:],
            at,
            None,
            self.gradient,
            None,
            parts,
            blocks,
            pace,
            rule,
            None,
            K=K,
            U=U,
            LANES=min(16, self.D),
            KIND=self.kind_number,
            CLOCKED=False,
            NORM=False,
            num_warps=warps,
            **static,
        )

    def update_bytes(self):
        gradients = 4 * self.D * (self.n if self.L == 1 else self.T * self.B)
        return gradients + 2 * 4 * (self.D + self.state_floats) * self.distinct

    def check(self):
        """Return the largest relative errors of pooled vectors and of rows after one step, against float64."""
        self.forward(8, 4, 4)
        rows = self.weights.view(-1, self.D)
        want = rows[self.rows.long()].double().view(self.T, self.B, self.L, self.D).sum(2)
        got = self.out.view(self.B, self.T, self.D).transpose(0, 1).double()
        first = float((want - got).norm() / want.norm())
        del want, got
        ids, place = torch.unique(self.rows, return_inverse=True)
        ids = ids.long()
        seen = torch.zeros(len(rows), dtype=torch.bool, device=DEVICE)
        seen[ids] = True
        unseen = torch.randperm(len(rows), device=DEVICE)[:200_000]
        unseen = unseen[~seen[unseen]]
        before, others = rows[ids].double(), rows[unseen].clone()
        bag = torch.arange(self.n, device=DEVICE) // self.L
        each = self.gradient.view(self.B, self.T, self.D).transpose(0, 1).reshape(-1, self.D)[bag].double()
        sums = torch.zeros_like(before).index_add_(0, place, each)
        del each, bag
        self.update(self.group(), 4, 4, 256, 4)
        change = rows[ids].double() - before
        if self.kind == "sgd":
            want = -0.05 * sums
        elif self.kind == "rowwise_adagrad":
            want = -0.05 * sums / (sums.square().mean(1, keepdim=True).sqrt() + 1e-8)
        elif self.kind == "adagrad":
            want = -0.05 * sums / (sums.abs() + 1e-8)
        else:
            want = -0.05 * 0.1 * sums / ((0.001 * sums.square()).sqrt() + 1e-8)
        return first, float((want - change).norm() / want.norm()), bool((rows[unseen] == others).all())


CASES = [
    # name, tables, rows, width, batch, bag, alpha, optimizer
    ("criteo_4096", 26, 400_000, 64, 4096, 1, 1.05, "rowwise_adagrad"),
    ("dynamicemb_sgd", 10, 1_677_721, 128, 104_857, 1, 1.05, "sgd"),
    ("dynamicemb_adam", 10, 1_677_721, 128, 104_857, 1, 1.05, "adam"),
    ("bags_uniform", 26, 1_000_000, 64, 16_384, 20, 0.0, "rowwise_adagrad"),
    ("bags_skewed", 26, 1_000_000, 64, 16_384, 20, 1.05, "rowwise_adagrad"),
    ("wide_uniform", 10, 1_000_000, 128, 32_768, 10, 0.0, "adagrad"),
    ("small_1000_bags", 1, 1_000_000, 64, 1000, 10, 0.0, "sgd"),
]
# Bags or rows of a program, lookups that are unrolled, warps.
TILES = [(4, 4, 1), (8, 4, 2), (8, 4, 4), (16, 2, 4), (4, 8, 1), (16, 4, 4)]
STEPS = [(4, 4, 1), (4, 4, 2), (8, 4, 4), (2, 4, 1), (8, 2, 2)]
if INTERPRETED:
    del TILES[1:], STEPS[1:]


def torch_step(case):
    """Time `nn.EmbeddingBag` with sparse gradients and `optim.Adagrad`; of many tables, time four and extrapolate."""
    tables = min(case.T, 4)
    bags = [torch.nn.EmbeddingBag(case.R, case.D, mode="sum", sparse=True, device=DEVICE) for _ in range(tables)]
    optimizer = torch.optim.Adagrad([bag.weight for bag in bags], lr=0.05)
    per = case.B * case.L
    ids = [case.rows[t * per : (t + 1) * per].long() - t * case.R for t in range(tables)]
    offsets = torch.arange(0, per, case.L, device=DEVICE)
    gradients = [case.gradient[:, t * case.D : (t + 1) * case.D].contiguous() for t in range(tables)]

    def forward():
        return [bag(each, offsets) for bag, each in zip(bags, ids, strict=True)]

    def step():
        torch.autograd.backward(forward(), gradients)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return case.T / tables * clock(forward), case.T / tables * clock(step)


def measure(case, peak):
    """Write the cells of a case; return whether its results are right."""
    forward, update, untouched = case.check()
    if not (forward < 1e-5 and update < 1e-3 and untouched):
        write(cell="wrong", name=case.name, forward=forward, update=update, untouched=untouched)
        return False
    forward_ms, forward_tile = min((clock(lambda: case.forward(*tile)), tile) for tile in TILES)
    grouped = case.group()
    update_ms, update_tile = min((clock(lambda: case.update(grouped, *tile[:2], 256, tile[2])), tile) for tile in STEPS)
    rows = case.weights.view(-1, case.D)
    write(
        cell="kernels",
        name=case.name,
        kind=case.kind,
        lookups=case.n,
        distinct=case.distinct,
        forward_ms=forward_ms,
        forward_tile=forward_tile,
        forward_share=case.forward_bytes(case.n) / forward_ms / 1e6 / peak,
        forward_share_distinct=case.forward_bytes(case.distinct) / forward_ms / 1e6 / peak,
        group_ms=clock(case.group),
        update_ms=update_ms,
        update_tile=update_tile,
        update_share=case.update_bytes() / update_ms / 1e6 / peak,
        index_select_ms=clock(lambda: torch.index_select(rows, 0, case.rows)) if case.n * case.D < 2**30 else None,
        errors=[forward, update],
    )
    if case.kind in ("adagrad", "rowwise_adagrad") and not INTERPRETED:
        try:
            forward_ms, step_ms = torch_step(case)
            write(cell="torch", name=case.name, forward_ms=forward_ms, step_ms=step_ms)
        except torch.OutOfMemoryError:
            write(cell="torch", name=case.name, out_of_memory=True)
    return True


def main() -> int:
    peak = copy_rate()
    write(
        cell="copy",
        GBps=peak,
        device=torch.cuda.get_device_name() if not INTERPRETED else "interpreter",
        torch=torch.__version__,
        triton=triton.__version__,
    )
    wrong = 0
    for given in CASES:
        if time.time() - BEGAN > BUDGET:
            write(cell="stopped", before=given[0])
            return 1
        wrong += not measure(Case(*given), peak)
        if not INTERPRETED:
            torch.cuda.empty_cache()
    if not INTERPRETED:
        bus()
    return int(wrong > 0)


def bus():
    """Measure transfers: copies of pinned memory, and records that a kernel reads from pinned memory directly."""
    size = 256 << 20
    host, there = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device=DEVICE),
    )
    up, down = clock(lambda: there.copy_(host, non_blocking=True)), clock(lambda: host.copy_(there, non_blocking=True))
    write(cell="bus", up_GBps=size / up / 1e6, down_GBps=size / down / 1e6)
    small, large = (torch.zeros(size, dtype=torch.uint8, pin_memory=True) for size in (256 << 20, 4 << 30))
    huge = huge_pages()
    for codec, number, bytes_, stride in (("fp32", 0, 260, 260), ("fp32", 0, 260, 384), ("int8", 3, 72, 72)):
        for home_name, home in (("pinned, 256 MiB", small), ("pinned, 4 GiB", large), ("huge pages, 4 GiB", huge)):
            if home is not None:
                decode_records(codec, number, bytes_, stride, home_name, home)


def huge_pages(size=4 << 30):
    """Return memory of the host in pages of 2 MiB that a GPU may address; None where that is refused."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    home = torch.frombuffer(memory, dtype=torch.uint8)
    home.zero_()
    refused = int(torch.cuda.cudart().cudaHostRegister(home.data_ptr(), size, 0))
    if refused:
        write(cell="decode", home="huge pages", refused=refused)
    return None if refused else home


def decode_records(codec, number, bytes_, stride, home_name, home, count=40_000):
    """Measure decoding of random records: staged through a copy, read by the kernel directly, and in GPU memory."""
    slots = (torch.zeros(count * 64, device=DEVICE), torch.zeros(count, device=DEVICE), None, None)
    places = torch.arange(count, device=DEVICE)
    parts = dict(PARAMETERS_AT=64, ROW_STATE_AT=bytes_ - 4, FULL_STATE_AT=bytes_, CLOCK_AT=bytes_, BYTES=stride)
    form = dict(D=64, DP=64, KIND=number, WIDE=False, STATE=0, ROW_STATE=True, FULL=0, CLOCKED=False, **parts)
    which = torch.randint(0, home.numel() // stride, (count,), device=DEVICE)
    staged = home[: count * stride]
    there = staged.to(DEVICE)

    def decode(records, index=None, rows=8, warps=2):
        ops.decode[(-(-count // rows),)](slots, places, records, index, count, K=rows, num_warps=warps, **form)

    staged_ms, inside_ms = clock(lambda: decode(staged.to(DEVICE, non_blocking=True))), clock(lambda: decode(there))
    tiles = [(8, 2), (4, 1), (2, 1), (32, 4)]
    direct_ms, tile = min((clock(lambda: decode(home, which, *tile)), tile) for tile in tiles)
    write(
        cell="decode",
        codec=codec,
        home=home_name,
        stride=stride,
        rows=count,
        staged_ms=staged_ms,
        direct_ms=direct_ms,
        direct_tile=tile,
        in_memory_ms=inside_ms,
        staged_GBps=count * bytes_ / staged_ms / 1e6,
        direct_GBps=count * bytes_ / direct_ms / 1e6,
    )


if __name__ == "__main__":
    sys.exit(main())
