"""The help of each command: options in groups, three examples that can be run, and completion by the shell."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from cyclopts import App
from support.command import autohete

from autohete.cli.app import app
from autohete.cli.examples import EXAMPLES

#: Groups of options, in their order.
GROUPS = ["Model", "Training", "Hardware", "Policy", "Output", "Others"]
EXPECTED = {
    "simulate": {"Model": "--model", "Training": "--lora", "Hardware": "--set", "Policy": "--policy", "Output": "--json"},
    "plan": {"Model": "--hidden", "Training": "--tokens", "Hardware": "--gpus", "Policy": "--policy", "Output": "--html"},
    "sweep": {"Model": "--model", "Hardware": "--hardware", "Policy": "--policy", "Output": "--out", "Others": "--over"},
    "largest": {"Model": "--family", "Training": "--batch-size", "Hardware": "--hardware", "Output": "--json"},
    "train": {"Model": "--data", "Training": "--steps", "Hardware": "--gpu-memory", "Policy": "--policy", "Output": "--trace"},
    "profile": {"Model": "--hidden", "Hardware": "--device", "Output": "OUT"},
}


def groups(command: str) -> dict[str, str]:
    """The groups of a command's help, and the text of each."""
    parts = re.split(r"^╭─ (\w+) ─+╮$", autohete(command, "--help").stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("command", EXPECTED)
def test_options_are_in_groups(command: str) -> None:
    """In one order for all commands, each option in one group."""
    found = groups(command)
    assert list(found) == [group for group in GROUPS if group in found]
    for group, option in EXPECTED[command].items():
        assert re.search(rf"^│ .*{option} ", found[group], re.MULTILINE), (group, option)
    options = [option for text in found.values() for option in re.findall(r"^│ (--[\w-]+)", text, re.MULTILINE)]
    assert len(options) == len(set(options))


def test_every_command_has_three_examples_that_are_understood() -> None:
    """Each help ends with three command lines, of which every option and value is accepted."""
    commands = {name for name in app if not name.startswith("-")}
    assert set(EXAMPLES) == commands
    for command in commands:
        assert len(EXAMPLES[command]) == 3
        shown = " ".join(autohete(command, "--help").stdout.split())
        for example in EXAMPLES[command]:
            assert f"autohete {command} {example}" in shown
            app.parse_args([command, *shlex.split(example)], exit_on_error=False, print_error=False)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_shell_completes_commands_options_and_values(tmp_path: Path) -> None:
    """With the script that ``--install-completion`` writes for bash."""
    script = tmp_path / "completion"
    assert isinstance(app, App)
    app.install_completion(shell="bash", output=script, add_to_startup=False)
    for words, expected in (
        (["lar"], "largest"),
        (["simulate", "--hardw"], "--hardware"),
        (["plan", "--max", "seq"], "sequence"),
        (["schema", "tr"], "trace training"),
    ):
        line = " ".join(f"'{word}'" for word in ("autohete", *words))
        code = (
            f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; COMP_LINE={shlex.quote(' '.join(words))}; "
            "$(complete -p autohete | sed 's/.*-F \\([^ ]*\\).*/\\1/'); echo ${COMPREPLY[@]}"
        )
        done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, check=True, timeout=30)
        assert done.stdout.strip() == expected, words
