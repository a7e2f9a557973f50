"""Comparing an adapter wherever it went with what it did where it was trained: `sonicmoe-hf check`.

In the order of reading:

check              the whole comparison; texts: what is scored in each place
places, server     what a folder or a server gives
models             what Transformers loads; adapted_model: what PEFT puts on it
scores             the log-probabilities that a model gives; rounding: noise on them
hypotheses         what may have become of an adapter; trained_adapter: what each of them would give
place_judge        which hypotheses a place is compared with
verdict            which of them explains what the place gives
evidence           how far a place is from the trained model; hypothesis_tests: how near to each hypothesis;
                   regression: the statistics of these
"""
