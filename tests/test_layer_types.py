"""The layer types that a net may name."""

import caffepy
from caffepy.layer import registry

NAMES = """
AbsVal Accuracy ArgMax BNLL BatchNorm BatchReindex Bias Clip Concat ContrastiveLoss Convolution Crop Data Deconvolution
Dropout DummyData ELU Eltwise Embed EuclideanLoss Exp Filter Flatten HDF5Data HDF5Output HingeLoss Im2col ImageData
InfogainLoss InnerProduct Input LRN LSTM LSTMUnit Log MVN MemoryData MultinomialLogisticLoss PReLU Parameter Pooling
Power Python RNN ReLU Reduction Reshape SPP Scale Sigmoid SigmoidCrossEntropyLoss Silence Slice Softmax SoftmaxWithLoss
Split Swish TanH Threshold Tile WindowData
"""


def test_all_of_caffe():
    caffe = NAMES.split()
    assert len(caffe) == 61
    assert set(caffe) <= set(registry)
    assert sorted(caffepy.layer_type_list()) == sorted(registry)
