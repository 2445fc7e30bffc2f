"""Time candidate tiles of attention and the matrix product against PyTorch. Usage: python kernels_trial.py"""

import math
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hyperion.kernels import attention_triton as A
from hyperion.kernels import matmul_triton as X

T = A.Tile
FORWARD = {128: [T(128, 128, 8, 3), T(128, 128, 8, 2), T(128, 64, 8, 3), T(128, 64, 4, 2), T(64, 64, 4, 3), T(64, 64, 4, 2), T(128, 128, 8, 2, False), T(128, 64, 4, 3, False)],
           64: [T(128, 128, 8, 3), T(128, 128, 4, 2), T(128, 64, 4, 3), T(128, 64, 8, 3), T(64, 64, 4, 3)]}
KEYS = {128: [T(128, 64, 8, 2), T(128, 32, 8, 2), T(128, 32, 8, 3), T(64, 64, 4, 2), T(64, 32, 4, 2), T(64, 64, 4, 1), T(128, 64, 8, 2, False), T(128, 64, 8, 3)],
        64: [T(128, 64, 8, 2), T(128, 128, 8, 2), T(64, 64, 4, 2), T(128, 32, 8, 3)]}
QUERIES = {128: [T(128, 64, 8, 2), T(128, 128, 8, 2), T(128, 64, 8, 3), T(64, 64, 4, 2), T(64, 64, 4, 3), T(128, 64, 8, 2, False)],
           64: [T(128, 64, 8, 2), T(128, 128, 8, 2), T(128, 64, 4, 2), T(128, 64, 8, 3), T(64, 64, 4, 2)]}
MATMUL = [X.MatmulTile(*t) for t in ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4), (128, 128, 64, 8, 4), (128, 128, 64, 4, 4))]


def inputs(D, S, H=16, K=16, B=1, dtype=torch.bfloat16):
    torch.manual_seed(0)
    make = lambda heads: torch.randn(B, heads, S, D, device="cuda", dtype=dtype)
    return make(H), make(K), make(K), make(H)


def pieces(kind, D, tile, tensors, causal=True):
    q, k, v, g = (t.flatten(0, 1) for t in tensors)
    scale = 1 / math.sqrt(D)
    tiles = A.Tiles(tile, tile, tile)
    if kind == "forward":
        return lambda: A.run_forward(q, k, v, scale, causal, tiles)
    o, lse = A.run_forward(q, k, v, scale, causal, A.HOPPER[D])
    delta = (o.float() * g.float()).sum(-1)
    rows, group = q.shape[1], len(q) // len(k)
    e = torch.empty_like
    if kind == "keys":
        gk, gv = e(k), e(v)
        arguments = lambda: (A._block(q, tile.read, tile), A._block(k, tile.held, tile), A._block(v, tile.held, tile), A._block(g, tile.read, tile), lse, delta, A._block(gk, tile.held, tile), A._block(gv, tile.held, tile), scale * A.LOG2_E, scale, rows)
        return lambda: A.attention_key_gradient[-(-rows // tile.held), len(k)](*arguments(), **A.constants_of(tile, group, D, causal), num_warps=tile.warps)
    gq = e(q)
    arguments = lambda: (A._block(q, tile.held, tile), A._block(k, tile.read, tile), A._block(v, tile.read, tile), A._block(g, tile.held, tile), lse, delta, A._block(gq, tile.held, tile), scale * A.LOG2_E, scale, rows)
    return lambda: A.attention_query_gradient[-(-rows // tile.held), len(q)](*arguments(), **A.constants_of(tile, group, D, causal), num_warps=tile.warps)


def warm(job):
    kind, D, tile = job
    try:
        if kind == "matmul":
            run_matmul(tile, 512)()
        else:
            pieces(kind, D, tile, inputs(D, 512, 2, 2))()
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-200:]}"


def run_matmul(tile, n, a=None, b=None):
    if a is None:
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
    d = X.TensorDescriptor.from_tensor
    blocks = d(a, [tile.rows, tile.depth]), d(b, [tile.depth, tile.columns]), d(c, [tile.rows, tile.columns // 2])
    grid = (min(132, X._count(n, n, tile.constants)),)
    def call():
        X.matmul_persistent[grid](*blocks, n, n, n, STAGES=tile.stages, PROGRAMS=132, num_warps=tile.warps, num_stages=tile.stages, **tile.constants)
        return c
    return call


def seconds(function, samples=12):
    function(); function()
    torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(samples)]
    for a, b in events:
        a.record(); function(); b.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in events)[samples // 2] / 1e3


def sdpa(backend, tensors):
    q, k, v, g = tensors
    def forward():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    fq, fk, fv = (t.clone().requires_grad_() for t in (q, k, v))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(fq, fk, fv, is_causal=True)
    return forward, lambda: torch.autograd.grad(out, (fq, fk, fv), g, retain_graph=True)


def main():
    start = time.time()
    import triton
    print(torch.__version__, triton.__version__, torch.cuda.get_device_name())
    jobs = [(kind, D, tile) for kind, table in (("forward", FORWARD), ("keys", KEYS), ("queries", QUERIES)) for D in table for tile in table[D]]
    jobs += [("matmul", 0, tile) for tile in MATMUL]
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        errors = dict(zip(jobs, pool.map(warm, jobs)))
    for job, error in errors.items():
        if error:
            print("FAILED", job, error)
    print(f"compiled {len(jobs)} in {time.time() - start:.0f} s", flush=True)
    best = {}
    for D in (128, 64):
        for S in (16384, 4096):
            tensors = inputs(D, S)
            flops = 2 * 16 * S * S * D  # causal: half of 4·H·S²·D
            if S == 16384:
                for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
                    f, b = sdpa(backend, tensors)
                    print(f"D{D} S{S} {name}: forward {flops / seconds(f) / 1e12:.0f}, backward {2.5 * flops / seconds(b) / 1e12:.0f}", flush=True)
            for kind, table, part in (("forward", FORWARD, 1.0), ("keys", KEYS, 2.0), ("queries", QUERIES, 1.5)):
                for tile in table[D]:
                    if errors[kind, D, tile]:
                        continue
                    t = seconds(pieces(kind, D, tile, tensors), 8)
                    best[kind, D, S] = min(best.get((kind, D, S), (9, None)), (t, str(tile)))
                    print(f"D{D} S{S} {kind} {tile.held},{tile.read},w{tile.warps},s{tile.stages},{tile.descriptors}: {part * flops / t / 1e12:.0f} TFLOPS of its own products", flush=True)
            total = sum(best[kind, D, S][0] for kind in ("keys", "queries"))
            print(f"D{D} S{S} BEST forward {flops / best['forward', D, S][0] / 1e12:.0f}, backward without delta {2.5 * flops / total / 1e12:.0f}", flush=True)
    for n in (4096, 8192):
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        print(f"matmul {n} torch.mm: {2 * n**3 / seconds(lambda: torch.mm(a, b), 30) / 1e12:.0f}")
        exact = torch.mm(a, b).double()
        for tile in MATMUL:
            if not errors["matmul", 0, tile]:
                call = run_matmul(tile, n, a, b)
                error = ((call().double() - exact).norm() / exact.norm()).item()
                print(f"matmul {n} {tile.rows},{tile.columns},{tile.depth},w{tile.warps},s{tile.stages}: {2 * n**3 / seconds(call, 30) / 1e12:.0f} error {error:.1e}", flush=True)
        c, tile = X.run_matmul(a, b, X.HOPPER)
        print(f"matmul {n} autotuned: {tile} {2 * n**3 / seconds(lambda: X.run_matmul(a, b, X.HOPPER), 30) / 1e12:.0f}", flush=True)
    for D, H, K, S in ((128, 4, 4, 1000), (64, 8, 2, 777), (128, 8, 2, 1), (64, 4, 1, 2048)):
        tensors = inputs(D, S, H, K)
        q, k, v, g = (t.clone() for t in tensors)
        mine = [t.clone().requires_grad_() for t in (q, k, v)]
        out = A.Attention.apply(*mine, True, A.HOPPER[D]); out.backward(g)
        exact = [t.double().requires_grad_() for t in (q, k, v)]
        with sdpa_kernel(SDPBackend.MATH):
            ref = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
        ref.backward(g.double())
        pairs = [(out, ref)] + [(m.grad, e.grad) for m, e in zip(mine, exact)]
        print("errors", D, H, K, S, *[f"{((m.double() - e).norm() / e.norm()).item():.1e}" for m, e in pairs])
    print(f"done in {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
