"""Measurements and the tools beside them, run from the root of a clone: `python -m benchmarks.layer.moe_layer`, for one.
Results are CSVs in results/.

common/   shapes, contenders, timing, and where a figure comes from
layer/    one MoE layer: time, memory, error, its kernels, its first call
step/     whole models: training steps, and converting a checkpoint
quality/  small models trained to compare losses
sweep/    tile shapes, for the tables in kernels/
figures.py  writes the tables of the documents from the CSVs; charts.py draws their charts
"""
