"""The cut that the runtime makes of a model against the units that its config.json gives."""

from __future__ import annotations

import pytest
from support.models import built, small_config

from autohete.workload.config import parse_model
from autohete.workload.families import FAMILIES

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_runtime_cuts_a_model_into_the_same_units(family: str) -> None:
    """Embedding, blocks and head own as many parameters as the workload counts, also where the head's matrix is tied."""
    from autohete.runtime.partition import partition

    config = small_config(family)
    workload = parse_model(config, family)
    ids = torch.randint(1, 500, (2, 16), generator=torch.Generator().manual_seed(0))
    cut = partition(built(config, "cpu").train()).by_use({"input_ids": ids})
    owned = [sum(parameter.numel() for parameter in unit) for unit in cut.owned]
    assert owned == [workload.unit_parameters(unit) for unit in range(workload.blocks)]
