"""The native layout: its models, and checkpoints and adapters converted to it and back."""
