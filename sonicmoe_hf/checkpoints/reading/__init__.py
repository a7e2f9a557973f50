"""Reading a checkpoint. The files in the order of reading; each takes only those above it:

files          the folder, config.json, and the tensors of the files, by name
converters     Transformers' own conversions: which weights of the files become which parameters
weight         one weight, in one tensor or several: read, changed, rounded to its format again
stored         all weights of a checkpoint, whatever the family
config_only    a model without weights, of config.json alone
source         a checkpoint of a family that has a native layout, checked against its model
"""
