"""compile_layers: decoder layers that torch compiles one by one, also those with Liger's kernels in them."""
