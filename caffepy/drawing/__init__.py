"""Nets as pictures, for where graphviz is not installed.

Start reading with `svg`: it lays out a directed graph and writes it as SVG. `bitmap` turns such
a picture into pixels. `labels` words what a layer's definition says: kernel sizes, strides, the
number of outputs.
"""
