"""Names on the command line: parts of names, filters, and the largest model of a family."""

from __future__ import annotations

import json

import pytest
from support.command import autohete, refused

from autohete.answer import without_system
from autohete.answer.members import largest_member, members
from autohete.hardware import load_hardware, preset_names, presets_like
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.simulate.largest import misfit

NODE = "rtx4090-workstation"
ASKED = ["simulate", "--model", "gpt2", "--policy", "resident", "--batch-size", "1", "--json"]


@pytest.mark.parametrize("given", ["4090 workstation", "RTX-4090_Workstation", "workstation rtx4090"])
def test_a_part_of_a_name_that_is_of_no_other_preset_is_taken(given: str) -> None:
    """The answer is that of the preset, and a line on stderr names it."""
    done, named = autohete(*ASKED, "--hardware", given), autohete(*ASKED, "--hardware", NODE)
    assert done.stdout == named.stdout
    assert done.stderr.endswith(f"is taken as {NODE}\n")
    assert named.stderr == ""


def test_a_part_of_several_names_is_refused_with_their_titles() -> None:
    """Each is named with what it is."""
    said = refused(*ASKED, "--hardware", "4090")
    assert "'4090' is not the name of one preset but a part of 5: give one of rtx4090-2gpu (2 x RTX 4090" in said
    assert f"; {NODE} (RTX 4090, " in said
    assert refused("hardware", "show", "4090") == said


def test_a_part_is_all_of_a_number_or_of_a_word() -> None:
    """A B300 is no gb300, a 409 no 4090; each preset is like its own name alone."""
    assert presets_like("b300") == presets_like("409") == presets_like("") == presets_like("--") == []
    assert all(presets_like(name.upper().replace("-", " ")) == [name] for name in preset_names())


def test_presets_are_filtered() -> None:
    """A kind lists its rows alone, a word those that contain it; what no row has is refused with the closest name."""
    shown = autohete("presets", "models", "QWEN3").stdout
    assert "qwen3-30b-a3b" in shown
    assert "llama" not in shown
    assert "policies" not in shown
    nodes = autohete("presets", "hardware", "RTX 4090").stdout
    assert [line.split()[0] for line in nodes.splitlines() if "4090" in line] == [
        "rtx4090-2gpu",
        "rtx4090-4gpu",
        "rtx4090-8gpu",
        "rtx4090-desktop-64gb",
        NODE,
    ]
    assert "zero_infinity" in autohete("presets", "policies", "zero").stdout
    assert "did you mean 'qwen3-8b'" in refused("presets", "models", "qwen3-8c")
    assert "give models, workloads, hardware, policies, and then the word" in refused("presets", "all", "qwen3")


def test_a_model_is_described_by_its_name_on_the_hub() -> None:
    """As by the bundled one."""
    assert autohete("presets", "meta-llama/Llama-3.1-8B").stdout == autohete("presets", "llama-3.1-8b").stdout


def test_long_lists_are_not_in_errors() -> None:
    """An unknown name is answered with the closest and the command that lists all."""
    for arguments, command in (
        (["--model", "qwen-8b"], "autohete presets models"),
        (["--model", "gpt2", "--policy", "zero-ofload"], "autohete presets policies"),
        (["--model", "gpt2", "--hardware", "h100-pcie4"], "autohete presets hardware"),
        (["--model", "gpt2", "--set", "gpu.memry=4GiB"], "autohete hardware show NAME"),
    ):
        said = refused("simulate", *arguments)
        assert "': did you mean '" in said
        assert f"{command} lists all " in said
        assert len(said) < 400


def test_the_largest_of_a_family_fits_and_the_next_does_not() -> None:
    """By trying every member with the policy, and as the command says."""
    node = without_system(load_hardware(NODE, {"gpu.memory": "6GiB"}), 4 * 2**30)
    fitting = {
        model.name: not misfit(analytic_profile(model, node), parse_policy("resident"))
        for model in sorted(members("gpt2", batch_size=1, sequence_length=512), key=lambda model: -model.parameters)
    }
    assert set(fitting.values()) == {True, False}
    best = next(name for name, fits in fitting.items() if fits)
    options = ["--hardware", NODE, "--gpu-memory", "6GiB", "--policy", "resident", "--sequence-length", "512", "--jobs", "1"]
    found = json.loads(autohete("largest", "--family", "GPT2", *options, "--json").stdout)
    assert (found["model"], found["policy"]) == (best, "resident")
    assert [*found["too_large"], found["model"], *found["smaller"]] == list(fitting)
    shown = autohete("largest", "--family", "gpt2", *options).stdout
    assert f"{best} (" in shown
    assert "is the largest that trains on rtx4090-workstation: resident, " in shown
    fast = autohete("largest", "--family", "gpt2", *options, "--tokens-per-second", str(found["tokens_per_second"] + 1)).stdout
    assert f"larger: {best} " in fast
    assert "tokens/s, with resident" in fast


def test_states_beyond_all_memory_need_no_search() -> None:
    """A model whose optimizer states alone exceed GPU, host and drives is too large under every policy, at once."""
    node = load_hardware(NODE)
    (giant,) = members("qwen3-235b", batch_size=1)
    found = largest_member([giant], node)
    assert found.workload is None
    assert "its optimizer states take 2627.4 GiB, all memory together has" in found.too_large[0][1]


def test_a_family_is_the_beginning_of_a_name() -> None:
    """Another is refused with a name that is close, and so are a single model beside it and an unknown policy."""
    assert "did you mean 'resident'" in refused("largest", "--family", "gpt2", "--policy", "residnt")
    assert "did you mean 'qwen3-8b'" in refused("largest", "--family", "qwem3-8b")
    assert "no bundled model is of the family" in refused("largest", "--family", "")
    assert "--model is one model" in refused("largest", "--family", "qwen3", "--model", "gpt2")
