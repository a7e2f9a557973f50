"""plan's memory of one layer of DeepSeek-V4, compared with what tensors without memory take."""

import pytest
import torch
from helpers.marks import rest_slow
from helpers.memory import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CONFIG_MAPPING
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Model

from sonicmoe_hf.attention.indexers import use_our_forwards
from sonicmoe_hf.tools.planning.sizes import sizes_of_checkpoint
from sonicmoe_hf.tools.planning.step import Step
from sonicmoe_hf.tools.planning.training import Training
from sonicmoe_hf.tools.planning.ways import ways_of

FP32 = ("attn_hc", "ffn_hc", "hc_head", "sinks", "norm")


def peak_of_one_layer(kind, attention, length):
    """Count a frozen layer's forward and backward at real sizes, without its experts."""
    config = CONFIG_MAPPING["deepseek_v4"](num_hidden_layers=1, layer_types=[kind], n_routed_experts=16, vocab_size=64)
    config.moe_intermediate_size = 64
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = DeepseekV4Model._from_config(config, attn_implementation=attention, dtype=torch.bfloat16).train()
        model.requires_grad_(False)
        for name, parameter in model.named_parameters():
            if any(kept in name for kept in FP32):  # as from_pretrained keeps them
                parameter.data = parameter.data.float()
        use_our_forwards(model)
        for module in model.modules():
            if type(module).__name__.endswith("Experts"):
                module.forward = lambda x, *args: x * 1.0
        model.get_input_embeddings().register_forward_hook(lambda module, args, out: out.requires_grad_())
        ids = torch.zeros(1, length, dtype=torch.long)
        with LiveBytes(new_alone=True) as new:
            model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
    return new.peak


@pytest.mark.pinned  # torch 2.15's FakeTensors give no fp32 to a bf16 parameter
@pytest.mark.parametrize("attention, length", rest_slow([("eager", 8192), ("torch_pieces", 2048)]))
def test_a_layers_scores_and_hyper_connections_are_counted_within_15_percent(attention, length, tmp_path):
    """Eager attention has scores in fp32, of compressed keys too."""
    config = CONFIG_MAPPING["deepseek_v4"](architectures=["DeepseekV4ForCausalLM"])
    config.save_pretrained(tmp_path)
    sizes = sizes_of_checkpoint(str(tmp_path))
    step = Step(sizes, Training(method="qlora", experts="mxfp4", tokens=length, sequence=length, attention=attention))
    assert sizes.streams == 4
    counted = length * (step.layer_bytes + step.backward_bytes[0])
    peak = peak_of_one_layer("compressed_sparse_attention", attention, length)
    assert counted == pytest.approx(peak, rel=0.15)
    (lora, *_) = ways_of(sizes, gpus=1, gpu_memory=80, tokens=length, method="qlora")
    assert lora.training.attention == "torch_pieces", "as from_pretrained loads it"
