"""`sonicmoe-hf demo`: a small mixture-of-experts model trained with token rounding, on any machine, in a few minutes."""
