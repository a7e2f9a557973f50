"""Liger's fused loss under `attach`: larger chunks, of which layers see nothing."""

from unittest import mock

from helpers.models import build_patched
from helpers.training import trainer_for

import sonicmoe_hf
from sonicmoe_hf.trainer.liger_loss import LOGITS_BYTES


def test_ligers_loss_has_larger_chunks_while_the_trainer_trains(tmp_path):
    """Through Liger's own forward of Qwen3-MoE, whose kernels need a GPU: its loss is replaced by one that notes."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe
    from liger_kernel.transformers.model import qwen3_moe as liger

    noted, got = [], []

    def loss(hidden_states, lm_head_weight, labels, **options):
        noted.append(options.get("chunk_mem_const"))
        return (hidden_states @ lm_head_weight.T).square().mean()

    model = build_patched("qwen3_moe")
    apply_liger_kernel_to_qwen3_moe(rope=False, rms_norm=False, swiglu=False, model=model)
    model.model.layers[0].register_forward_pre_hook(lambda _, args, options: got.extend(options), with_kwargs=True)
    trainer = trainer_for(model, tmp_path, max_steps=1)
    sonicmoe_hf.attach(trainer)
    with mock.patch.object(liger, "LigerForCausalLMLoss", loss):
        trainer.train()
        rows, columns = trainer.train_dataset[0]["input_ids"].shape[0], trainer.args.per_device_train_batch_size
        model.train()(**{name: column[None] for name, column in trainer.train_dataset[0].items()})
    assert noted == [LOGITS_BYTES // (2 * rows * columns * model.config.hidden_size), None]
    assert got and "chunk_mem_const" not in got  # compiled layers would be compiled again for each size
