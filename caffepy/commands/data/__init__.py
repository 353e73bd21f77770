"""The commands that make training data, and the one that shows what a source holds.

A module for each command; start reading with `convert_imageset`, which has Caffe's keys and
bytes.
"""
