"""Dense causal prefill by cuDNN through PyTorch at M3's heads (64 query, 4 KV, dim 128, bf16): what sparse prefill is
compared with. Needs torch and a GPU: python dense.py 8192 32768 131072."""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def median_us(n: int) -> float:
    """Microseconds of one layer of n tokens, the median of 20 calls (5 of long ones) after one to warm up."""
    q = torch.randn(1, 64, n, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 4, n, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for i in range(6 if n > 50000 else 21):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            end.record()
            end.synchronize()
            if i:
                times.append(start.elapsed_time(end) * 1000)
    return sorted(times)[len(times) // 2]


for n in map(int, sys.argv[1:]):
    us = median_us(n)
    print(f"dense prefill {n}: {us:.1f} us, {2 * n * n * 64 * 128 / us / 1e6:.0f} TFLOP/s")
