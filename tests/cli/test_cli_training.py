"""Training, measuring and planning from the command line: what it says, what it writes, what it refuses."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from support.command import autohete, refused

#: A model that trains a step in a hundredth of a second.
MODEL = {"--hidden": "32", "--blocks": "2", "--heads": "2", "--sequence-length": "16", "--batch-size": "2"}
#: With a hardware the machine is not measured.
TINY = {**MODEL, "--hardware": "v100-32gb-dgx2", "--steps": "3"}
LOSSES = re.compile(r"loss (\d\.\d{3}) -> (\d\.\d{3}), on held-back text (\d\.\d{3}) \(perplexity \d+\.\d\)")


def words(options: dict[str, str]) -> list[str]:
    """``options`` as a command line."""
    return [word for option in options.items() for word in option]


def trains(options: dict[str, str]) -> str:
    """What a training that succeeds says."""
    done = autohete("train", *words(options))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def losses(said: str) -> tuple[str, ...]:
    """First, last and held-back loss that a training says."""
    found = LOSSES.search(said)
    assert found, said
    return found.groups()


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a training says, and the folder that it has written to."""
    folder = tmp_path_factory.mktemp("training")
    outputs = {"--trace": "measured.json", "--predicted-trace": "predicted.json", "--gantt": "both.png"}
    files = {option: str(folder / name) for option, name in outputs.items()}
    return trains({**TINY, "--gpu-memory": "60%", **files}), folder


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file that ``autohete profile`` has written."""
    path = tmp_path_factory.mktemp("profile") / "machine.json"
    done = autohete("profile", str(path), "--quick", "--drive", str(path.parent), *words(MODEL))
    assert done.returncode == 0, done.stderr
    assert f"written: {path}" in done.stdout
    assert all(
        name in done.stdout for name in ("embedding", "transformer", "head", "host to device", "CPU update", "nvme, read")
    )
    return str(path)


@pytest.mark.slow
def test_a_training_ends_with_its_losses_and_its_prediction(training: tuple[str, Path]) -> None:
    """The end tells the losses, predicted beside measured, and one iteration as a picture of its lanes."""
    said, _ = training
    assert 3 < float(losses(said)[0]) < 8
    rows = [line.split() for line in said.splitlines()]
    for name, cells in (("iteration", 7), ("device", 9), ("host", 9)):
        (row,) = (row for row in rows if row[:1] == [name] and len(row) == cells)
        assert row[-1] == "%"
    assert re.search(r"^one iteration, .* \(measured-cpu\):$", said, re.MULTILINE)
    (gpu,) = (row[1] for row in rows if row[:1] == ["gpu"] and len(row) == 2)
    assert {"F", "L", "B"} <= set(gpu)


@pytest.mark.slow
def test_a_training_of_sublayers_learns_the_same(training: tuple[str, Path]) -> None:
    """``--units sublayer`` plans attention and MLP apart, measured as they are, and changes no loss."""
    said = trains({**TINY, "--gpu-memory": "60%", "--units": "sublayer"})
    assert "units sublayer" in said
    assert re.search(r"of 6 units, (\d+ (recompute|offload parameters|update on the CPU)[,;] )+", said)
    assert losses(said) == losses(training[0])


@pytest.mark.slow
def test_a_training_clips(training: tuple[str, Path]) -> None:
    """``--clip-norm`` changes what is learned, but not the first loss."""
    plain, clipped = losses(training[0]), losses(trains({**TINY, "--gpu-memory": "60%", "--clip-norm": "0.001"}))
    assert clipped[0] == plain[0]
    assert clipped[1:] != plain[1:]


def test_a_training_writes_what_it_is_asked_for(training: tuple[str, Path]) -> None:
    """Both timelines and the picture are written, nothing else, and ``compare`` explains the timelines' difference."""
    _, folder = training
    assert sorted(path.name for path in folder.iterdir()) == ["both.png", "measured.json", "predicted.json"]
    assert (folder / "both.png").read_bytes().startswith(b"\x89PNG")
    compared = autohete("compare", "predicted.json", "measured.json", "--json", cwd=folder)
    assert compared.returncode == 0, compared.stderr
    assert {"a", "b"} <= json.loads(compared.stdout).keys()


@pytest.mark.slow
def test_the_smallest_budget_is_named_and_works(training: tuple[str, Path]) -> None:
    """A budget that is too small is refused with the smallest that works; with that, the same seed gives the same losses."""
    options = {**TINY, "--policy": "stronghold:window=1"}
    refusal = refused("train", *words({**options, "--gpu-memory": "5KiB"}))
    found = re.search(r"The smallest gpu memory that works is (\d+) B", refusal)
    assert found
    assert losses(trains({**options, "--gpu-memory": f"{found[1]}B"})) == losses(training[0])


@pytest.mark.slow
def test_the_smallest_pinned_memory_is_named_and_works(training: tuple[str, Path]) -> None:
    """So is a limit of pinned memory, to which the plan keeps."""
    options = {**TINY, "--policy": "streamed_states", "--gpu-memory": "100%"}
    refusal = refused("train", *words({**options, "--pinned-memory": "5KiB"}))
    found = re.search(r"The smallest pinned memory that works is (\d+) B", refusal)
    assert found
    assert losses(trains({**options, "--pinned-memory": f"{found[1]}B"})) == losses(training[0])


@pytest.mark.slow
def test_a_paced_training_keeps_the_pace_of_the_hardware() -> None:
    """Paced, it says how much slower than the hardware it goes, and never runs ahead of the simulation."""
    said = trains({**TINY, "--mode": "paced", "--gpu-memory": "100%", "--policy": "resident", "--steps": "2"})
    assert re.search(r"^paced: one second of the hardware takes \S+ s here$", said, re.MULTILINE)
    assert re.search(r"^one iteration, .* \(emulated\):$", said, re.MULTILINE)
    (row,) = (line.split() for line in said.splitlines() if line.split()[:1] == ["iteration"])
    assert float(row[-2]) < 2  # predicted against measured, in percent; a shared machine may stall, which makes it less


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--steps": "0"}, "steps is 0: train at least 1"),
        ({"--steps": "some"}, "--steps"),
        ({"--tokenizer": "x"}, "tokenizer 'x': write byte, or a vocabulary size"),
        ({"--tokenizer": "9" * 5000}, "write byte, or a vocabulary size"),
        ({"--tokenizer": "256"}, "whole number of at least 257"),
        ({"--data": "no/such/text"}, "text 'no/such/text' cannot be read"),
        ({"--gpu-memory": "5"}, "has no unit"),
        ({"--gpu-memory": "0%"}, "is not a share of memory"),
        ({"--gpu-memory": "5KiB"}, "does not fit: .*The smallest gpu memory that works is "),
        ({"--host-memory": "5"}, "has no unit"),
        ({"--pinned-memory": "5"}, "has no unit"),
        ({"--precision": "fp8"}, "precision"),
        ({"--policy": "zero"}, "unknown policy 'zero'"),
        ({"--hardware": "a100"}, "a part of 2: give one of a100-40gb"),
        ({"--dropout": "1"}, "dropout is 1.0: it must be at least 0 and less than 1"),
        ({"--dropout": "nan"}, "dropout is nan"),
        ({"--lr": "nan"}, "lr is nan: it must be positive and finite"),
        ({"--lr": "0"}, "lr is 0.0: it must be positive"),
        ({"--seed": "-1"}, "seed is -1"),
        ({"--seed": str(2**64)}, "seed is 18446744073709551616: it must be a whole number from 0 to"),
        ({"--heads": "3"}, "not divisible by 3 heads"),
        ({"--hidden": "600000"}, "of memory, this machine has .*choose a smaller model"),
        ({"--sequence-length": "10000000"}, "give more text, shorter sequences"),
        ({"--trace": "no/such/folder/x.json"}, "'no/such/folder/x.json' cannot be written: there is no folder"),
        ({"--gantt": "."}, "png"),
        ({"--predicted-trace": "."}, "'.' cannot be written: it is a folder"),
        ({"--trace": "x.json", "--predicted-trace": "./x.json"}, "--trace and --predicted-trace name the same file"),
        ({"--profile": "no/such/profile.json"}, "leave out --hardware, or leave out --profile"),
    ],
)
def test_a_training_that_cannot_be_is_refused_in_one_line(options: dict[str, str], message: str) -> None:
    """Whatever cannot be taken is refused at once with exit code 2 and one line that says what is allowed."""
    assert re.search(message, refused("train", *words({**TINY, **options})))


def test_pacing_needs_a_hardware() -> None:
    """Without a hardware to be paced to, paced mode is refused in one line."""
    assert "needs hardware to pace to" in refused("train", *words(MODEL), "--mode", "paced")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [["train"], ["profile", "profile.json"]])
def test_a_gpu_that_is_not_there_is_refused(command: list[str], tmp_path: Path) -> None:
    """Without a GPU the device cuda is refused in one line, and nothing is written."""
    done = autohete(*command, *words(MODEL), "--device", "cuda", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "there is no GPU that PyTorch can use here" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_profile_stands_for_workload_and_hardware(profile: str) -> None:
    """A measured profile is simulated, planned and trained with; a workload or a hardware beside it is refused."""
    simulated = autohete("simulate", "--profile", profile, "--policy", "resident", "--json")
    assert simulated.returncode == 0, simulated.stderr
    answer = json.loads(simulated.stdout)
    assert (answer["workload"], answer["hardware"], answer["verdict"]) == ("gpt-2x32", "this-machine", "ok")
    planned = autohete("plan", "--profile", profile, "--policy", "stronghold:window=1")
    assert planned.returncode == 0, planned.stderr
    assert "gpt-2x32 on this-machine: stronghold:window=1" in planned.stdout
    short = autohete("simulate", "--profile", profile, "--policy", "resident", "--gpu-memory", "10KiB", "--json")
    assert json.loads(short.stdout)["verdict"] == "gpu-out-of-memory"
    given = {**MODEL, "--steps": "1", "--gpu-memory": "100%", "--profile": profile}
    said = trains({**given, "--policy": "zero_infinity", "--drive": str(Path(profile).parent)})  # which was measured, too
    assert losses(said) == losses(trains(given))
    assert "nvme" in said
    for command in ("simulate", "plan"):
        for extra in (["--workload", "gpt-2b"], ["--hardware", "v100-32gb-dgx2"]):
            assert "a profile includes its workload and hardware" in refused(command, "--profile", profile, *extra)


@pytest.mark.slow
def test_a_profile_of_another_training_is_refused(profile: str) -> None:
    """A profile of another shape or batch is refused with what differs."""
    wider = {**MODEL, "--hidden": "64", "--batch-size": "3", "--profile": profile}
    assert "hidden_size 32, not 64; batch_size 2, not 3" in refused("train", *words(wider))


@pytest.mark.slow
def test_a_damaged_profile_is_refused(profile: str, tmp_path: Path) -> None:
    """What is no profile, or not a whole one, is refused in one line by whoever reads it."""
    document = json.loads(Path(profile).read_text())
    document["blocks"].pop()
    damaged = {
        "is not JSON": Path(profile).read_text()[:1000],
        "is no profile": json.dumps({**document, "format": "other"}),
        "has 3 blocks, its workload 4": json.dumps(document),
        "0.forward_seconds: Input should be a valid number": json.dumps(
            {**document, "blocks": [{**document["blocks"][0], "forward_seconds": "x"}]}
        ),
    }
    for message, text in damaged.items():
        path = tmp_path / "damaged.json"
        path.write_text(text)
        assert message in refused("simulate", "--profile", str(path))
    for command in (["train", *words(MODEL)], ["plan"]):
        assert "forward_seconds" in refused(*command, "--profile", str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/folder/x.json"], "cannot be written: there is no folder"),
        (["x.json", "--gpu-memory", "25%"], "is not a quantity"),
        (["x.json", "--heads", "3"], "not divisible by 3 heads"),
        (["x.json", "--dropout", "-1"], "dropout is -1.0"),
        (["x.json", "--data", "no/such/text"], "text 'no/such/text' cannot be read"),
        ([], "--out requires an argument"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    """Whatever ``profile`` cannot take is refused at once with exit code 2 and one line."""
    assert message in refused("profile", *arguments)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="no tokenizers here")
def test_a_tokenizer_can_be_trained(tmp_path: Path) -> None:
    """With a vocabulary size a tokenizer is trained on the text first; the text is then fewer tokens."""
    text = "the quick brown fox jumps over the lazy dog\n" * 200
    (tmp_path / "text.txt").write_text(text)
    options = {**TINY, "--steps": "1", "--gpu-memory": "100%", "--data": str(tmp_path), "--tokenizer": "300"}
    found = re.search(r"text: ([\d,]+) tokens to train on", trains(options))
    assert found
    assert int(found[1].replace(",", "")) < 0.5 * len(text)


# --- verification


@pytest.mark.slow
def test_a_verification_says_that_all_bits_are_equal() -> None:
    """``--verify`` compares steps instead of training, with the caller's own number of threads, and exits with 0."""
    torch.set_num_threads(2)
    try:
        done = autohete("train", *words({**TINY, "--gpu-memory": "60%", "--verify": "2"}))
    finally:
        torch.set_num_threads(1)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert re.search(r"2 steps beside plain PyTorch, threads: 1; compared 2 x loss, 56 x gradient, ", done.stdout)
    assert done.stdout.endswith("all bits are equal\n")


@pytest.mark.slow
def test_a_verification_that_finds_a_difference_ends_with_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """If updates get other gradients than those that were found, it lists what differs, and the exit code is 1."""
    from autohete.runtime.states import States

    take = States.take_gradient

    def wrong(self: States, i: int, place: int, gradient: torch.Tensor) -> None:
        take(self, i, place, gradient * 2 if i == 1 else gradient)

    monkeypatch.setattr(States, "take_gradient", wrong)
    done = autohete("train", *words({**TINY, "--gpu-memory": "60%", "--verify": "2"}))
    assert (done.returncode, done.stderr) == (1, ""), done
    assert re.search(r"^step 0: parameter of blocks\.0\.\S+ differs: [\d,]+ of [\d,]+ elements, by at most ", done.stdout, re.M)
    assert re.search(r"^and \d+ more in this step\n\d+ differ\n$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--verify": "0"}, "verify is 0: compare at least 1 step"),
        ({"--verify": "1", "--save": "x"}, "writes nothing: leave out --save"),
        ({"--verify": "1", "--trace": "x.json"}, "writes nothing: leave out --trace"),
    ],
)
def test_a_verification_that_cannot_be_is_refused(options: dict[str, str], message: str) -> None:
    """It has a step to compare, and writes nothing."""
    assert message in refused("train", *words({**TINY, **options}))


@pytest.mark.slow
def test_several_gpus_are_emulated(capfd: pytest.CaptureFixture[str]) -> None:
    """One rank of two prints, in a process of its own, and its collectives are part of the picture."""
    trains({**TINY, "--gpus": "2", "--policy": "zero_offload", "--gpu-memory": "4GiB", "--steps": "3"})
    said = capfd.readouterr().out
    assert said.count("predicted beside measured") == 1
    assert re.search(r"^ *collective .*r.*c", said, re.MULTILINE)
