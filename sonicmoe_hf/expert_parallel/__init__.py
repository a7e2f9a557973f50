"""Expert parallelism through Transformers' EPImplementationInterface: token rounding, and tokens sent to a rank once."""
