"""Expert ids of a rank that has only some of the experts."""

import torch

from decode_node.cpu_platform.expert_parallel import to_local_experts


def test_own_experts_are_renumbered_and_others_weigh_nothing() -> None:
    """A rank with experts 4 to 7 of 8: 4.. become 0.., the rest contributes 0; ids keep their dtype."""
    expert_map = torch.tensor([-1, -1, -1, -1, 0, 1, 2, 3], dtype=torch.int32)
    weights = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.5, 0.5]])
    ids = torch.tensor([[4, 1], [7, 5], [0, 3]], dtype=torch.int32)
    local_weights, local_ids = to_local_experts(weights, ids, expert_map)
    assert local_ids.tolist() == [[0, 0], [3, 1], [0, 0]]
    assert local_ids.dtype == torch.int32
    torch.testing.assert_close(local_weights, torch.tensor([[0.7, 0.0], [0.6, 0.4], [0.0, 0.0]]))
