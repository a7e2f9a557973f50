"""What the Hugging Face Trainer needs: attach, callbacks, and Trainer checkpoints that restore fused experts."""
