"""The parts that the Hugging Face Trainer needs: callbacks, and Trainer checkpoints that restore fused experts."""
