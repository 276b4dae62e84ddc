"""Do the results on the emulated device hold on a GPU: exact training, predicted times and peaks, speed beside other systems?

Command: ``python experiments/gpu_check.py [--out DIR] [--part NAME ...]``. Machine: one with a CUDA GPU of 24 GB or more and
32 GB of host memory, otherwise idle; about ten minutes. Without a GPU it says so and does nothing.

Each part runs in its own process, so that a crash does not affect the others; failures are recorded as text:

- *tests*: ``pytest -m gpu``.
- *exactness*: a small GPT trained by the Trainer under several policies, in deterministic mode, against a plain loop on the GPU
  with ``AdamW(fused=True)``. The CPU's AdamW rounds differently from the GPU's, so a second plain loop updates the same blocks
  on the CPU as the policy does.
- *fidelity*: a GPT of 354 M parameters (bf16, fp32 master weights) under each policy and several memory budgets: iteration
  time, peak of allocated memory, what the allocator reserves beyond it (fragmentation), tokens per second. Policies with fixed
  rules do the same under each budget, or do not fit.
- *plain*, *fsdp2*, *deepspeed*: tokens per second of the same model, batch, precision and steps resident, with FSDP2 and CPU
  offload, and with DeepSpeed's ZeRO-Offload where it is installed.

Writes ``gpu_check.json`` after each part; parts of earlier runs stay in it. What would refute it: an exactness row whose
training with updates alike is not bit-identical; a mean absolute error of the iteration time above 10 %, or a peak more than
10 % off; autohete slower than FSDP2 where its budget is at least what FSDP2 takes.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed
from cyclopts import App
from torch import Tensor, nn

from autohete import Trainer
from autohete.analysis.comparison import compare
from autohete.cli.app import run_app
from autohete.cli.interrupt import children_uninterrupted
from autohete.errors import InfeasibleError, InputError
from autohete.files import make_folder, write_text
from autohete.hardware import load_hardware
from autohete.plan import Plan
from autohete.policies import parse_policy
from autohete.profile import Profile
from autohete.quantities import format_bytes
from autohete.report.tables import console, print_text
from autohete.runtime.losses import next_token_loss
from autohete.runtime.update_rules import default_group, default_optimizer
from autohete.schedule import Kind
from autohete.simulate import judge_for, simulate_plan
from autohete.train.as_executed import as_executed
from autohete.train.gpt import GPT, seeded_gpt
from autohete.train.machine import versions
from autohete.train.measured import measured_hardware, measured_profile_on
from autohete.workload import Precision, Workload
from experiments.fidelity import with_budget

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "cuda"

Part = Literal["tests", "exactness", "fidelity", "plain", "fsdp2", "deepspeed"]
Pair = tuple[Tensor, Tensor]

POLICIES = ["resident", "resident:checkpointing=full", "zero_offload", "patrickstar", "stronghold", "autohete", "fsdp2_offload"]
#: Small chunks, so that a small model has several.
SMALL_POLICIES = [*POLICIES[:3], "patrickstar:chunk_size=1", "stronghold:window=1", "stronghold:window=2", "autohete"]
#: In percent of what the training would need resident: within the first one little fits, within the last one every policy.
BUDGETS = [40, 70, 120]
#: Sizes are multiples of 256 bytes: in a flat buffer, too, every matrix then begins as well aligned as by itself, and cuBLAS
#: chooses the same kernels.
SMALL = Workload("small", 256, 4, 4, vocabulary_size=512, sequence_length=128, batch_size=4)
LARGE = Workload("gpt-350m", 1024, 24, 16, vocabulary_size=50257, sequence_length=1024, batch_size=8)
EXACT_STEPS = 5
WARMUP, STEPS = 3, 8


@dataclass(frozen=True, slots=True)
class Exactness:
    """Training under a policy compared with plain training.

    Args:
        policy, precision: what was trained.
        cpu_blocks: blocks whose AdamW runs on the CPU.
        identical: losses and parameters are bit-identical to those of the plain loop on the GPU.
        identical_updates_alike: bit-identical to those of the plain loop that also updates these blocks on the CPU.
        largest_difference: largest difference of a parameter from the plain loop on the GPU.
        failure: why there is no result.
    """

    policy: str
    precision: Precision
    cpu_blocks: int = 0
    identical: bool | None = None
    identical_updates_alike: bool | None = None
    largest_difference: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Prediction and measurement of a policy under a budget.

    Args:
        policy, budget_percent, budget_bytes: what was run; the budget in percent of fully resident training.
        failure: why there is no measurement, such as that the plan does not fit.
        plan: counts of blocks.
        clock: clock of the measurement.
        predicted_seconds, measured_seconds, error_percent: time of a steady iteration.
        predicted_peak_bytes, measured_peak_bytes, peak_error_percent: peak of allocated memory.
        reserved_bytes: peak memory reserved by the allocator; ``fragmentation_bytes`` of it were never allocated.
        tokens_per_second: by the wall clock, until the last update has ended.
        retries: times that the allocator gave its free memory back to find more, which waits for the GPU.
        kinds: predicted and measured seconds of an iteration in all tasks of a kind.
        idle: predicted and measured seconds of an iteration in which the GPU computes nothing, by cause.
    """

    policy: str
    budget_percent: int
    budget_bytes: int
    failure: str = ""
    plan: str = ""
    clock: str = ""
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    error_percent: float | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    peak_error_percent: float | None = None
    reserved_bytes: int | None = None
    fragmentation_bytes: int | None = None
    tokens_per_second: float | None = None
    retries: int | None = None
    kinds: dict[str, tuple[float, float]] = field(default_factory=dict)
    idle: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Baseline:
    """Another system, measured by the wall clock and by PyTorch's allocator."""

    system: str
    tokens_per_second: float
    seconds: float
    peak_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Pytest:
    """The summary line of pytest."""

    exit_code: int
    seconds: float
    tail: str


# --- what is trained


def fresh(workload: Workload, device: str = "cpu") -> GPT:
    """Return the model with dropout, from a fixed seed."""
    with torch.device(device):
        return seeded_gpt(workload, dropout=0.1, seed=0)


def pair(workload: Workload, seed: int = 0, device: str = "cpu") -> Pair:
    """Return random tokens and targets."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, workload.batch_size, workload.sequence_length)
    ids, targets = torch.randint(0, workload.vocabulary_size, shape, generator=generator).to(device)
    return ids, targets


def plainly(model: GPT, on_cpu: Collection[int] = ()) -> tuple[Callable[[Pair], float], list[Tensor]]:
    """Return a step of ordinary training and its fp32 weights; AdamW of the blocks ``on_cpu`` runs on the CPU."""
    parameters: list[nn.Parameter] = []
    masters: list[nn.Parameter] = []
    for i, block in enumerate((model.embedding, *model.blocks, model.head)):
        for parameter in block.parameters():
            parameters.append(parameter)
            if i in on_cpu:
                masters.append(nn.Parameter(parameter.detach().to("cpu", torch.float32)))
            elif parameter.dtype is torch.float32:
                masters.append(parameter)
            else:
                masters.append(nn.Parameter(parameter.detach().float()))
    optimizers = [
        default_optimizer(group)
        for kind in ("cpu", "cuda")
        if (group := [master for master in masters if master.device.type == kind])
    ]

    def step(batch: Pair) -> float:
        ids, targets = batch
        loss = next_token_loss(model(ids), targets)
        for master, gradient in zip(masters, torch.autograd.grad(loss, parameters), strict=True):
            master.grad = gradient.to(master.device, torch.float32)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for parameter, master in zip(parameters, masters, strict=True):
            if parameter is not master:
                parameter.data.copy_(master.detach())
        return loss.item()

    return step, [master.detach() for master in masters]


# --- exactness


def small_profile(workload: Workload) -> Profile:
    """Measure the small model on the GPU, on a node with slow links, so that searched plans use every mechanism."""
    slow = {"links.h2d.bandwidth": "1GB/s", "links.d2h.bandwidth": "1GB/s", "cpu.update_bandwidth": "2GB/s"}
    node = load_hardware("a100-40gb-epyc7713", slow)
    return measured_profile_on(node, fresh(workload), pair(workload), DEVICE)


def exact(policy: str, profile: Profile) -> Exactness:
    """Train with ``policy`` and with a plain loop, in deterministic mode; needs CUBLAS_WORKSPACE_CONFIG."""
    workload = profile.workload
    batches = [pair(workload, seed) for seed in range(EXACT_STEPS)]
    torch.use_deterministic_algorithms(True)
    try:
        budget = "40%" if policy.startswith("autohete") else None
        with Trainer(fresh(workload), policy=policy, gpu_memory=budget, profile=profile, device=DEVICE) as trainer:
            tasks = trainer.prepare(batches[0]).schedule.tasks
            torch.manual_seed(2)
            losses = [trainer.step(batch) for batch in batches]
            parameters = [parameter.cpu() for parameter in trainer.parameters()]
        on_cpu = {task.id.unit for task in tasks if task.id.kind is Kind.CPU_UPDATE}
        same, weights = [], []
        for elsewhere in (set[int](), on_cpu):
            step, masters = plainly(fresh(workload).to(DEVICE), elsewhere)
            torch.manual_seed(2)
            expected = [step((ids.to(DEVICE), targets.to(DEVICE))) for ids, targets in batches]
            weights.append([master.cpu() for master in masters])
            same.append(losses == expected and all(map(torch.equal, parameters, weights[-1])))
        difference = max(float((a - b).abs().max()) for a, b in zip(parameters, weights[0], strict=True))
        return Exactness(policy, workload.precision, len(on_cpu), same[0], same[1], difference)
    finally:
        torch.use_deterministic_algorithms(False)


def exactness() -> list[Exactness]:
    """Check all policies in fp32 and bf16."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is initialized
    rows = []
    for precision in (Precision.FP32, Precision.BF16):
        profile = small_profile(replace(SMALL, precision=precision))
        for policy in SMALL_POLICIES:
            try:
                rows.append(exact(policy, profile))
            except Exception as error:
                rows.append(Exactness(policy, precision, failure=told(error)))
    return rows


# --- fidelity


def machine_profile(workload: Workload) -> Profile:
    """Measure the machine and the model, which is on the GPU from the start, so that probing it takes no time."""
    machine = measured_hardware(DEVICE)
    return measured_profile_on(machine, fresh(workload, DEVICE), pair(workload, device=DEVICE), DEVICE, workload.name)


def fidelity() -> list[Run]:
    """Run all policies under all budgets; repeated plans are run only once."""
    profile = machine_profile(LARGE)
    known: dict[Plan, Run] = {}
    rows = []
    for percent in BUDGETS:
        budgeted = with_budget(profile, percent / 100)
        for policy in POLICIES:
            row = Run(policy, percent, budgeted.hardware.gpu_capacity_bytes)
            try:
                rows.append(run_within(row, budgeted, known))
            except Exception as error:
                rows.append(replace(row, failure=told(error)))
            print_text(console(), json.dumps(asdict(rows[-1])))  # what is done is seen, also if the time ends
    return rows


def run_within(row: Run, profile: Profile, known: dict[Plan, Run]) -> Run:
    """Return ``row`` with the prediction and the measurement."""
    try:
        plan = as_executed(parse_policy(row.policy).plan(profile, judge_for(profile)), profile)
    except InfeasibleError as error:
        return replace(row, failure=f"does not fit: {error}")
    predicted = simulate_plan(profile, plan)
    for memory in (predicted.gpu, predicted.host):
        if not memory.fits:
            return replace(row, failure=f"does not fit: needs {format_bytes(memory.peak_bytes)} of {memory.memory} memory")
    if plan not in known:
        known[plan] = run(row, profile)
    return replace(known[plan], budget_percent=row.budget_percent, budget_bytes=row.budget_bytes)


def run(row: Run, profile: Profile) -> Run:
    """Train with the Trainer and measure."""
    gc.collect()
    torch.cuda.empty_cache()
    batch = pair(profile.workload, device=DEVICE)
    other = torch.cuda.memory_allocated()
    with Trainer(fresh(profile.workload, DEVICE), policy=row.policy, profile=profile, device=DEVICE) as trainer:
        prediction = trainer.prepare(batch)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(WARMUP):
            trainer.step(batch)
        trainer.trace()  # waits for all updates
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        begin = time.perf_counter()
        for _ in range(STEPS):
            trainer.step(batch)
        measured = trainer.trace()
        seconds = time.perf_counter() - begin
        peak, reserved = torch.cuda.max_memory_allocated() - other, torch.cuda.max_memory_reserved()
        retries = torch.cuda.memory_stats()["num_alloc_retries"] - retries
    period = measured.steady().period_seconds
    compared = compare(prediction.trace, measured)
    return replace(
        row,
        plan=str(prediction.plan.counts),
        clock=str(measured.clock),
        predicted_seconds=prediction.iteration_seconds,
        measured_seconds=period,
        error_percent=100 * (prediction.iteration_seconds / period - 1),
        predicted_peak_bytes=prediction.gpu.peak_bytes,
        measured_peak_bytes=peak,
        peak_error_percent=100 * (prediction.gpu.peak_bytes / peak - 1),
        reserved_bytes=reserved,
        fragmentation_bytes=reserved - peak - other,
        tokens_per_second=STEPS * profile.workload.tokens / seconds,
        retries=retries,
        kinds={str(kind.kind): (kind.iteration_seconds.a, kind.iteration_seconds.b) for kind in compared.kinds},
        idle={str(cause): (pair.a, pair.b) for cause, pair in compared.idle_seconds.items()},
    )


# --- other systems


def timed(system: str, step: Callable[[Pair], object]) -> Baseline:
    """Measure tokens per second and memory of ``step``."""
    batch = pair(LARGE, device=DEVICE)
    for _ in range(WARMUP):
        step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step(batch)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / STEPS
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return Baseline(system, LARGE.tokens / seconds, seconds, peak, reserved)


def plain() -> Baseline:
    """Train in a plain loop, with everything resident."""
    return timed("PyTorch, resident", plainly(fresh(LARGE, DEVICE))[0])


def one_process(backend: str) -> None:
    """Create a process group with only this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    torch.cuda.set_device(0)
    torch.distributed.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)


def fsdp2() -> Baseline:
    """Train with FSDP2 and CPU offload: blocks come to the GPU one by one in bf16, fp32 weights are updated on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    one_process("cpu:gloo,cuda:nccl")
    model = fresh(replace(LARGE, precision=Precision.FP32))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=precision, offload_policy=CPUOffloadPolicy())
    optimizer = default_optimizer(model.parameters())

    def step(batch: Pair) -> float:
        ids, targets = batch
        loss = next_token_loss(model(ids), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return timed("FSDP2, CPU offload", step)


def deepspeed() -> Baseline:
    """Train with ZeRO stage 2 and the optimizer on the CPU.

    Raises:
        RuntimeError: DeepSpeed is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise RuntimeError("skipped: deepspeed is not installed")
    library: Any = importlib.import_module("deepspeed")
    one_process("nccl")
    model, settings = fresh(LARGE), default_group()
    optimizer = {name: settings[name] for name in ("lr", "betas", "eps", "weight_decay")}
    config = {
        "train_micro_batch_size_per_gpu": LARGE.batch_size,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "optimizer": {"type": "AdamW", "params": optimizer},
    }
    engine = library.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def step(batch: Pair) -> float:
        ids, targets = batch
        loss = next_token_loss(engine(ids), targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return timed("DeepSpeed ZeRO-Offload", step)


# --- parts


def tests() -> Pytest:
    """Run ``pytest -m gpu``."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PARTS["tests"].seconds - 10)
    return Pytest(done.returncode, time.perf_counter() - begin, (done.stdout + done.stderr)[-4000:])


@dataclass(frozen=True, slots=True)
class _Job:
    """A part of the check, and its time limit."""

    work: Callable[[], Any]
    seconds: float


PARTS: dict[Part, _Job] = {
    "tests": _Job(tests, 400),
    "exactness": _Job(exactness, 300),
    "fidelity": _Job(fidelity, 560),
    "plain": _Job(plain, 120),
    "fsdp2": _Job(fsdp2, 180),
    "deepspeed": _Job(deepspeed, 300),
}


def earlier(path: Path) -> dict[str, Any]:
    """Return what an earlier run has written to ``path``; nothing if there is no such file.

    Raises:
        InputError: it is not JSON.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise InputError(f"{str(path)!r} is not JSON: {error}; move it elsewhere") from error
    return found


def told(error: BaseException) -> str:
    """Format an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def plain_data(value: Any) -> Any:
    """Convert dataclasses to plain JSON data."""
    return [asdict(item) for item in value] if isinstance(value, list) else asdict(value)


def _work(part: Part, answers: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt silently ends this process and its children
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        answers.send(plain_data(PARTS[part].work()))
    except Exception as error:
        answers.send(told(error))
    finally:
        answers.close()


def isolated(part: Part) -> Any:
    """Run a part in its own process; return its result as plain data, or the reason for a failure as text."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(part, sender))
    with children_uninterrupted():
        process.start()
    sender.close()
    seconds = PARTS[part].seconds
    try:
        return receiver.recv() if receiver.poll(seconds) else f"not done after {seconds} s"
    except EOFError:
        process.join()
        return f"ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()


def main(*, out: Path = Path("benchmarks"), part: list[Part] | None = None) -> None:
    """Run the checks that need a GPU.

    Parameters
    ----------
    out:
        Folder for gpu_check.json.
    part:
        Part to run; repeatable. Default: all parts.
    """
    screen = console()
    if not torch.cuda.is_available():
        print_text(screen, "there is no GPU that PyTorch can use here: nothing to check")
        return
    make_folder(out)
    path = out / "gpu_check.json"
    document = earlier(path)
    memory = torch.cuda.get_device_properties(0).total_memory
    machine = {**versions(), "cuda": str(torch.version.cuda), "gpu_memory_bytes": memory}
    for name in part or list(PARTS):
        begin = time.perf_counter()
        result = isolated(name)
        seconds = time.perf_counter() - begin
        document[name] = {**machine, "seconds": round(seconds, 1), "found": result}
        write_text(path, json.dumps(document, indent=1) + "\n")
        print_text(screen, f"{name}, {seconds:.0f} s: {result if isinstance(result, str) else json.dumps(result)}")
    print_text(screen, f"written: {path}")


if __name__ == "__main__":
    run_app(App(name="gpu_check", default_command=main, help=__doc__))
