"""The memory that training a model takes on a GPU, from its config alone: sizes.py reads the model's sizes, memory.py has
the formulas, ways.py lists the ways of training and their commands."""
