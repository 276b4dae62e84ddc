"""What transformers' models with PEFT's adapters keep for backward, against real trainings of a small one on the CPU."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
bitsandbytes = pytest.importorskip("bitsandbytes")

from support.counting import Counter, counting  # noqa: E402
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402

from autohete.hardware import load_hardware  # noqa: E402
from autohete.profile import Profile, analytic_profile  # noqa: E402
from autohete.profile.adapters import additions  # noqa: E402
from autohete.profile.kernels.gpt2 import FLASH  # noqa: E402
from autohete.profile.roofline import _Roofline  # noqa: E402
from autohete.tracing.on_cuda import PRODUCTS, one_kernel_dropout  # noqa: E402
from autohete.workload import Kernels, Workload  # noqa: E402
from autohete.workload.config import parse_model  # noqa: E402
from autohete.workload.training import NF4_BYTES, Adapters, Lora, Training  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BATCH, SEQUENCE, HIDDEN, HEAD = 2, 32, 64, 16
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 224,
    "num_attention_heads": HIDDEN // HEAD,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TWO = ("q_proj", "v_proj")
#: Each training: its description, and whether it runs under autocast.
CASES: dict[str, tuple[Lora | None, bool]] = {
    "full": (None, False),
    "under autocast": (Lora(8), True),
    "under autocast, two layers": (Lora(8, TWO), True),
    "cast": (Lora(8, adapters=Adapters.CAST), False),
    "16 bit": (Lora(8, adapters=Adapters.PLAIN), False),
    "NF4 under autocast": (Lora(8, quantised=True, prepared=False), True),
    "NF4 cast": (Lora(8, quantised=True, adapters=Adapters.CAST), False),
    "NF4 prepared": (Lora(8, quantised=True), True),
    "NF4 prepared, two layers": (Lora(8, TWO, quantised=True), True),
    "under autocast, dropout": (Lora(8, dropout=0.1), True),
    "cast, dropout": (Lora(8, adapters=Adapters.CAST, dropout=0.1), False),
    "16 bit, dropout": (Lora(8, TWO, adapters=Adapters.PLAIN, dropout=0.1), False),
    "NF4 under autocast, dropout": (Lora(8, quantised=True, prepared=False, dropout=0.1), True),
    "NF4 prepared, dropout": (Lora(8, quantised=True, dropout=0.1), True),
}


def profiled(lora: Lora | None) -> Profile:
    plain = parse_model({"model_type": "llama", **SIZES}, "small")
    shape: dict[str, Any] = {"sequence_length": SEQUENCE, "batch_size": BATCH, "kernels": Kernels.EAGER_FLASH}
    workload: Workload = replace(plain, **shape, training=Training(lora))
    return analytic_profile(workload, load_hardware("a100-40gb-epyc7713"))


def model(lora: Lora | None) -> Any:
    """The same model in bf16, as a user would make it with transformers, bitsandbytes and PEFT."""
    config = transformers.LlamaConfig(**SIZES, attn_implementation="sdpa")
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if lora is None:
        return made
    if lora.quantised:
        for block in made.model.layers:
            for part in (block.self_attn, block.mlp):
                for name, layer in list(part.named_children()):
                    if isinstance(layer, torch.nn.Linear):
                        nf4 = bitsandbytes.nn.Linear4bit(
                            layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
                        )
                        nf4.weight = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
                        setattr(part, name, nf4.to("cpu"))
        made.is_loaded_in_4bit = True
        if lora.prepared is None and lora.adapters is None:
            made = peft.prepare_model_for_kbit_training(made, use_gradient_checkpointing=False)
    targets = list(ALL if lora.targets == ("all",) else lora.targets)
    config = peft.LoraConfig(r=lora.rank, target_modules=targets, lora_dropout=lora.dropout)
    return peft.get_peft_model(made, config, autocast_adapter_dtype=lora.adapters is not Adapters.PLAIN).train()


@contextmanager
def under_autocast(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Autocast on the CPU, which ``torch.is_autocast_enabled()`` reports as PEFT sees it on a GPU."""
    original = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: original(*(device or ("cpu",))))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        yield


def kept_bytes(module: Any, compute: Callable[[], Any]) -> int:
    """Bytes of the storages that are saved for backward, without parameters, inverse deviations of norms, and the angles that
    all blocks share.
    """
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    small = ((BATCH, SEQUENCE, 1), (1, 1, SEQUENCE, HEAD))
    own = (each for key, each in kept.items() if key not in parameters and tuple(each.shape) not in small)
    return sum(each.untyped_storage().nbytes() for each in own)


def first_block(lora: Lora | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Profile, Any, Any, Any, Any]:
    """The profile, the model, its stack of blocks, and what the first of these gets: an input, and angles."""
    monkeypatch.setattr(torch.nn.functional, "dropout", one_kernel_dropout)
    whole = model(lora)
    base = (whole if lora is None else whole.get_base_model()).model
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=base.norm.weight.dtype, requires_grad=True)
    return profiled(lora), whole, base, x, base.rotary_emb(x, torch.arange(SEQUENCE)[None])


@pytest.mark.parametrize("case", CASES)
def test_blocks_and_head_keep_as_many_bytes_as_in_a_real_training(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, whatever the format of adapters and base; and what one block hands to the next has the same size."""
    lora, autocast = CASES[case]
    profile, whole, base, x, angles = first_block(lora, monkeypatch)
    outputs = []
    with under_autocast(autocast, monkeypatch):
        found = kept_bytes(whole, lambda: outputs.append(base.layers[0](x, position_embeddings=angles)))
        head = kept_bytes(whole, lambda: (whole if lora is None else whole.get_base_model()).lm_head(base.norm(x)))
    assert found == profile.units[1].activation_bytes
    assert head == profile.units[-1].activation_bytes
    assert x.untyped_storage().nbytes() == outputs[0].untyped_storage().nbytes() == profile.units[1].input_bytes


@pytest.mark.parametrize("case", CASES)
def test_blocks_access_as_many_bytes_as_in_a_real_training(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of everything elementwise within 3 %: that of the block, and of adapters and casts, which are in fp32 or in 16 bit."""
    lora, autocast = CASES[case]
    profile, _, base, x, angles = first_block(lora, monkeypatch)
    with under_autocast(autocast, monkeypatch), counting() as counter:
        out = base.layers[0](x, position_embeddings=angles)
        counter.backward = True
        out.backward(torch.empty_like(out))
    for direction, priced in zip(("forward", "backward"), accessed_bytes(profile), strict=True):
        calls = (call for call in counter.calls if call.backward is (direction == "backward"))
        ours = (call for call in calls if call.name not in PRODUCTS and not re.search("attention|bitsandbytes", call.name))
        assert priced == pytest.approx(sum(many * size for call in ours for many, size in call.touched), rel=0.03), direction


def accessed_bytes(profile: Profile) -> tuple[float, float]:
    """Bytes that the elementwise kernels of a block access, forward and backward, without attention and dequantisation."""
    workload = profile.workload
    roofline = _Roofline(workload, replace(profile.hardware.gpu, memory_bandwidth=1.0, memory_efficiency=1.0), 0.0)
    added = additions(workload, 1, lambda product, fp32: (0.0, 0.0), 1.0)
    whole = roofline._part(1)
    part = replace(whole, operations=tuple(one for one in whole.operations if one.name != FLASH))
    dequantised = workload.quantised_parameters(1) * (NF4_BYTES + 2)
    both = zip(("forward", "backward"), (added.forward_seconds, added.backward_seconds), strict=True)
    forward, backward = (roofline._elementwise_seconds(part, one, 0) + more - dequantised for one, more in both)
    return forward, backward


@pytest.mark.parametrize("prepared", [False, True])
def test_frozen_parameters_have_as_many_bytes(prepared: bool) -> None:
    """Embedding, norms and head are in 16 bit, or in fp32 once the model is prepared."""
    lora = Lora(8, quantised=True, prepared=None if prepared else False)
    profile, whole = profiled(lora), model(lora)
    sizes = {name: parameter.untyped_storage().nbytes() for name, parameter in whole.named_parameters()}
    embedding = sum(size for name, size in sizes.items() if "embed_tokens" in name)
    head = sum(size for name, size in sizes.items() if "lm_head" in name or "model.norm" in name)
    assert (embedding, head) == (profile.frozen_bytes(0), profile.frozen_bytes(len(profile.units) - 1))


@pytest.mark.parametrize("case", ["under autocast", "NF4 prepared"])
def test_checkpointing_keeps_inputs_of_blocks(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a forward with gradient checkpointing there are the inputs of blocks, what the head keeps, the logits in 16 bits
    and their log-softmax in fp32.
    """
    lora, autocast = CASES[case]
    profile, whole = profiled(lora), model(lora)
    whole.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(0, 1000, (BATCH, SEQUENCE))
    counter = Counter()
    with counter, under_autocast(autocast, monkeypatch):
        outputs = whole(input_ids=tokens, labels=tokens, use_cache=False)
    counter.watch([outputs.loss])  # without the casts of parameters that autocast holds until its end
    found = sum(size for _, size in counter._storages.values())
    wanted = sum(unit.input_bytes for unit in profile.units[1:-1]) + profile.units[-1].activation_bytes
    wanted += (2 + 4) * BATCH * SEQUENCE * 1000
    assert wanted <= found < wanted + 6 * 1024  # angles, and what is one number a token; an input has 8 or 16 KiB
