"""Agreement of ranks between hosts, in one process of a group of its own."""

import torch.distributed as dist

from sonicmoe_hf.expert_parallel import collectives
from sonicmoe_hf.expert_parallel.collectives import max_over_ranks


def test_the_group_host_group_ends_with_the_group_of_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")  # hosts need a group of their own
    for number in range(2):  # groups of both times have the same name
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{number}", rank=0, world_size=1)
        try:
            for _ in range(2):
                assert max_over_ranks([3, 5], dist.group.WORLD) == [3, 5]
            (host_group,) = collectives._host_groups.values()
            assert dist.get_process_group_ranks(host_group) == [0], "it is one of this time's groups"
        finally:
            dist.destroy_process_group()
