"""The rate of fused attention, by implementation, GPU, size of heads and number of keys.

A tile of queries multiplies with its keys one block after another. Beside these it starts and ends: the time of ``idle`` more
keys, which makes short sequences and windows slow. Long ones reach the rates below, TFLOP/s of bf16 with heads of 64, 128 and
256 elements, in between by interpolation. They scale with the rate of matrix products, and so with clocks and power limits:
``products`` is that rate of the GPU that was measured, from its preset.

All rates were fitted to measurements without a causal mask. Those with one check them (``tests/models/attention_rates.csv``).
Sources: [2] README of Dao-AILab/flash-attention at 0251105a, figures of A100 and H100, forward and backward together, split on
an A100 by the 73 and 63 % of the peak that FlashAttention-2 (arXiv 2307.08691, section 4.1) gives; [3] FlashAttention-3 (arXiv
2407.08608), figures 5 and 6; [c] NVIDIA/cudnn-frontend at 3929da2, ``benchmark/sdpa_benchmark_training/results``: cuDNN 9.19
on H200 and 9.22 on GB200; [f] pytorch/pytorch pull 137036, comment of 2024-10-29: H100, heads of 64, 16,384 keys; [s]
thu-ml/SageAttention, ``assets``: forward on RTX 3090, 4090 and 5090; [b] Dao-AILab/flash-attention issue 1589 and pull 2605,
and meta-pytorch/tritonbench pull 171: B200; [o] ``benchmarks/gpu_rates.json``: an H100 with heads of 256.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from autohete.errors import InputError
from autohete.hardware import Gpu
from autohete.workload import FusedAttention

_HEAD_SIZES = (64, 128, 256)
#: Of heads of 64, 128 and 256 elements.
_BySize = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Speed:
    """What an implementation reaches on a GPU.

    Args:
        products: TFLOP/s of large matrix products on it.
        forward, backward: TFLOP/s of attention with long sequences.
        idle: keys whose time a tile takes beside its own, forward and backward.
    """

    products: float
    forward: _BySize
    backward: _BySize
    idle: tuple[float, float]

    def scaled(self, forward: _BySize, backward: _BySize) -> Speed:
        """The same at shares of these rates."""
        return Speed(
            self.products,
            _times(self.forward, forward),
            _times(self.backward, backward),
            self.idle,
        )

    def slowdown(self, head_size: float, keys: float, *, backward: bool) -> float:
        """How many times as long as a matrix product of as many FLOPs it takes."""
        rate = _between(self.backward if backward else self.forward, head_size)
        return self.products / rate * (keys + self.idle[backward]) / keys


def _times(rates: _BySize, shares: _BySize) -> _BySize:
    small, middle, large = (rate * share for rate, share in zip(rates, shares, strict=True))
    return small, middle, large


def _between(rates: _BySize, head_size: float) -> float:
    """The rate for a size of heads."""
    size = min(max(head_size, _HEAD_SIZES[0]), _HEAD_SIZES[-1])
    at = min(bisect_right(_HEAD_SIZES, size), len(_HEAD_SIZES) - 1)
    low, high = _HEAD_SIZES[at - 1], _HEAD_SIZES[at]
    return rates[at - 1] + (rates[at] - rates[at - 1]) * (size - low) / (high - low)


#: FlashAttention 2 by compute capability. Where heads of 256 were not measured, they have 0.88 of the rate of 128, as on an
#: H100 [3]. Backward on GeForce: 0.95 of forward, as on an RTX A5000 (github gpu-mode/ring-attention issue 10).
_FA2 = {
    8.0: Speed(252.7, (198, 228, 200), (171, 197, 173), (75, 215)),  # [2]
    8.6: Speed(75.8, (71, 71, 62), (67, 67, 59), (160, 260)),  # [s]
    8.9: Speed(163.5, (169, 166, 146), (161, 158, 139), (160, 260)),  # [s]
    9.0: Speed(742, (327, 377, 331), (299, 329, 289), (92, 265)),  # [3]
    10.0: Speed(1552, (363, 361, 318), (334, 332, 292), (92, 265)),  # [b]
    12.0: Speed(240.6, (219, 219, 193), (208, 208, 183), (160, 260)),  # [s]
}
#: Others, where they were measured. Backward with heads of 256: as with 128 (FlashAttention 3), or in proportion to forward.
_OWN = {
    FusedAttention.FA3: {9.0: Speed(742, (510, 670, 787), (501, 592, 592), (260, 427))},  # [3]
    FusedAttention.CUDNN: {
        9.0: Speed(742, (419, 707, 598), (452, 610, 516), (160, 390)),  # [c], of 64 and 256 [3]
        10.0: Speed(1550, (1175, 1747, 1747), (1030, 1396, 1396), (300, 400)),  # [c], of 64 [b]
    },
    # Backward on GeForce: as on an A100, 0.40 to 0.48 of FlashAttention 2's. On H100 heads of 128 in the proportion of an A100.
    # Backward with heads of 256: 0.28 of that with 128, as on an H100: all run the same kernel.
    FusedAttention.EFFICIENT: {
        8.6: Speed(75.8, (46, 46, 46), (27, 32, 9), (90, 260)),  # [s]
        8.9: Speed(163.5, (126, 106, 106), (64, 76, 22), (90, 260)),  # [s]
        9.0: Speed(742, (140, 161, 142), (107, 141, 40), (92, 265)),  # [f], of 256 [o]
    },
}
#: With a mask each head reads its scores' part of it. Times that this takes longer than at the bandwidth of the GPU's memory,
#: forward and backward: 16.1 and 11.7 ms (efficient), 28.9 and 17.6 ms (cuDNN) for 34 GB [f].
MASK_READS: dict[FusedAttention, tuple[float, float]] = {
    FusedAttention.EFFICIENT: (1.4, 1.0),
    FusedAttention.CUDNN: (2.4, 1.5),
}
#: Rates of the others as shares of FlashAttention 2's, on an A100 [2], with heads of 256 as above. cuDNN on Ampere, Ada and
#: GeForce has the same algorithm (its documentation), and no public rates.
_SHARES: dict[FusedAttention, tuple[_BySize, _BySize]] = {
    FusedAttention.FA1: ((0.62, 0.40, 0.40),) * 2,
    FusedAttention.TRITON: ((0.57, 0.47, 0.47),) * 2,
    FusedAttention.EFFICIENT: ((0.54, 0.54, 0.54), (0.40, 0.48, 0.16)),
    FusedAttention.CUDNN: ((1.0, 1.0, 1.0),) * 2,
}
#: The least compute capability that each needs, and the first that it no longer runs on (github Dao-AILab/flash-attention,
#: README; PyTorch 2.13, ``check_flash_attention_hardware_support`` and ``check_cudnn_hardware_support`` in ``sdp_utils.cpp``).
_RUNS_ON = {
    FusedAttention.FA1: (8.0, 99.0),
    FusedAttention.FA2: (8.0, 99.0),
    FusedAttention.FA3: (9.0, 10.0),
    FusedAttention.CUDNN: (8.0, 99.0),
    FusedAttention.TRITON: (8.0, 99.0),
    FusedAttention.EFFICIENT: (5.0, 99.0),
}
#: Of a GPU that does not give it, such as one of AMD: the share of FlashAttention 2 on an A100 is assumed.
_UNKNOWN = 8.0


def default_attention(capability: float | None, value_size: int = 128, *, masked: bool = False) -> FusedAttention:
    """What ``scaled_dot_product_attention`` of PyTorch 2.13 takes (``priority_order`` in ``sdp_utils.cpp``): cuDNN on Hopper
    and on Blackwell for data centres, if heads have at most 128 elements (``check_cudnn_tensor_shapes``), elsewhere
    FlashAttention 2, and with a mask or before Ampere the memory-efficient kernel. Transformer Engine 2 prefers the same two.

    Args:
        capability: compute capability; None: not known.
        value_size: elements of a head's values.
        masked: it gets a mask, which FlashAttention 2 does not take (``check_for_attn_mask``).
    """
    if capability is not None and 9 <= capability < 11 and value_size <= 128:
        return FusedAttention.CUDNN
    old = capability is not None and capability < 8
    return FusedAttention.EFFICIENT if old or masked else FusedAttention.FA2


def attention_speed(made: FusedAttention, capability: float | None) -> Speed:
    """The speed of an implementation."""
    capability = _UNKNOWN if capability is None else capability
    table = _OWN.get(made, {})
    near = [each for each in table if each <= capability < int(each) + 1]
    if near:
        return table[max(near)]
    fa2 = _FA2[max([each for each in _FA2 if each <= capability], default=_UNKNOWN)]
    return fa2 if made is FusedAttention.FA2 else fa2.scaled(*_SHARES[made])


def check_attention(asked: FusedAttention | None, gpu: Gpu, hardware: str) -> None:
    """Refuse an implementation that does not run on ``gpu``.

    Raises:
        InputError: names those that do.
    """
    capability = _UNKNOWN if gpu.compute_capability is None else gpu.compute_capability
    if asked is None or _runs(asked, capability):
        return
    has = "does not say its compute capability (8 is assumed)" if gpu.compute_capability is None else f"has {capability:g}"
    able = ", ".join(each for each in FusedAttention if _runs(each, capability))
    raise InputError(
        f"attention {asked} needs a GPU of compute capability {_needed(asked)}, but that of {hardware} {has}: use {able}, or "
        "leave it out for what PyTorch takes"
    )


def _needed(one: FusedAttention) -> str:
    least, end = _RUNS_ON[one]
    return f"{least:g} or more" if end > 20 else f"{least:g} up to {end:g}"


def _runs(one: FusedAttention, capability: float) -> bool:
    least, end = _RUNS_ON[one]
    return least <= capability < end
