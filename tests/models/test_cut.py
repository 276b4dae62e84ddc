"""The cut that the runtime makes of a model against the units that its config.json gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.models import built, small_config

from autohete.workload import Precision
from autohete.workload.config import parse_model
from autohete.workload.families import FAMILIES

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_runtime_cuts_a_model_into_the_same_units(family: str) -> None:
    """Embedding, blocks and head own as many parameters as the workload counts, also where the head's matrix is tied."""
    from autohete.runtime.partition import partition
    from autohete.runtime.probe import by_use

    config = small_config(family)
    workload = parse_model(config, family)
    ids = torch.randint(1, 500, (2, 16), generator=torch.Generator().manual_seed(0))
    cut = by_use(partition(built(config, "cpu").train()), {"input_ids": ids})
    owned = [sum(parameter.numel() for parameter in unit) for unit in cut.owned]
    assert owned == [workload.unit_parameters(unit) for unit in range(workload.unit_count)]


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3_moe", "gemma3_text"])
def test_the_runtime_knows_the_model_by_its_configuration(family: str) -> None:
    """What is measured is of the workload that the config.json gives, with the batch that was seen."""
    from autohete.runtime.partition import partition
    from autohete.runtime.probe import by_use
    from autohete.train.measure import workload_of

    config = small_config(family)
    ids = torch.randint(1, 500, (2, 16), generator=torch.Generator().manual_seed(0))
    cut = by_use(partition(built(config, "cpu").train()), {"input_ids": ids})
    expected = replace(parse_model(config, "model"), sequence_length=16, batch_size=2, precision=Precision.FP32)
    assert workload_of(cut, {"input_ids": ids}) == expected
