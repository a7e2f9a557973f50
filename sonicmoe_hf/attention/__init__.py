"""Attention with learned sinks, or over keys that are chosen for each query, in less memory than Transformers takes.

Read models.py first, with names.py: which model takes "torch_sinks" (flash kernels) or "torch_pieces" (plain PyTorch).
torch_sinks: implementation.py is what models call and mask.py makes their mask; function.py is the same for tensors.
Both call sinks.py, which adds the sink to what flash.py computes, on a CPU with the masks of cpu_masks.py.
Packed sequences: packing.py puts batches into that form, positions.py reads it from position_ids, and boundaries.py
keeps sequences apart, or refuses them, in models that do not.
torch_pieces: pieces.py says how many queries fit, piecewise.py attends with them; indexers.py puts the layers of
families that choose keys to work in pieces, among them deepseek_v4.py and pooled_indexer.py.
"""
