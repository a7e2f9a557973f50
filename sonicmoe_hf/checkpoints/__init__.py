"""Checkpoints: the native layout, its models, and conversion to it and back.

    layouts     what differs between layouts: config.json, names of experts' weights, order of rows
    modeling    SonicMoEExperts and the model classes that load the native layout; takes layouts alone
    reading/    a checkpoint's config.json and weights, and which of them become which parameters of a model
    writing/    a new checkpoint of one that was read: its tensors, config.json, and the files beside them
    convert     convert_checkpoint, which puts these together; rounded: the same for experts rounded to a format

The way of one weight of Qwen3-30B-A3B (128 experts, H = 2048, I = 768), from the hub's files to the module and back:

    model.layers.0.mlp.experts.7.gate_proj.weight [768, 2048]    a Weight each, read by TensorFiles
    model.layers.0.mlp.experts.7.up_proj.weight   [768, 2048]
      |  Source.parameter_of: both belong to the parameter model.layers.0.mlp.experts.gate_up_proj
      |  Weight.read_changed: with what merge_adapter adds; ExpertsParameter.split of the hub's layout: [gate, up]
      v  Relayout: ExpertsParameter.join of the native layout, expert after expert: rows gate, up, gate, up, ...
    model.layers.0.mlp.experts.c_fc [128, 1536, 2048]            written by write_checkpoint
      v  from_pretrained
    SonicMoEExperts.c_fc                                         what kernels read, without a copy
      v  save_pretrained, then convert_checkpoint(layout="hub"): split of the native layout, join of the hub's
    model.layers.0.mlp.experts.7.gate_proj.weight, ...up_proj.weight, bit by bit as they were
"""
