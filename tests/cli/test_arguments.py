from pathlib import Path

import pytest

from caffepy.cli.arguments import normalize
from caffepy.cli.main import flags, groups
from caffepy.core.errors import UsageError

CASES = {
    "one dash": ("train -solver s.prototxt", "train --solver=s.prototxt"),
    "one dash, equals": ("train -solver=s.prototxt", "train --solver=s.prototxt"),
    "two dashes": ("train --solver s.prototxt", "train --solver=s.prototxt"),
    "two dashes, equals": ("train --solver=s.prototxt", "train --solver=s.prototxt"),
    "underscores": (
        "train --sigint_effect none -log_dir x",
        "train --sigint-effect=none --log-dir=x",
    ),
    "command with underscore": ("device_query -gpu all", "device-query --gpu=all"),
    "flags before the command": (
        "-gpu 0 train --no-progress -solver s",
        "train --gpu=0 --no-progress --solver=s",
    ),
    "value that looks like a flag": ("test -weights -w", "test --weights=-w"),
    "value with equals": ("train -solver=a=b", "train --solver=a=b"),
    "flag without its value": ("train -solver", "train --solver"),
    "boolean": ("time -synthetic --json", "time --synthetic --json"),
    "negated as gflags do": (
        "train -noprogress -nologtostderr",
        "train --no-progress --no-logtostderr",
    ),
    "boolean with value": (
        "train -logtostderr=1 -progress=false",
        "train --logtostderr --no-progress",
    ),
    "boolean without a negative form": (
        "test -json=true --synthetic=0 -nodisplay_lrm",
        "test --json",
    ),
    "boolean with what is none": ("test -json=maybe", "test --json=maybe"),
    "negative with a value": (
        "train -noprogress=true -nologtostderr=false",
        "train --no-progress --logtostderr",
    ),
    "verbosity": ("train -v=1 -minloglevel 2", "train --v=1 --minloglevel=2"),
    "number that may follow": ("train -cpu 4 -solver s", "train --cpu=4 --solver=s"),
    "number that does not": ("train -cpu -solver s", "train --cpu --solver=s"),
    "number that does not, among words": (
        "classify -gpu a.png -json",
        "classify a.png --gpu --json",
    ),
    "help": ("train -h", "train --help"),
    "unknown flag": ("train -slover x", "train x --slover"),
    "unknown flag with a no": ("train -nothing", "train --nothing"),
    "argument": ("check -level 1 net.prototxt", "check net.prototxt --level=1"),
    "flag of one command that takes a value in another": (
        "check --gpu --precision bf16 net.prototxt",
        "check net.prototxt --gpu --precision=bf16",
    ),
    "after two dashes": ("check -- -net.prototxt", "check -- -net.prototxt"),
    "a lone dash": ("check -", "check -"),
    "command of a group": ("weights show x --json", "weights show x --json"),
    "flags before a command of a group": (
        "-minloglevel 1 weights convert a b",
        "weights convert a b --minloglevel=1",
    ),
    "group alone": ("weights -h", "weights --help"),
    "nothing": ("", ""),
    "Caffe's names of commands": ("upgrade_net_proto_text a b", "upgrade-net a b"),
    "flags of glog": (
        "-stderrthreshold 2 train -colorlogtostderr -max_log_size=5 -vmodule a=1 -solver s",
        "train --stderrthreshold=2 --colorlogtostderr --max-log-size=5 --vmodule=a=1 --solver=s",
    ),
    "flags that may be unknown": (
        "train -undefok=foo_bar,baz,gpu -foo_bar=1 -nobaz -solver s -gpu 0 -other",
        "train --solver=s --gpu=0 --other",
    ),
}


@pytest.mark.parametrize(("typed", "understood"), CASES.values(), ids=CASES.keys())
def test_normalize(typed: str, understood: str) -> None:
    assert normalize(typed.split(), flags(typed.split()), groups()) == understood.split()


def test_flags_of_a_file(tmp_path: Path) -> None:
    file, inner = tmp_path / "flags", tmp_path / "inner"
    file.write_text(f"# Caffe's\n\n  -gpu=0\n--weights=a b.caffemodel\n-flagfile={inner}\n")
    inner.write_text("-nologtostderr\n")
    for typed in (["-flagfile", str(file)], [f"--flagfile={file}"]):
        understood = normalize([*typed, "train", "-gpu", "1"], flags(), groups())
        assert understood == [
            *("train", "--gpu=0", "--weights=a b.caffemodel", "--no-logtostderr", "--gpu=1")
        ]
    with pytest.raises(UsageError, match=r"--flagfile gone: cannot be read: no such file"):
        normalize(["train", "-flagfile=gone"], flags(), groups())
    file.write_text("-gpu=0\ncaffe\n")
    with pytest.raises(UsageError, match=r"flags: 'caffe' is no flag; a line is --name=value"):
        normalize(["train", f"-flagfile={file}"], flags(), groups())


def test_an_empty_value_stays() -> None:
    assert normalize(["train", "-gpu", "", "-stage="], flags()) == ["train", "--gpu=", "--stage="]
