"""Convolution on a GPU: chosen, for each method at its first call, among several candidates.

With the channels last, the levels of candidates of a forward are:

    Passes.forward                                 key in the tuned plans
    +- "... small", "... few channels", "... depthwise", "... pointwise": cuDNN, or our own
       +- small_convolution: the best tilings by estimated cycles
       +- small_images: the best tilings of kernels that keep whole images, by cycles, too
       +- few_channels: images of few channels; with ReLU's mask in the gradient of the weights
       +- rgb_images: images of three channels, the gradient of the weights
       +- depthwise: each channel by itself
       +- pointwise: the gradient of the weights as one product
       +- Folding: products that take several pixels as one, whose channels fill whole packs
       +- CudnnPasses, "... ways": how weights and image are arranged for cuDNN (filters.py)
          |     plain        weights (O, kernel, C/g)
          |     dense        few groups as one, with zeros between them
          |     blocks       space to depth; channels padded for tensor cores
          +- Arrangement, "... apart": bias and ReLU in cuDNN's plan, or in a kernel after it
             +- plans.find: cuDNN's plans for the graph, by its heuristics

Each level is timed by autotune.fastest, from the innermost outwards, and remembered on disk. The
gradients have the same levels without "apart"; the gradient of the data has no blocks.

Above them are the fusions with what is beside a convolution:

    MaxPooled      before MAX pooling: "forward maxima" is the pooling after it, or kernels that do
                   not write the output (pooled_convolution, small_images, strided_images); the
                   gradient has the same candidates
    Summed         beside a BatchNorm: "forward moments" is a pass for the sums of y after it, or
                   kernels of ours that give them; the gradient has the same
    WithoutOutput  before a BatchNorm, where products of our own do all of it (covariance.py)

Depthwise, and of products with few outputs or few channels, both gradients beside a BatchNorm are
one pass in 16 bits (`depthwise.backward_both`, `pointwise.narrow_both`, `pointwise_few.both`).

In Caffe's layout (Plain) there is one level, "apart". Where cuDNN has no plan, arrays with the
channels last are converted to float32 in Caffe's layout; where it has none there either, im2col and
matrix products (columns.py) do it.

Start with convolution.py, the class that layers use.
"""
