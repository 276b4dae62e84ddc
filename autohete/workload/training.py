"""Training options: the trained parameters (all, the last blocks, or low-rank adapters beside a frozen base)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from autohete.errors import InputError, OptimizerError, check_fields, unknown_name
from autohete.workload.model import (
    Activation,
    Attention,
    Block,
    Experts,
    FeedForward,
    LatentAttention,
    LinearAttention,
    Mixer,
    Mlp,
    Norm,
    Product,
)
from autohete.workload.optimizers import Optimizer, has_cpu_kernel, optimizer_label, updates_any_share

#: Words for several linear layers at a time, in ``Lora.targets``.
GROUPS = ("all", "attention", "mlp")
#: Bytes of a parameter in NF4 with double quantisation (QLoRA, arXiv 2305.14314, section 3): 4 bits; an 8-bit scale for each
#: block of 64; an fp32 scale for each 256 of these. As bitsandbytes stores it (``functional.py``, ``quantize_4bit`` with
#: ``compress_statistics``): 4.127 bits.
NF4_BYTES = (4 + Fraction(8, 64) + Fraction(32, 64 * 256)) / 8
#: Bytes of a parameter quantised by GPTQ in groups of 128: 4 bits, and of each group a scale in 16 bits and a zero in 4.
GPTQ_BYTES = (4 + Fraction(16 + 4, 128)) / 8
_LARGEST_RANK = 65_536
#: Those that torch updates with foreach kernels.
_FOREACH = (Optimizer.ADAMW, Optimizer.ADAMW_PURE_BF16)
#: Those whose states GaLore makes smaller: ``GaLoreAdamW`` and ``GaLoreAdamW8bit``.
_PROJECTED = (Optimizer.ADAMW, Optimizer.ADAMW_PURE_BF16, Optimizer.ADAMW8BIT, Optimizer.ADAMW8BIT_PURE_BF16)


class Adapters(StrEnum):
    """How adapters of a 16-bit model are held, and what they keep of their inputs.

    ``PLAIN``: like all trained parameters; layers with one input share it (torchtune, LitGPT). PEFT holds them in fp32
    (``autocast_adapter_dtype``), without masters, which takes as many bytes in all as 16 bits, a 16-bit gradient and a master.
    ``CAST``: each layer casts its input to fp32 and keeps it (PEFT 0.21, ``Linear.forward`` in ``tuners/lora/layer.py``).
    ``AUTOCAST``: the same under ``torch.autocast``, as ``transformers``' ``Trainer(bf16=True)`` runs it: each layer keeps a
    16-bit copy of its input and of the adapter. Linear layers in NF4 do not cast their input there (``tuners/lora/bnb.py``), so
    they share it.
    """

    PLAIN = "plain"
    CAST = "cast"
    AUTOCAST = "autocast"


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685), as PEFT adds them: ``x A B`` beside ``x W`` of a linear layer.

    The base is frozen, embedding, norms and head included; adapters have no bias.

    Args:
        rank: columns of A and rows of B.
        targets: the linear layers that have adapters: ``all``, ``attention``, ``mlp``, or names such as ``q_proj``. ``all`` are
            those of blocks without routers, as PEFT's ``all-linear``; each expert counts as linear layers of its own.
        quantised: the linear layers of blocks are held in NF4 and dequantised before each use (QLoRA).
        adapters: see :class:`Adapters`. None: ``AUTOCAST`` if ``transformers``' kernels train with masters, else ``PLAIN``.
        prepared: embedding, head and norms are held in fp32, and so is the residual stream (PEFT's
            ``prepare_model_for_kbit_training``, which trl calls). None: if adapters are under autocast and the base quantised.
        dropout: probability with which elements of an adapter's input are dropped (``lora_dropout``). 0: there is no dropout.
        base_gradients: backward also computes the gradients of the frozen parameters beside adapters, which no update uses. So
            it is where both lie in one flat parameter, which autograd sees as trained: ``FullyShardedDataParallel`` with
            ``use_orig_params`` around whole blocks (``_use_unsharded_views`` in torch/distributed/fsdp/_flat_param.py, 2.13).
        gptq: the base is quantised by GPTQ instead of to NF4. Operations of PyTorch dequantise a weight in each forward, as
            auto-gptq trains without kernels of its own (``forward`` in qlinear_cuda_old.py at 179776bd), and the product keeps
            the dequantised weight for backward.
    """

    rank: int
    targets: tuple[str, ...] = ("all",)
    quantised: bool = False
    adapters: Adapters | None = None
    prepared: bool | None = None
    dropout: float = 0.0
    base_gradients: bool = False
    gptq: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.base_gradients and self.quantised:
            raise InputError("quantised weights have no gradients: leave base_gradients or quantised out of LoRA")
        if self.gptq and not self.quantised:
            raise InputError("gptq says how the base of LoRA is quantised, but it is not: give quantised as well")
        if self.gptq and self.prepared:
            raise InputError("PEFT prepares no base in GPTQ's format: leave prepared or gptq out")
        if not 0 <= self.dropout < 1:
            raise InputError(f"the dropout of LoRA is {self.dropout}: give at least 0 and less than 1, such as 0.05")
        if not 1 <= self.rank <= _LARGEST_RANK:
            raise InputError(f"the rank of LoRA is {self.rank}: give 1 to {_LARGEST_RANK:,}, such as 16")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise InputError(
                f"the targets of LoRA are {', '.join(self.targets) or 'none'}: give {', '.join(GROUPS)}, or names of linear "
                "layers, each once"
            )

    def __str__(self) -> str:
        quantised = f", base in {'GPTQ' if self.gptq else 'NF4'}" if self.quantised else ""
        adapters = f", adapters {self.adapters}" if self.adapters else ""
        prepared = "" if self.prepared is None else f", {'' if self.prepared else 'not '}prepared"
        dropout = f", dropout {self.dropout:g}" if self.dropout else ""
        base = ", gradients of the base" if self.base_gradients else ""
        return f"LoRA of rank {self.rank} on {', '.join(self.targets)}{quantised}{adapters}{prepared}{dropout}{base}"

    @property
    def quantised_bytes(self) -> Fraction:
        """Bytes of a parameter that is quantised."""
        return GPTQ_BYTES if self.gptq else NF4_BYTES


@dataclass(frozen=True, slots=True)
class GaLore:
    """Gradients of the linear layers of blocks are projected (Zhao et al. 2024, arXiv 2403.03507), as in github
    jiaweizzhao/GaLore at 2cc66f8 (``galore_torch/galore_projector.py``, type ``std``; ``torchrun_main.py`` selects the layers).

    A gradient of m x n, m being the larger side, is multiplied by a projector of n x r. The optimizer has states of m x r, and
    its update is multiplied by the projector's transpose. Every ``gap`` updates a singular value decomposition of the gradient
    gives a new projector. With ``resident:in_backward`` each unit is updated and its gradients freed within backward, as its
    updates per layer do for each parameter.

    Args:
        rank: r; of a smaller matrix, its smaller side.
        gap: updates from one decomposition to the next; each counts with its share.
    """

    rank: int
    gap: int = 200

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.rank <= _LARGEST_RANK:
            raise InputError(f"the rank of GaLore is {self.rank}: give 1 to {_LARGEST_RANK:,}, such as 1024")
        if self.gap < 1:
            raise InputError(f"GaLore decomposes gradients every {self.gap} updates: give at least 1, such as 200")

    def __str__(self) -> str:
        return f"GaLore of rank {self.rank}, a new projector every {self.gap} updates"

    def states_of(self, matrix: Product) -> Product:
        """The matrix that a state of ``matrix`` is."""
        large, small = max(matrix.columns, matrix.inner), min(matrix.columns, matrix.inner)
        return Product(large, min(self.rank, small), matrix.rows, matrix.matrices)

    def projector_of(self, matrix: Product) -> Product:
        """Its projector."""
        small = min(matrix.columns, matrix.inner)
        return Product(small, min(self.rank, small), matrix.rows, matrix.matrices)


@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained.

    Args:
        lora: adapters; None: parameters are trained themselves.
        last_blocks: only so many transformer blocks, from the last, are trained (or have adapters), and without adapters the
            head: its norm, and its matrix unless that is the embedding's. Everything below is frozen. None: all are trained.
        optimizer: see :class:`~autohete.workload.optimizers.Optimizer`.
        fp8: products with the weights of blocks are computed in 8 bit, from operands that are cast before each (Transformer
            Engine's ``fp8_autocast``), and backward needs 8-bit copies of weights and inputs. All other values stay in 16 bit.
        early_stop: the recomputation of a block ends when all that backward needs is there (``torch.utils.checkpoint`` with
            ``use_reentrant=False``), which leaves out the last product of a dense block without dropout.
        galore: projection of gradients; None: none.
        foreach: the GPU updates with torch's foreach kernels, as ``torch.optim.AdamW`` does on a GPU unless ``fused`` is given
            (``_multi_tensor_adam`` in torch/optim/adam.py at 2.13). Each reads and writes whole lists of tensors, and the root
            of the second moments of all that one ``step()`` updates is held besides them.
    """

    lora: Lora | None = None
    last_blocks: int | None = None
    optimizer: Optimizer = Optimizer.ADAMW
    fp8: bool = False
    early_stop: bool = False
    galore: GaLore | None = None
    foreach: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.foreach and (self.optimizer not in _FOREACH or self.galore is not None):
            raise InputError(
                f"foreach kernels are modelled for {' and '.join(_FOREACH)}, not for {self.update_name}: choose one, or "
                "leave foreach out"
            )
        if self.galore is not None and self.optimizer not in _PROJECTED:
            raise InputError(f"GaLore projects the gradients of {', '.join(_PROJECTED)}, not of {self.optimizer}: choose one")
        if self.galore is not None and self.lora is not None:
            raise InputError("GaLore projects gradients of whole matrices, but adapters are trained: leave out one of them")
        if self.early_stop and self.fp8:
            raise InputError("early_stop is not known for fp8, whose products save their inputs after they ran: leave out one")
        if self.last_blocks is not None and self.last_blocks < 1:
            raise InputError(f"the last {self.last_blocks} blocks are to be trained: give at least 1, or leave it out")

    def __str__(self) -> str:
        parts = [str(each) for each in (self.galore, self.lora) if each is not None]
        if self.last_blocks is not None:
            parts.append(f"only the last {self.last_blocks} blocks{'' if self.lora else ' and the head'} trained")
        parts += ["products of blocks in fp8"] if self.fp8 else []
        parts += ["recomputation that stops early"] if self.early_stop else []
        parts += ["foreach kernels"] if self.foreach else []
        return ", ".join([optimizer_label(self.optimizer), *parts])

    @property
    def has_cpu_kernel(self) -> bool:
        """Whether the CPU can update."""
        return self.galore is None and has_cpu_kernel(self.optimizer)

    @property
    def updates_any_share(self) -> bool:
        """Whether a part of a unit can be updated by itself."""
        return self.galore is None and updates_any_share(self.optimizer)

    @property
    def update_name(self) -> str:
        """The optimizer, and whether gradients are projected."""
        return f"{self.optimizer}{' with GaLore' if self.galore else ''}"

    def check_cpu_kernel(self) -> None:
        """Check that the CPU can update.

        Raises:
            OptimizerError: it cannot.
        """
        if not self.has_cpu_kernel:
            raise OptimizerError(
                f"the plan updates parameters on the CPU, which has no kernel for {self.update_name}: choose "
                "another optimizer, such as adamw or sgd_momentum, or a policy that updates on the GPU, such as resident, "
                "streamed_states or joint"
            )

    def check(self, blocks: tuple[Block, ...], hidden_size: int) -> None:
        """Refuse targets that none of the model's ``blocks`` has.

        Raises:
            InputError: names the existing ones.
        """
        if self.lora is None:
            return
        layers = [layer for block in dict.fromkeys(blocks) for layer in linear_layers(block, hidden_size)]
        names = sorted({layer.name for layer in layers})
        for target in self.lora.targets:
            if target not in (*names, *GROUPS):
                raise unknown_name("target of LoRA", target, (*names, *GROUPS))


#: All parameters are trained.
FULL = Training()


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer as the model's code has it. Several may be one product here, such as those of queries, keys and values.

    Args:
        name: in ``transformers``.
        shape: its product with the weights.
        mixes: it belongs to the mixer of its block, not to the feed-forward part.
        row: what the table of kernels calls the operation that keeps its input.
    """

    name: str
    shape: Product
    mixes: bool
    row: str

    def adapter_products(self, rank: int) -> tuple[Product, Product]:
        """The two products of an adapter."""
        shape = self.shape
        return (
            Product(rank, shape.inner, shape.rows, shape.matrices),
            Product(shape.columns, rank, shape.rows, shape.matrices),
        )


#: Rows of :mod:`autohete.profile.kernels.decoders` that keep the input of linear layers.
FIRST, LATENT, LAST = "first product", "product of a latent vector", "last product"


def linear_layers(block: Block, hidden_size: int, component: Mixer | FeedForward | None = None) -> tuple[LinearLayer, ...]:
    """The linear layers of ``block`` or of one of its components, without routers and gates of shared experts."""
    parts = (block.mixer, block.feed_forward) if component is None else (component,)
    return tuple(layer for part in parts for layer in _layers(block, hidden_size, part))


def _layers(block: Block, h: int, component: Mixer | FeedForward) -> Iterator[LinearLayer]:
    match component:
        case Attention():
            yield from _attention(block, h, component)
        case LatentAttention():
            products = component.products(h)
            first = ("q_proj",) if component.query_rank is None else ("q_a_proj", "q_b_proj")
            for name, product in zip((*first, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"), products, strict=True):
                row = LATENT if name in ("q_b_proj", "kv_b_proj") else LAST if name == "o_proj" else FIRST
                yield LinearLayer(name, product, True, row)
        case LinearAttention():
            names = ("in_proj_qkvz", "in_proj_ba", "out_proj")
            for name, product in zip(names, component.products(h), strict=True):
                yield LinearLayer(name, product, True, LAST if name == "out_proj" else FIRST)
        case Mlp():
            yield from _mlp(block, h, component)
        case Experts():
            yield from _mlp(block, h, component.expert, component.active, component.here)
            if component.shared is not None:
                yield from _mlp(block, h, component.shared)


def _is_gpt2(block: Block) -> bool:
    """Whether layers have GPT-2's names. OPT, the other family without rotated positions, has another activation function."""
    mlp = block.feed_forward
    return _is_opt(block) and isinstance(mlp, Mlp) and mlp.activation is Activation.GELU_NEW


def _is_opt(block: Block) -> bool:
    """Whether layers have the names of OPT, or of GPT-2."""
    return isinstance(block.mixer, Attention) and not block.mixer.rotary and block.norm is Norm.LAYER


def _attention(block: Block, h: int, a: Attention) -> Iterator[LinearLayer]:
    first, last = a.products(h)
    if _is_gpt2(block) or a.joint:
        yield LinearLayer("c_attn" if _is_gpt2(block) else "qkv_proj", first, True, FIRST)
    else:
        yield LinearLayer("q_proj", Product(first.columns - 2 * a.key_value_size, h), True, FIRST)
        for name in ("k_proj", "v_proj"):
            yield LinearLayer(name, Product(a.key_value_size, h), True, FIRST)
    yield LinearLayer("c_proj" if _is_gpt2(block) else "out_proj" if _is_opt(block) else "o_proj", last, True, LAST)


def _mlp(block: Block, h: int, mlp: Mlp, rows: int = 1, matrices: int = 1) -> Iterator[LinearLayer]:
    names: tuple[str, ...]
    down = "down_proj"
    if not mlp.gated:
        names, down = (("c_fc",), "c_proj") if _is_gpt2(block) else (("fc1",), "fc2")
    else:
        names = ("gate_up_proj",) if mlp.joint else ("gate_proj", "up_proj")
    for name in names:
        yield LinearLayer(name, Product(mlp.up // len(names), h, rows, matrices), False, FIRST)
    yield LinearLayer(down, Product(h, mlp.width, rows, matrices), False, LAST)


def is_target(lora: Lora, layer: LinearLayer) -> bool:
    """Whether the layer has an adapter."""
    group = "attention" if layer.mixes else "mlp"
    return any(target in ("all", group, layer.name) for target in lora.targets)
