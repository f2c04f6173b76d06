"""What vLLM's layer says of its routing."""

from __future__ import annotations

import pytest

from tests.lib.method_layers import Layer, moe_config
from vllm_moe_oracle.compat import current_adapter


@pytest.mark.parametrize(
    ("groups", "chosen", "taken"), [(4, 2, (4, 2)), (1, 1, (1, 1)), (3, 1, (None, None)), (8, 2, (None, None))]
)
def test_groups_that_vllm_ignores_are_none(groups: int, chosen: int, taken: tuple[int | None, int | None]) -> None:
    """A GPU server chooses among all experts where groups do not divide them, or have one each."""
    layer = Layer()
    layer.use_grouped_topk = True
    layer.num_expert_group, layer.topk_group = groups, chosen
    with moe_config({}, 8, 64, 32) as config:
        found = current_adapter().routing(config, layer)
    assert (found.num_groups, found.top_k_groups) == taken
