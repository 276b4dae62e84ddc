"""How long and how big: seconds and bytes of every block of one workload on one hardware.

The analytic profile is a roofline per block (Williams et al. 2009): matrix products at the GPU's GEMM rate, everything
else at its memory bandwidth, plus a fixed cost per kernel. So efficiency falls with the hidden size and with few tokens
without a curve that would have to be fitted. A measured profile is the same type.
"""

from __future__ import annotations

from dataclasses import dataclass

from autohete.errors import check_fields
from autohete.hardware import Hardware
from autohete.workload import BlockRole, Precision, Workload

#: cuBLAS works through K in steps and pays for filling its pipeline once per tile; a product of inner size K reaches
#: K / (K + 256) of the rate of a long one (NVIDIA, "Matrix Multiplication Background", shape of the K sweep).
_GEMM_INNER_HALF = 256
#: Element reads and writes per token and hidden unit of one forward pass outside the matrix products: two norms (4),
#: GELU on 4h (8), two dropouts (4), two residual sums (6), splitting q, k, v and joining heads (8); masks on top.
_ELEMENTWISE_ACCESSES = 30
#: Kernels of one forward pass: 4 products, 2 norms, attention, GELU, 2 dropouts, 2 sums, 3 copies.
_FORWARD_KERNELS = 15
#: Bytes that a fused AdamW on the GPU touches per parameter: master weight and both moments read and written in fp32 (24);
#: gradient and, in mixed precision, the 16-bit parameter come on top.
_ADAM_STATE_TRAFFIC_BYTES = 24
#: Fused attention runs at about this share of the GEMM rate forward (Dao 2023, table of A100 forward speeds).
_ATTENTION_SHARE = 0.65
#: Its backward makes five products where forward makes two (Dao et al. 2022, algorithm 4).
_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True, slots=True)
class BlockProfile:
    """One block: times in seconds on an undisturbed engine, sizes in bytes.

    Args:
        role: embedding, transformer or head.
        parameters: parameters it owns.
        forward_seconds, backward_seconds: GPU time of one pass; recomputation takes a forward pass again.
        gpu_update_seconds: optimizer step of this block on the GPU.
        input_bytes: its input, all that stays when the block is checkpointed.
        activation_bytes: what forward keeps for backward, its input included.
        forward_workspace_bytes, backward_workspace_bytes: what lives only during the pass.
        gpu_update_workspace_bytes: likewise for the optimizer step on the GPU.
        cpu_update_seconds: optimizer step on the CPU where it was measured; None: by the bytes that the plan says it touches.
    """

    role: BlockRole
    parameters: int
    forward_seconds: float
    backward_seconds: float
    gpu_update_seconds: float
    input_bytes: int
    activation_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    gpu_update_workspace_bytes: int = 0
    cpu_update_seconds: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class LossProfile:
    """Cross-entropy between the head's forward and backward.

    Args:
        seconds: GPU time, its own backward included.
        logits_bytes: the logits, and as many for their gradient.
        workspace_bytes: log-probabilities (and gradient) in fp32, alive only during the loss.
    """

    seconds: float
    logits_bytes: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Times and sizes of ``workload`` on ``hardware``.

    Copies and CPU updates are not per block: their time is ``latency + bytes / bandwidth`` of the hardware,
    because the bytes depend on the plan.
    """

    workload: Workload
    hardware: Hardware
    blocks: tuple[BlockProfile, ...]
    loss: LossProfile

    @property
    def element_bytes(self) -> int:
        """Bytes of a parameter or gradient element as the GPU computes with it."""
        return self.workload.precision.element_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state per parameter."""
        return self.workload.precision.optimizer_bytes

    def h2d_seconds(self, size_bytes: float) -> float:
        """A copy of ``size_bytes`` to the GPU, alone on the link."""
        return self.hardware.h2d.latency_seconds + size_bytes / self.hardware.h2d.bandwidth

    def d2h_seconds(self, size_bytes: float) -> float:
        """A copy of ``size_bytes`` to the host, alone on the link."""
        return self.hardware.d2h.latency_seconds + size_bytes / self.hardware.d2h.bandwidth

    def cpu_update_seconds(self, block: int, bytes_per_parameter: float) -> float:
        """Optimizer step of ``block`` on the CPU, undisturbed; it touches ``bytes_per_parameter`` of DRAM if not measured."""
        measured = self.blocks[block].cpu_update_seconds
        if measured is not None:
            return measured
        return self.blocks[block].parameters * bytes_per_parameter / self.hardware.cpu.update_bandwidth


def analytic_profile(workload: Workload, hardware: Hardware) -> Profile:
    """The roofline profile of ``workload`` on ``hardware``."""
    roofline = _Roofline(workload, hardware)
    blocks = tuple(roofline.block(workload.role(block)) for block in range(workload.blocks))
    return Profile(workload, hardware, blocks, roofline.loss())


class _Roofline:
    def __init__(self, workload: Workload, hardware: Hardware) -> None:
        self.workload, gpu = workload, hardware.gpu
        mixed = workload.precision is not Precision.FP32
        self.flops = (gpu.peak_16bit_flops if mixed else gpu.peak_32bit_flops) * gpu.gemm_efficiency
        self.bandwidth = gpu.memory_bandwidth * gpu.memory_efficiency
        self.overhead = gpu.kernel_overhead_seconds
        self.element = workload.precision.element_bytes

    def _gemm_seconds(self, columns: int, inner: int) -> float:
        """``tokens x inner`` times ``inner x columns``: the slower of arithmetic and memory."""
        tokens = self.workload.tokens
        arithmetic = 2 * tokens * columns * inner / self.flops * (inner + _GEMM_INNER_HALF) / inner
        traffic = self.element * (tokens * inner + inner * columns + tokens * columns) / self.bandwidth
        return max(arithmetic, traffic)

    def _attention_seconds(self) -> float:
        w = self.workload
        flops = 4 * w.tokens * w.sequence_length * w.hidden_size
        if w.fused_attention:
            return flops / (self.flops * _ATTENTION_SHARE)
        # Scores are written and read around softmax and dropout: 5 passes over b a s^2 elements, and the masks.
        scores = w.tokens * w.sequence_length * w.heads
        return flops / self.flops + scores * (5 * self.element + 2) / self.bandwidth

    def block(self, role: BlockRole) -> BlockProfile:
        w, element = self.workload, self.element
        hidden_bytes = element * w.tokens * w.hidden_size  # one activation of the residual stream
        parameters = w.block_parameters(role)
        if role is BlockRole.TRANSFORMER:
            h = w.hidden_size
            # Elements at 16 bit and two dropout masks of a byte: 34 b s h (Korthikanti et al. 2022, section 4.1) …
            activations = 16 * hidden_bytes + 2 * w.tokens * h
            if not w.fused_attention:  # … and 5 b s^2 a without fused attention.
                activations += w.tokens * w.sequence_length * w.heads * (2 * element + 1)
            gemm = sum(self._gemm_seconds(*shape) for shape in ((3 * h, h), (h, h), (4 * h, h), (h, 4 * h)))
            attention = self._attention_seconds()
            elementwise = (_ELEMENTWISE_ACCESSES * element + 2) * w.tokens * h / self.bandwidth
            launches = _FORWARD_KERNELS * self.overhead
            forward = gemm + attention + elementwise + launches
            # Each product has two in backward; each elementwise kernel reads the gradient as well.
            backward_attention = _ATTENTION_BACKWARD if w.fused_attention else 2.0
            backward = 2 * gemm + backward_attention * attention + 2 * elementwise + 2 * launches
            # Largest transients: the 4h output before GELU's copy is kept; gradients at 4h in and out, and at h. Plain
            # attention: a copy of the scores forward, gradients of softmax's input and output backward.
            scores = 0 if w.fused_attention else element * w.tokens * w.sequence_length * w.heads
            workspaces = (max(4 * hidden_bytes, scores), max(9 * hidden_bytes, 2 * scores + hidden_bytes))
        elif role is BlockRole.EMBEDDING:
            # Gather (or scatter-add) of token and position rows, dropout.
            activations = w.tokens * (8 + w.hidden_size)  # token ids and dropout mask
            forward = 6 * hidden_bytes / self.bandwidth + 3 * self.overhead
            # The gradient of the whole table is written, however few tokens there are.
            backward = (5 * hidden_bytes + 2 * element * parameters) / self.bandwidth + 3 * self.overhead
            workspaces = (2 * hidden_bytes, hidden_bytes)
        else:
            activations = 2 * hidden_bytes  # the norm's input and the projection's
            gemm = self._gemm_seconds(w.vocabulary_size, w.hidden_size)
            norm = 2 * hidden_bytes / self.bandwidth
            forward = gemm + norm + 2 * self.overhead
            backward = 2 * gemm + 2 * norm + 4 * self.overhead
            workspaces = (0, 2 * hidden_bytes)
        update_traffic = _ADAM_STATE_TRAFFIC_BYTES + (2 * element if element == 2 else element)
        return BlockProfile(
            role=role,
            parameters=parameters,
            forward_seconds=forward,
            backward_seconds=backward,
            gpu_update_seconds=parameters * update_traffic / self.bandwidth + self.overhead,
            input_bytes=min(activations, 8 * w.tokens if role is BlockRole.EMBEDDING else hidden_bytes),
            activation_bytes=activations,
            forward_workspace_bytes=workspaces[0],
            backward_workspace_bytes=workspaces[1],
        )

    def loss(self) -> LossProfile:
        w, element = self.workload, self.element
        logits = w.tokens * w.vocabulary_size
        # Cast to fp32, log-softmax, and their backward: PyTorch keeps the fp32 log-probabilities (4 B) and, in mixed
        # precision, makes an fp32 gradient (4 B) before its cast.
        workspace = (4 + (4 if element == 2 else 0)) * logits
        traffic = (2 * element + 5 * 4) * logits
        return LossProfile(traffic / self.bandwidth + 6 * self.overhead, element * logits, workspace)
