"""Names of attention implementations, as a model's config and from_pretrained have them."""

# Not "sdpa_...": Transformers refuses names with "sdpa" for models without SDPA, as these are
TORCH_SINKS = "torch_sinks"
TORCH_PIECES = "torch_pieces"
EAGER = 'attn_implementation="eager"'  # as messages name it
