"""How many settings does ``autohete sweep`` answer in a second, with one process and with two, and how many does Calculon?

Command: ``python benchmarks/sweep.py [--calculon-at DIR] [--settings N]``; DIR is a clone of github.com/calculon-ai/calculon.

A setting is a GPT of 40 blocks under ZeRO-Offload, with another batch, link and CPU each time. It is planned, lowered and
simulated, and its memory is checked under any timing. Calculon evaluates a closed form: no plan, no schedule. All run in turns,
each in processes of its own; figures are medians over the turns.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from cyclopts import App

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from autohete.report.tables import console, table  # noqa: E402

#: Options of the sweep: 25 x 20 x 20 settings.
QUESTION = ["--hidden", "4096", "--blocks", "40", "--heads", "32", "--sequence-length", "1024"]
BATCHES, LINKS, CPUS = range(1, 26), range(5, 105, 5), range(10, 210, 10)

#: Lets Python keep bytecode, which installed packages have: otherwise every process compiles the modules of this checkout anew.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

#: Run in Calculon's clone: one configuration after another, each with another batch, link and offload.
CALCULON = """
import copy, json, logging, sys, time
folder, count = sys.argv[1], int(sys.argv[2])
sys.path.insert(0, folder)
from calculon.llm.llm import Llm
from calculon.system import System
read = lambda name: json.load(open(f"{folder}/{name}"))
app = Llm.Application({"hidden": 4096, "feedforward": 16384, "seq_size": 1024, "attn_heads": 32, "attn_size": 128,
                       "num_blocks": 40})
system = read("systems/a100_80g.json")
execution = read("examples/3072_t4_p64_d12_mbs4_full.json") | {
    "num_procs": 1, "tensor_par": 1, "pipeline_par": 1, "data_par": 1, "pipeline_par_net": 0, "data_par_net": 0,
    "optimizer_sharding": False, "tensor_par_comm_type": "ar", "weight_offload": True, "activations_offload": True,
    "optimizer_offload": True}
begin, cpu = time.perf_counter(), time.process_time()
for n in range(count):
    batch = 1 + n % 25
    one = copy.deepcopy(system)
    one["mem2"]["bandwidth"] = 5 + n // 25 % 20 * 5
    try:
        model = Llm(app, logging.getLogger())
        where = System(one)
        model.compile(where, Llm.Execution.from_json(execution | {"batch_size": batch, "microbatch_size": batch}))
        model.run(where)
    except Llm.Error:
        pass
print(json.dumps([count / (time.perf_counter() - begin), (time.process_time() - cpu) / count]))
"""


def sweep(count: int, jobs: int) -> tuple[float, float]:
    """Return settings per second, and CPU seconds per setting, of one sweep over the first values of each axis."""
    links = max(1, min(len(LINKS), count // len(BATCHES)))
    cpus = max(1, min(len(CPUS), count // (len(BATCHES) * links)))
    over = [
        f"batch-size={','.join(map(str, BATCHES))}",
        f"links.h2d.bandwidth={','.join(f'{value}GB/s' for value in LINKS[:links])}",
        f"cpu.update_bandwidth={','.join(f'{value}GB/s' for value in CPUS[:cpus])}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "autohete", "sweep", *QUESTION, "--policy", "zero_offload", "--jobs", str(jobs)]
        command += [word for axis in over for word in ("--over", axis)] + ["--out", f"{folder}/sweep.csv"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"}
        said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    match = re.search(r"answered now: ([\d,]+) in [\d.]+ s, ([\d.e+]+) settings per second", said)
    assert match is not None, said
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return float(match[2]), cpu / int(match[1].replace(",", ""))


def calculon(folder: Path, python: str, count: int) -> tuple[float, float]:
    """Return settings per second, and CPU seconds per setting, of Calculon."""
    command = [python, "-c", CALCULON, str(folder.resolve()), str(count)]
    rate, cpu = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout)
    return rate, cpu


def main(*, settings: int = 10_000, turns: int = 3, calculon_at: Path | None = None, python: str = sys.executable) -> None:
    """Measure in turns and print a table.

    Parameters
    ----------
    settings:
        Settings of each run, a multiple of 25, at most 10,000.
    turns:
        Runs of each.
    calculon_at:
        A clone of Calculon; without it Calculon is left out.
    python:
        Interpreter for Calculon, which needs pandas.
    """
    runs: dict[str, list[tuple[float, float]]] = {"1 process": [], "2 processes": []}
    if calculon_at is not None:
        runs["Calculon"] = []
    for _ in range(turns):
        runs["1 process"].append(sweep(settings, 1))
        runs["2 processes"].append(sweep(settings, 2))
        if calculon_at is not None:
            runs["Calculon"].append(calculon(calculon_at, python, settings))
    columns = ["", "settings/s", "against 1 process", "CPU time of a setting", "goal"]
    shown = table(f"{settings:,} settings of 40 blocks", columns)
    rates = {name: median(rate for rate, _ in ran) for name, ran in runs.items()}
    for name, ran in runs.items():
        goal = {"1 process": "faster than Calculon", "2 processes": ">= 1.8"}.get(name, "")
        cpu = median(seconds for _, seconds in ran)
        shown.add_row(name, f"{rates[name]:.3g}", f"{rates[name] / rates['1 process']:.2f}", f"{1e3 * cpu:.3g} ms", goal)
    console().print(shown)


if __name__ == "__main__":
    app = App(name="sweep", default_command=main, help=__doc__)
    app()
