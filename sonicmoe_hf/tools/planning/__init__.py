"""The memory that training a model takes on a GPU, from its config alone. In the order of reading: sizes.py and
attention_sizes.py read the model's sizes, and training.py has a training's settings. step.py counts what a step of the
two keeps and computes for a token, by the choices of run_time.py; memory.py computes the peak of it. ways.py lists the
ways of training, commands.py writes their commands, and choices.py chooses those to show.
"""
