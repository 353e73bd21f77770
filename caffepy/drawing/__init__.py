"""Nets as pictures, if graphviz is not installed.

Start reading with `svg`: it lays out a directed graph and writes it as SVG. `bitmap` turns such a
picture into pixels. `labels` words a layer's definition: kernel sizes, strides, the number of
outputs.
"""
