"""Writing a checkpoint of one that was read. The files in the order of reading; each takes only those above it:

output         the tensors of a new checkpoint, under the names they had; rounding_effects sums what rounding lost
relayout       the same in another layout, or packed as packed_config allows
hub_named      the same of what was packed here, under the hub's names
targets        what a new checkpoint will be: output, config.json, and sentences for the user
write          writes it: atomic_folder (the folder appears whole), companions (tokenizer, licence), model_card
"""
