"""Images with several labels each, from a data layer in Python: a script and its layers, written
for Caffe.
"""

import json
from pathlib import Path

import numpy as np

from tests.tutorials.material import digits, run

LAYERS = '''
"""Data layers: pictures of two digits side by side, and which digits are in them."""

from threading import Thread

import numpy as np

import caffe


class Pictures:
    def __init__(self, settings):
        stored = np.load(settings["root"] + "/" + settings["split"] + ".npz")
        self.images, self.labels = stored["images"], stored["labels"]
        self.order = np.random.RandomState(settings["seed"])

    def next_picture(self):
        i, j = self.order.randint(0, len(self.labels), 2)
        several = np.zeros(10, np.float32)
        several[[self.labels[i], self.labels[j]]] = 1
        return np.hstack([self.images[i], self.images[j]]).astype(np.float32) / 240 - 0.5, several


class Waits(caffe.Layer):
    """Makes a batch when it is asked for."""

    def setup(self, bottom, top):
        self.top_names = ["data", "label"]
        settings = eval(self.param_str)
        assert sorted(settings) == ["batch_size", "root", "seed", "split"]
        if len(top) != 2 or bottom:
            raise Exception("needs two tops and no bottom")
        self.batch_size = settings["batch_size"]
        self.pictures = Pictures(settings)
        top[0].reshape(self.batch_size, 1, 8, 16)
        top[1].reshape(self.batch_size, 10)

    def reshape(self, bottom, top):
        pass

    def forward(self, bottom, top):
        for i in range(self.batch_size):
            image, several = self.pictures.next_picture()
            top[0].data[i, ...] = image
            top[1].data[i, ...] = several

    def backward(self, top, propagate_down, bottom):
        pass


class Prefetches(Waits):
    """Makes a batch in a thread while the net works on the one before."""

    def setup(self, bottom, top):
        super().setup(bottom, top)
        self.thread = None
        self.prefetch()

    def prefetch(self):
        self.batch = []
        self.thread = Thread(target=self.fill)
        self.thread.start()

    def fill(self):
        for _ in range(self.batch_size):
            self.batch.append(self.pictures.next_picture())

    def forward(self, bottom, top):
        self.thread.join()
        for i, (image, several) in enumerate(self.batch):
            top[0].data[i, ...] = image
            top[1].data[i, ...] = several
        self.prefetch()
'''

SCRIPT = '''
import json
import os.path as osp
import sys

import numpy as np

import caffe
from caffe import layers as L, params as P
from caffe.proto import caffe_pb2

root = sys.argv[1]
caffe.set_mode_cpu()


def conv_relu(bottom, ks, nout, pad=0):
    conv = L.Convolution(bottom, kernel_size=ks, num_output=nout, pad=pad, weight_filler=dict(type="xavier"))
    return conv, L.ReLU(conv, in_place=True)


def multilabel_net(data_layer, split, seed):
    settings = dict(batch_size=50, root=root, split=split, seed=seed)
    n = caffe.NetSpec()
    n.data, n.label = L.Python(module="picture_layers", layer=data_layer, ntop=2, param_str=str(settings))
    n.conv1, n.relu1 = conv_relu(n.data, 3, 24, pad=1)
    n.pool1 = L.Pooling(n.relu1, pool=P.Pooling.MAX, kernel_size=2, stride=2)
    n.conv2, n.relu2 = conv_relu(n.pool1, 4, 48)
    n.fc3 = L.InnerProduct(n.relu2, num_output=64, weight_filler=dict(type="xavier"))
    n.relu3 = L.ReLU(n.fc3, in_place=True)
    n.score = L.InnerProduct(n.relu3, num_output=10, weight_filler=dict(type="xavier"))
    n.loss = L.SigmoidCrossEntropyLoss(n.score, n.label)
    return str(n.to_proto())


def solver_for(data_layer):
    s = caffe_pb2.SolverParameter()
    s.train_net = osp.join(root, data_layer + "_train.prototxt")
    s.test_net.append(osp.join(root, data_layer + "_val.prototxt"))
    s.test_iter.append(1)
    s.test_interval = 10000
    s.test_initialization = False
    s.base_lr = 0.03
    s.momentum = 0.9
    s.lr_policy = "fixed"
    s.random_seed = 1
    s.snapshot_prefix = osp.join(root, "snap")
    for path, split, seed in ((s.train_net, "train", 0), (s.test_net[0], "test", 9)):
        with open(path, "w") as f:
            f.write(multilabel_net(data_layer, split, seed))
    with open(osp.join(root, data_layer + "_solver.prototxt"), "w") as f:
        f.write(str(s))
    solver = caffe.SGDSolver(f.name)
    solver.test_nets[0].share_with(solver.net)
    return solver


def hamming(gt, est):
    return sum(g == e for g, e in zip(gt, est)) / float(len(gt))


def check(net, batches):
    """Mean share of labels that are right; and so if nothing is ever seen."""
    right = nothing = 0.0
    for _ in range(batches):
        net.forward()
        for gt, score in zip(net.blobs["label"].data, net.blobs["score"].data):
            right += hamming(gt, score > 0)
            nothing += hamming(gt, np.zeros(10))
    return right / (batches * 50), nothing / (batches * 50)


losses, shares = {}, {}
for data_layer in ("Waits", "Prefetches"):
    solver = solver_for(data_layer)
    shares[data_layer] = [check(solver.test_nets[0], 4)]
    losses[data_layer] = []
    for it in range(250):
        solver.step(1)
        losses[data_layer].append(float(solver.net.blobs["loss"].data))
    shares[data_layer].append(check(solver.test_nets[0], 4))
blobs = {name: solver.net.blobs[name].data.tolist() for name in ("data", "label", "score")}
print(json.dumps({"losses": losses, "shares": shares, "blobs": blobs, "type": type(solver.net.layers[0]).__name__}))
'''


def test_a_data_layer_with_several_labels(tmp_path: Path) -> None:
    for split in ("train", "test"):
        images, labels = digits(split)
        np.savez(tmp_path / f"{split}.npz", images=images, labels=labels)
    (tmp_path / "picture_layers.py").write_text(LAYERS)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(
        tmp_path,
        "-c",
        "import caffepy, runpy; runpy.run_path('script.py')",
        str(tmp_path),
        CAFFEPY_AS_CAFFE="1",
    )
    told = json.loads(done.stdout)

    losses = told["losses"]
    assert losses["Waits"] == losses["Prefetches"]  # the same pictures, made by another thread
    assert (
        abs(losses["Waits"][0] - 10 * np.log(2)) < 1.5
    )  # summed over labels, a mean over pictures
    assert np.mean(losses["Waits"][-20:]) < 0.4 * losses["Waits"][0]
    assert told["type"] == "Prefetches"
    for (start, nothing), (end, nothing_later) in told["shares"].values():
        assert abs(start - 0.5) < 0.25
        assert 0.8 < nothing < 0.83  # two labels of ten, or one
        assert 0.8 < nothing_later < 0.83
        assert end > 0.95

    # what the nets saw and what it cost them
    images, labels = digits("train")
    order = np.random.RandomState(0)
    for _ in range(250):
        picks = [order.randint(0, len(labels), 2) for _ in range(50)]
    data, seen, score = (np.array(told["blobs"][name]) for name in ("data", "label", "score"))
    for k, (i, j) in enumerate(picks):
        picture = np.hstack([images[i], images[j]]).astype(np.float32) / 240 - 0.5
        np.testing.assert_array_equal(data[k, 0], picture)
        assert set(np.flatnonzero(seen[k])) == {labels[i], labels[j]}
    terms = np.maximum(score, 0) - score * seen + np.log1p(np.exp(-np.abs(score)))
    assert abs(terms.sum() / 50 - losses["Waits"][-1]) < 1e-4 * losses["Waits"][-1]
