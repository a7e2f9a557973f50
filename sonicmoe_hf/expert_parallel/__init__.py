"""Expert parallelism through Transformers' EPImplementationInterface: token rounding, and each token sent once to a rank."""
