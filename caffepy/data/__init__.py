"""Training data: sources of images, their transformation, and the thread that reads ahead.

Start reading at the head of `loader`: a table of who calls what on which thread. `sources` holds
one file a kind of source, `transformer` is transform_param, `reader` the prefetch, `decoders` the
processes that decode, `write` makes databases.
"""
