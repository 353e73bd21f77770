"""Caffe's well-known nets as PyTorch's users write them, for beside_peers.py and beside_ddp.py.

NETS has for each name a function that gives (module, shape of an image, classes); `loss_of` takes
what the module gives. BatchNorm and strides are where Caffe's prototxts have them.

usage: [torchrun --nproc-per-node N] benchmarks/peer_torch.py [--nets lenet,caffenet]
           [--batch 64,256] [--modes tf32,bf16] [--compile MODE] [--seconds 3] [--device cuda]

As a program it trains each net on data that lie on the device, one process a GPU, and prints a line
of JSON a case: net, mode, gpus, images_s.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Net = tuple[nn.Module, tuple[int, int, int], int]
BATCHES = {
    "lenet": 64,
    "cifar10_quick": 256,
    "caffenet": 256,
    "alexnet": 256,
    "googlenet": 128,
    "vgg16": 64,
    "resnet50": 128,
    "mobilenet_v2": 96,
}
WARM_UP, GROUP = 8, 10
"""Steps before the first that is timed, and between looks at the clock."""
MOST_STEPS = 60
"""Steps of a case in several processes, whose clocks differ."""


def relu() -> nn.Module:
    return nn.ReLU(inplace=True)


def lenet() -> Net:
    layers = [nn.Conv2d(1, 20, 5), nn.MaxPool2d(2, 2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2, 2)]
    head = [nn.Flatten(), nn.Linear(800, 500), relu(), nn.Linear(500, 10)]
    return nn.Sequential(*layers, *head), (1, 28, 28), 10


def cifar10_quick() -> Net:
    def average() -> nn.Module:
        return nn.AvgPool2d(3, 2, ceil_mode=True)

    first = [nn.Conv2d(3, 32, 5, padding=2), nn.MaxPool2d(3, 2, ceil_mode=True), relu()]
    second = [nn.Conv2d(32, 32, 5, padding=2), relu(), average()]
    third = [nn.Conv2d(32, 64, 5, padding=2), relu(), average()]
    head = [nn.Flatten(), nn.Linear(1024, 64), nn.Linear(64, 10)]
    return nn.Sequential(*first, *second, *third, *head), (3, 32, 32), 10


def normalize() -> nn.Module:
    return nn.LocalResponseNorm(5, 1e-4, 0.75)


def five_convolutions(pool_first: bool) -> Net:
    """CaffeNet pools before it normalizes, AlexNet after."""

    def reduce() -> list[nn.Module]:
        pair = [nn.MaxPool2d(3, 2), normalize()]
        return pair if pool_first else pair[::-1]

    layers = [
        *(nn.Conv2d(3, 96, 11, 4), relu(), *reduce()),
        *(nn.Conv2d(96, 256, 5, padding=2, groups=2), relu(), *reduce()),
        *(nn.Conv2d(256, 384, 3, padding=1), relu()),
        *(nn.Conv2d(384, 384, 3, padding=1, groups=2), relu()),
        *(nn.Conv2d(384, 256, 3, padding=1, groups=2), relu(), nn.MaxPool2d(3, 2)),
    ]
    return nn.Sequential(*layers, *fully_connected(9216)), (3, 227, 227), 1000


def fully_connected(inputs: int) -> list[nn.Module]:
    hidden = [nn.Linear(inputs, 4096), relu(), nn.Dropout()]
    return [
        nn.Flatten(),
        *hidden,
        nn.Linear(4096, 4096),
        relu(),
        nn.Dropout(),
        nn.Linear(4096, 1000),
    ]


def caffenet() -> Net:
    return five_convolutions(pool_first=True)


def alexnet() -> Net:
    return five_convolutions(pool_first=False)


def vgg16() -> Net:
    layers: list[nn.Module] = []
    inputs = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), relu()]
            inputs = width
        layers.append(nn.MaxPool2d(2, 2))
    return nn.Sequential(*layers, *fully_connected(25088)), (3, 224, 224), 1000


def convolution(inputs: int, outputs: int, size: int = 1, **options: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, **options), relu())


class Inception(nn.Module):
    """Four branches on one input, joined by channels."""

    def __init__(
        self, inputs: int, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int
    ) -> None:
        super().__init__()
        self.one = convolution(inputs, one)
        self.three = nn.Sequential(convolution(inputs, three[0]), convolution(*three, 3, padding=1))
        self.five = nn.Sequential(convolution(inputs, five[0]), convolution(*five, 5, padding=2))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), convolution(inputs, pooled))
        self.outputs = one + three[1] + five[1] + pooled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)


class GoogLeNet(nn.Module):
    """BVLC's, with LRN and two auxiliary losses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *(convolution(3, 64, 7, stride=2, padding=3), self.halve(), normalize()),
            *(convolution(64, 64), convolution(64, 192, 3, padding=1), normalize(), self.halve()),
        )
        plan = {
            "3a": (192, 64, (96, 128), (16, 32), 32),
            "3b": (256, 128, (128, 192), (32, 96), 64),
            "4a": (480, 192, (96, 208), (16, 48), 64),
            "4b": (512, 160, (112, 224), (24, 64), 64),
            "4c": (512, 128, (128, 256), (24, 64), 64),
            "4d": (512, 112, (144, 288), (32, 64), 64),
            "4e": (528, 256, (160, 320), (32, 128), 128),
            "5a": (832, 256, (160, 320), (32, 128), 128),
            "5b": (832, 384, (192, 384), (48, 128), 128),
        }
        modules = {name: Inception(*numbers) for name, numbers in plan.items()}
        self.to_4a = nn.Sequential(modules["3a"], modules["3b"], self.halve(), modules["4a"])
        self.to_4d = nn.Sequential(modules["4b"], modules["4c"], modules["4d"])
        self.to_5b = nn.Sequential(modules["4e"], self.halve(), modules["5a"], modules["5b"])
        self.first, self.second = self.auxiliary(512), self.auxiliary(528)
        self.head = nn.Sequential(
            nn.AvgPool2d(7), nn.Flatten(), nn.Dropout(0.4), nn.Linear(1024, 1000)
        )

    @staticmethod
    def halve() -> nn.Module:
        return nn.MaxPool2d(3, 2, ceil_mode=True)

    @staticmethod
    def auxiliary(inputs: int) -> nn.Module:
        pooled = [nn.AvgPool2d(5, 3, ceil_mode=True), convolution(inputs, 128), nn.Flatten()]
        hidden = [nn.Linear(2048, 1024), relu(), nn.Dropout(0.7), nn.Linear(1024, 1000)]
        return nn.Sequential(*pooled, *hidden)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.to_4a(self.stem(x))
        first = self.first(x)
        x = self.to_4d(x)
        second = self.second(x)
        return self.head(self.to_5b(x)), first, second


def googlenet() -> Net:
    return GoogLeNet(), (3, 224, 224), 1000


def normalized(inputs: int, outputs: int, size: int = 1, **options: Any) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, size, bias=False, **options), nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """Of ResNet's first version: the stride is that of the first convolution."""

    def __init__(self, inputs: int, width: int, stride: int, project: bool) -> None:
        super().__init__()
        outputs = 4 * width
        reduce = [*normalized(inputs, width, stride=stride), relu()]
        spatial = [*normalized(width, width, 3, padding=1), relu()]
        self.branch = nn.Sequential(*reduce, *spatial, *normalized(width, outputs))
        shortcut = nn.Sequential(*normalized(inputs, outputs, stride=stride))
        self.shortcut = shortcut if project else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.branch(x) + self.shortcut(x), inplace=True)


def resnet50() -> Net:
    layers = [
        *normalized(3, 64, 7, stride=2, padding=3),
        relu(),
        nn.MaxPool2d(3, 2, ceil_mode=True),
    ]
    inputs = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(count):
            layers.append(Bottleneck(inputs, width, stride if i == 0 else 1, project=i == 0))
            inputs = 4 * width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return nn.Sequential(*layers, *head), (3, 224, 224), 1000


class InvertedResidual(nn.Module):
    """MobileNet v2's block: expand, depthwise, project; added to its input if the shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        expand = [*normalized(inputs, width), nn.ReLU6(inplace=True)] if expansion > 1 else []
        depthwise = normalized(width, width, 3, stride=stride, padding=1, groups=width)
        project = normalized(width, outputs)
        self.branch = nn.Sequential(*expand, *depthwise, nn.ReLU6(inplace=True), *project)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.branch(x) if self.residual else self.branch(x)


def mobilenet_v2() -> Net:
    layers = [*normalized(3, 32, 3, stride=2, padding=1), nn.ReLU6(inplace=True)]
    inputs = 32
    plan = (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1)
    for expansion, width, count, stride in (*plan, (6, 160, 3, 2), (6, 320, 1, 1)):
        for i in range(count):
            layers.append(InvertedResidual(inputs, width, stride if i == 0 else 1, expansion))
            inputs = width
    head = [*normalized(320, 1280), nn.ReLU6(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(1280, 1000)), (3, 224, 224), 1000


NETS: dict[str, Callable[[], Net]] = {
    make.__name__: make
    for make in (
        *(lenet, cifar10_quick, caffenet, alexnet),
        *(googlenet, vgg16, resnet50, mobilenet_v2),
    )
}


def loss_of(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """The loss of what a net of NETS gives."""
    if not isinstance(outputs, tuple):
        return functional.cross_entropy(outputs, labels)
    main, *auxiliary = (functional.cross_entropy(each, labels) for each in outputs)
    return main + 0.3 * sum(auxiliary, torch.zeros_like(main))


def training_step(
    net: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    mode: str,
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = loss_of,
) -> Callable[[], None]:
    """Return what does forward, backward and an update by SGD with momentum and weight decay."""
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = mode != "fp32"
    torch.backends.cudnn.benchmark = True
    fused = {"fused": True} if x.is_cuda else {}
    update = torch.optim.SGD(net.parameters(), 0.001, 0.9, weight_decay=5e-4, **fused)

    def step() -> None:
        update.zero_grad(set_to_none=True)
        kind = narrow or torch.bfloat16
        with torch.autocast(x.device.type, dtype=kind, enabled=narrow is not None):
            value = loss(net(x), y)
        value.backward()
        update.step()

    return step


def case(name: str, batch: int, mode: str, compiled: str, seconds: float, device: str) -> float:
    """Images a second of this process, the median of its groups of steps."""
    net, shape, classes = NETS[name]()
    net = net.to(device)
    x = torch.randn(batch, *shape, device=device)
    y = torch.randint(classes, (batch,), device=device)
    if mode in ("bf16", "fp16"):
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    several = torch.distributed.is_initialized()
    if several:
        net = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    run = torch.compile(net, mode=compiled) if compiled else net
    step = training_step(run, x, y, mode)
    for _ in range(WARM_UP):
        step()
    times: list[float] = []
    begin = perf_counter()
    while len(times) * GROUP < MOST_STEPS if several else perf_counter() - begin < seconds:
        at = perf_counter()
        for _ in range(GROUP):
            step()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append((perf_counter() - at) / GROUP)
    return batch / median(times)


def main() -> None:
    """Train each net and print a line a case, by the first process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nets", default=",".join(BATCHES))
    parser.add_argument("--batch", default=",".join(map(str, BATCHES.values())))
    parser.add_argument("--modes", default="tf32,bf16")
    parser.add_argument("--compile", default="", help="a mode of torch.compile")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if world > 1:
        torch.distributed.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    for name, batch in zip(arguments.nets.split(","), arguments.batch.split(","), strict=True):
        for mode in arguments.modes.split(","):
            result: dict[str, Any] = {"net": name, "mode": mode, "gpus": world}
            try:
                how = mode, arguments.compile, arguments.seconds, arguments.device
                result["images_s"] = world * case(name, int(batch), *how)
            except Exception as error:  # the other cases go on, and this one says what it lacks
                result["error"] = repr(error)[:300]
            if rank == 0:
                sys.stdout.write(json.dumps(result) + "\n")
                sys.stdout.flush()
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
