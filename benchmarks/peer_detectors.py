"""PyTorch's detectors and depthwise nets, from torchvision where it has them, for `--peer` of
beside_peers.py. Detectors take a batch as tensors of one size, with three boxes an image, and
return their loss.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import nn
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD

BOXES = 3
"""True boxes of an image, as many as caffepy makes up."""

Net = tuple[nn.Module, tuple[int, int, int], int]


class Detector(nn.Module):
    """A detector of torchvision, with true boxes of its own."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.targets: list[dict[str, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.targets:
            for _ in range(len(x)):
                low = torch.rand(BOXES, 2, device=x.device) * 150
                size = 30 + torch.rand(BOXES, 2, device=x.device) * 120
                labels = torch.randint(1, 21, (BOXES,), device=x.device)
                self.targets.append({"boxes": torch.cat([low, low + size], 1), "labels": labels})
        losses = self.net(list(x), self.targets)
        return sum(losses.values(), torch.zeros((), device=x.device))


def ssd300_vgg16() -> Net:
    net = torchvision.models.detection.ssd300_vgg16(
        weights=None, weights_backbone=None, num_classes=21
    )
    return Detector(net), (3, 300, 300), 21


def block(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def separable(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(block(inputs, inputs, 3, stride, inputs), block(inputs, outputs, 1))


class MobileNetFeatures(nn.Module):
    """Six maps: of MobileNet after its blocks 11 and 13, and of four pairs of convolutions."""

    out_channels = (512, 1024, 512, 256, 256, 128)

    def __init__(self) -> None:
        super().__init__()
        plan = [(32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
        plan += [(256, 512, 2), *[(512, 512, 1)] * 5]
        first = nn.Sequential(block(3, 32, 3, 2), *(separable(*each) for each in plan))
        second = nn.Sequential(separable(512, 1024, 2), separable(1024, 1024))
        extra = [(1024, 256, 512), (512, 128, 256), (256, 128, 256), (256, 64, 128)]
        pairs = [nn.Sequential(block(a, b, 1), block(b, c, 3, 2)) for a, b, c in extra]
        self.parts = nn.ModuleList([first, second, *pairs])

    def forward(self, x: torch.Tensor) -> "OrderedDict[str, torch.Tensor]":
        maps = OrderedDict[str, torch.Tensor]()
        for i, part in enumerate(self.parts):
            x = maps[str(i)] = part(x)
        return maps


class Heads(nn.Module):
    """Convolutions of 1 x 1 for the locations and the classes of each map."""

    def __init__(self, channels: tuple[int, ...], anchors: list[int], classes: int) -> None:
        super().__init__()
        self.columns = (4, classes)
        self.maps = nn.ModuleList(
            nn.ModuleList(nn.Conv2d(c, a * columns, 1) for columns in self.columns)
            for c, a in zip(channels, anchors, strict=True)
        )

    def forward(self, features: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        found = []
        for k, columns in enumerate(self.columns):
            rows = [
                heads[k](x).permute(0, 2, 3, 1).reshape(len(x), -1, columns)  # type: ignore[index]
                for heads, x in zip(self.maps, features, strict=True)
            ]
            found.append(torch.cat(rows, 1))
        return dict(zip(("bbox_regression", "cls_logits"), found, strict=True))


def mobilenet_ssd() -> Net:
    ratios, scales = [[2], *[[2, 3]] * 5], [0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.0]
    boxes = DefaultBoxGenerator(ratios, scales=scales)
    backbone = MobileNetFeatures()
    head = Heads(backbone.out_channels, boxes.num_anchors_per_location(), 21)
    return Detector(SSD(backbone, boxes, (300, 300), 21, head=head)), (3, 300, 300), 21


def mobilenet_v2() -> Net:
    return torchvision.models.mobilenet_v2(), (3, 224, 224), 1000


def shufflenet_v2() -> Net:
    return torchvision.models.shufflenet_v2_x1_0(), (3, 224, 224), 1000


NETS: dict[str, Callable[[], Net]] = {
    "ssd300_vgg16": ssd300_vgg16,
    "mobilenet_ssd": mobilenet_ssd,
    "mobilenet_v2": mobilenet_v2,
    "shufflenet_v2": shufflenet_v2,
}


def compiled(net: nn.Module, mode: str) -> Any:
    """Return the net compiled; of a detector its features and heads, since compiling the rest fails
    in torchvision's code that matches boxes.
    """
    if not isinstance(net, Detector):
        return torch.compile(net, mode=mode)
    for part in ("backbone", "head"):
        setattr(net.net, part, torch.compile(getattr(net.net, part), mode=mode))
    return net


def loss_of(outputs: Any, labels: torch.Tensor) -> Any:
    """Return the loss: what a detector returns, else that of the scores."""
    if outputs.dim() == 0:
        return outputs
    return nn.functional.cross_entropy(outputs, labels)
