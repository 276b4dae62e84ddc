"""What does this GPU reach: matrix products, attention by implementation, memory, launches, copies, optimizer steps?

Command: ``python benchmarks/gpu_rates.py [PART ...] [--out DIR]``. Machine: one with a CUDA GPU, otherwise idle; a minute.
Writes ``gpu_rates.json``: the figures of a hardware file, and of ``autohete/profile/attention.py``, as they are measured here.

Parts of earlier runs stay in it. Without a GPU it says so and does nothing.

Times are by CUDA events, the median of several runs after warming up; inputs are drawn at random.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.gpu_check import earlier, told

BF16, MIB = torch.bfloat16, 2**20
KERNELS = {
    "fa2": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def timer() -> Any:
    """A place in the GPU's work whose time is known."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]


def seconds_of(work: Callable[[], object], repeats: int = 10, warmup: int = 3) -> float:
    """Median time of ``work`` on the GPU."""
    for _ in range(warmup):
        work()
    found: list[float] = []
    for _ in range(repeats):
        begin, end = timer(), timer()
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def drawn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor of normal numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=dtype)


def products() -> dict[str, float]:
    """TFLOP/s of products of 16-bit matrices, and of one second of the largest without a pause."""
    found = {}
    shapes = [(n, n, n) for n in (1024, 2048, 4096, 8192, 16384)] + [(8192, 2048, 8192), (8192, 8192, 2048), (8192, 2048, 2048)]
    for rows, inner, columns in [*shapes, (8192, 4096, 14336), (512, 2048, 8192), (8192, 2048, 128256)]:
        product = partial(torch.matmul, drawn(rows, inner), drawn(inner, columns))
        found[f"{rows} x {inner} x {columns}"] = 2e-12 * rows * inner * columns / seconds_of(product)
    a, b = drawn(8192, 8192), drawn(8192, 8192)
    found["8192, sustained"] = 2e-12 * 8192**3 / seconds_of(lambda: [a @ b for _ in range(400)], 3, 1) * 400
    return found


def alignment() -> dict[str, float]:
    """TFLOP/s of the head of a language model, forward and backward, by vocabulary: rows that do not begin at a multiple of 16
    bytes need other kernels.
    """
    found: dict[str, float] = {}
    for width, vocabularies in {768: (50257, 50258, 50260, 50264, 50304), 1600: (50257, 50304)}.items():
        for vocabulary in vocabularies:
            hidden, weight = drawn(8192, width).requires_grad_(), drawn(vocabulary, width).requires_grad_()
            made = linear(hidden, weight)
            gradient, flops = torch.randn_like(made), 2e-12 * 8192 * width * vocabulary
            ahead = seconds_of(partial(linear, hidden, weight))
            back = seconds_of(partial(torch.autograd.grad, made, (hidden, weight), gradient, retain_graph=True))
            found |= {f"{width} x {vocabulary}, forward": flops / ahead, f"{width} x {vocabulary}, backward": 2 * flops / back}
    return found


def attention(head: int, tokens: int, which: str, *, causal: bool, masked: bool = False) -> dict[str, float]:
    """TFLOP/s forward and backward of 2,048 units of width and 16,384 tokens; a causal one has half the FLOPs."""
    batch, heads = 16384 // tokens, 2048 // head
    queries, keys, values = (drawn(batch, heads, tokens, head).requires_grad_() for _ in range(3))
    gradient = drawn(batch, heads, tokens, head)
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device="cuda").tril() if masked else None
    flops = 4e-12 * batch * heads * tokens**2 * head * (0.5 if causal else 1)
    with sdpa_kernel(KERNELS[which]):

        def forward() -> Tensor:
            return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=causal)

        made = forward()
        ahead = seconds_of(forward, 7)
        back = seconds_of(lambda: torch.autograd.grad(made, (queries, keys, values), gradient, retain_graph=True), 7)
    return {"forward": flops / ahead, "backward": 2.5 * flops / back}


def attentions() -> dict[str, Any]:
    """Attention by implementation, size of heads and tokens."""
    found: dict[str, Any] = {}
    cases = [
        (head, tokens, causal, False) for head in (64, 128) for tokens in (512, 2048, 8192, 16384) for causal in (True, False)
    ]
    cases += [(256, 2048, True, False), (256, 8192, False, False), (128, 2048, False, True), (64, 8192, False, True)]
    for head, tokens, causal, masked in cases:
        for which in KERNELS:
            name = f"{which}, heads of {head}, {tokens} tokens{', causal' * causal}{', masked' * masked}"
            try:
                found[name] = attention(head, tokens, which, causal=causal, masked=masked)
            except RuntimeError as error:
                found[name] = str(error).splitlines()[0][:100]
    return found


def launches() -> dict[str, float]:
    """Microseconds: between small kernels of a full stream, and of the host for one operation."""
    small, graph = drawn(32, 32), torch.cuda.CUDAGraph()
    trained = drawn(32, 32, dtype=torch.float32).requires_grad_()
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    with torch.cuda.stream(side):
        small.add_(1)
    with torch.cuda.graph(graph):
        for _ in range(1000):
            small.add_(1)
    found = {"kernel after kernel in a graph": seconds_of(graph.replay) * 1e3}

    def host(work: Callable[[], object], count: int = 2000) -> float:
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(count):
                work()
            times.append((time.perf_counter() - begin) / count * 1e6)
        torch.cuda.synchronize()
        return statistics.median(times)

    with torch.no_grad():
        found["add, no gradient"] = host(lambda: small + small)
    found["add, with gradient"] = host(lambda: trained + trained)
    layer = torch.nn.Linear(32, 32, device="cuda", dtype=BF16)
    found["nn.Linear, with gradient"] = host(lambda: layer(small))
    found["nn.Linear forward and backward"] = host(lambda: layer(small).sum().backward(), 500)
    return found


def memory() -> dict[str, float]:
    """GB/s of the GPU's memory, read and written."""
    source = drawn(512 * MIB)
    target = torch.empty_like(source)
    wide = drawn(8192, 8192)
    return {
        "copy": 4e-9 * source.numel() / seconds_of(lambda: target.copy_(source)),
        "add in place, 128 MiB": 4e-9 * wide.numel() / seconds_of(lambda: wide.add_(1)),
        "cast of bf16 to fp32": 6e-9 * source.numel() / seconds_of(source.float),
        "softmax in fp32, 8192 x 8192": 6e-9 * wide.numel() / seconds_of(lambda: torch.softmax(wide, -1, torch.float32)),
    }


def copies() -> dict[str, float]:
    """GB/s between host and GPU, and microseconds of a small copy."""
    size = 512 * MIB
    pinned, pageable = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.ones(size, dtype=torch.uint8)
    other = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there, back = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other.copy_(back, non_blocking=True)
        there.copy_(pinned, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    gigabytes = size * 1e-9
    return {
        "h2d, pinned": gigabytes / seconds_of(lambda: there.copy_(pinned, non_blocking=True), 5),
        "d2h, pinned": gigabytes / seconds_of(lambda: pinned.copy_(there, non_blocking=True), 5),
        "each way at once": gigabytes / seconds_of(both, 5),
        "h2d, pageable": gigabytes / seconds_of(lambda: there.copy_(pageable), 3, 1),
        "d2h, pageable": gigabytes / seconds_of(lambda: pageable.copy_(there), 3, 1),
        "h2d of 4 KiB, us": 1e6 * seconds_of(lambda: there[:4096].copy_(pinned[:4096], non_blocking=True), 50),
        "d2h of 4 KiB, us": 1e6 * seconds_of(lambda: pinned[:4096].copy_(there[:4096], non_blocking=True), 50),
    }


def updates() -> dict[str, float]:
    """Seconds of AdamW for 256 M parameters: on the GPU, fused and foreach, in fp32 and bf16; on the CPU, fused."""
    found = {}
    for device, dtype, how in [
        ("cuda", torch.float32, "fused"),
        ("cuda", torch.float32, "foreach"),
        ("cuda", BF16, "fused"),
        ("cuda", BF16, "foreach"),
        ("cpu", torch.float32, "fused"),
    ]:
        weights = [torch.randn(16 * MIB, device=device, dtype=dtype).requires_grad_() for _ in range(16)]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        step = torch.optim.AdamW(weights, fused=how == "fused", foreach=how == "foreach").step
        if device == "cuda":
            found[f"{device}, {dtype}, {how}"] = seconds_of(step, 5)
        else:
            step()
            times = []
            for _ in range(3):
                begin = time.perf_counter()
                step()
                times.append(time.perf_counter() - begin)
            found[f"{device}, {dtype}, {how}, {torch.get_num_threads()} threads"] = statistics.median(times)
        del weights, step
        torch.cuda.empty_cache()
    return found


def pieces() -> dict[str, float]:
    """GB/s of AdamW on the CPU for 16-bit parameters with masters, by the elements of a piece: a gradient is widened, a step
    taken, the result narrowed (34 bytes an element).
    """
    found, count = {}, 64 * MIB
    weights, moments, squares = (torch.zeros(count) for _ in range(3))
    narrow, gradients = torch.zeros(count, dtype=BF16), torch.zeros(count, dtype=BF16)
    for size in (MIB // 4, MIB, 4 * MIB, 16 * MIB):
        wide, times = torch.empty(size), list[float]()
        for _ in range(4):
            begin = time.perf_counter()
            for start in range(0, count, size):
                at = slice(start, start + size)
                wide.copy_(gradients[at])
                torch._fused_adamw_(
                    [weights[at]],
                    [wide],
                    [moments[at]],
                    [squares[at]],
                    [],
                    [torch.ones(())],
                    lr=1e-3,
                    beta1=0.9,
                    beta2=0.999,
                    weight_decay=0.01,
                    eps=1e-8,
                    amsgrad=False,
                    maximize=False,
                )
                narrow[at].copy_(weights[at])
            times.append(time.perf_counter() - begin)
        found[f"{size // 1024} K, {torch.get_num_threads()} threads"] = 34e-9 * count / statistics.median(times[1:])
    return found


def main() -> None:
    """Measure all, and write it."""
    if not torch.cuda.is_available():
        print("there is no GPU that PyTorch can use here: nothing to measure")
        return
    path = Path(sys.argv[sys.argv.index("--out") + 1] if "--out" in sys.argv else "benchmarks") / "gpu_rates.json"
    torch.ones(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    about = Path("/proc/cpuinfo").read_text().splitlines()
    found = earlier(path) | {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpu": next((line.split(": ")[1] for line in about if line.startswith("model name")), ""),
        "cores": os.cpu_count(),
    }
    parts = {part.__name__: part for part in (memory, launches, products, alignment, copies, updates, pieces, attentions)}
    asked = [parts[name] for name in sys.argv[1:] if name in parts] or parts.values()
    empty = (total - free - torch.cuda.memory_reserved()) / 2**30
    for part in asked:
        begin = time.perf_counter()
        try:
            found[part.__name__] = part()
        except RuntimeError as error:
            found[part.__name__] = told(error)
        torch.cuda.empty_cache()
        print(part.__name__, f"{time.perf_counter() - begin:.1f} s", json.dumps(found[part.__name__]))
        path.write_text(json.dumps(found, indent=1) + "\n")
    if len(asked) == len(parts):  # what libraries take shows once all have been used
        full = (total - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()) / 2**30
        found["memory, GiB"] = {"total": total / 2**30, "of an empty process": empty, "after all of that": full}
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
