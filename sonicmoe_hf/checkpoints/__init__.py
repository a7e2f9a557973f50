"""Checkpoints: the native layout, its models, and conversion to it and back.

The files in the order of reading; each takes only those above it (and comparing, of two tensors):

    files          the folder, config.json, and the tensors of the files, by name
    layouts        what differs between layouts: config.json, names of experts' weights, order of rows
    converters     Transformers' own conversions: which weights of the files become which parameters
    weight         one weight, in one tensor or several: read, changed, rounded to its format again
    stored         all weights of a checkpoint, whatever the family
    config_only    a model without weights, of config.json alone
    source         a checkpoint of a family that has a native layout, checked against its model
    output         the tensors of a new checkpoint, under the names they had; rounding_effects sums what rounding lost
    relayout       the same in another layout, or packed as packed_config allows
    hub_named      the same of what was packed here, under the hub's names
    targets        what a new checkpoint will be: output, config.json, and sentences for the user
    writing        writes it: atomic_folder (the folder appears whole), companions (tokenizer, licence), model_card
    convert        convert_checkpoint, which puts these together; rounded: the same for experts rounded to a format
    modeling       SonicMoEExperts and the model classes that load the native layout; takes layouts alone

The way of one weight of Qwen3-30B-A3B (128 experts, H = 2048, I = 768), from the hub's files to the module and back:

    model.layers.0.mlp.experts.7.gate_proj.weight [768, 2048]    a Weight each, read by TensorFiles
    model.layers.0.mlp.experts.7.up_proj.weight   [768, 2048]
      |  Source.targets: both belong to the parameter model.layers.0.mlp.experts.gate_up_proj
      |  Weight.changed: with what merge_adapter adds; ExpertsParameter.split of the hub's layout: [gate, up]
      v  Relayout: ExpertsParameter.join of the native layout, expert after expert: rows gate, up, gate, up, ...
    model.layers.0.mlp.experts.c_fc [128, 1536, 2048]            written by write_checkpoint
      v  from_pretrained
    SonicMoEExperts.c_fc                                         what kernels read, without a copy
      v  save_pretrained, then convert_checkpoint(layout="hub"): split of the native layout, join of the hub's
    model.layers.0.mlp.experts.7.gate_proj.weight, ...up_proj.weight, bit by bit as they were
"""
