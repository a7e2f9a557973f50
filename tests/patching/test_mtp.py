"""Heads that predict further tokens (Transformers' MtpModel) are models beside the main one, with experts of their own.

tests/adapters/test_merge_families.py has that merge keeps their weights.
"""

import pytest
import torch
import transformers
from helpers.models import gradients_of, relative_error
from helpers.small_families import small_model
from packaging.version import Version

import sonicmoe_hf
from sonicmoe_hf.layer.experts_module import IMPLEMENTATION

pytestmark = pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="of Transformers 5.24")


def step(head, hidden):
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    head.zero_grad()
    out = head.forward_layer(0, hidden, torch.arange(9).expand(2, -1), None, input_ids=ids)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return {"out": out.detach(), **gradients_of(head)}


@pytest.mark.parametrize("patched", ["head", "main model"])
def test_a_head_trains_patched_by_itself_or_made_of_a_patched_model(patched):
    """fp32, sums in another order: 1e-5."""
    from transformers.modeling_layers import MtpModel

    main = small_model("deepseek_v3")
    main.config.num_nextn_predict_layers = 1
    head = MtpModel(main, 1)
    torch.manual_seed(0)
    for parameter in head.layers.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    hidden = torch.randn(2, 9, main.config.hidden_size)
    expected = step(head, hidden)
    if patched == "head":
        ours = head
        sonicmoe_hf.patch_model(ours)
    else:
        sonicmoe_hf.patch_model(main)
        ours = MtpModel(main, 1)
        ours.load_state_dict(head.state_dict())
    assert ours.layers[0].mtp_block.mlp.experts.config._experts_implementation == IMPLEMENTATION
    found = step(ours, hidden)
    assert found.keys() == expected.keys() and any("experts" in name for name in found)
    for name, tensor in expected.items():
        assert relative_error(found[name], tensor) < 1e-5, name
