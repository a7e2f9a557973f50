"""The memory that training a model takes on a GPU, from its config alone. In the order of reading: sizes.py reads the
model's sizes, training.py has a training's settings, step.py what a step of the two keeps and computes for a token,
memory.py the peak of it, ways.py lists the ways of training and their commands."""
