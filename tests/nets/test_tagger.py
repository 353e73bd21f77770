"""A tagger of words: Embed, LSTM (Hochreiter and Schmidhuber 1997) and a softmax at each step.

Sentences follow each other in a stream; `cont` is 0 at the first word of each. A word's tag says
whether the word 0 came before it or is it, in its own sentence: a net that cannot remember, or that
cannot forget, gets it wrong.
"""

import numpy as np

from caffepy.device.blob import Array

from . import library
from .training import Training, fall

STEPS, STREAMS, WORDS = 12, 16, 6

NET = (
    library.inputs(words=(STEPS, STREAMS), cont=(STEPS, STREAMS), tags=(STEPS, STREAMS))
    + library.layer(
        "Embed",
        "embed",
        "words",
        f"propagate_down: false embed_param {{ input_dim: {WORDS} num_output: 8 "
        'weight_filler { type: "uniform" min: -0.5 max: 0.5 } }',
        top="embedded",
    )
    + library.recurrent(
        "LSTM",
        "lstm",
        "embedded cont",
        16,
        filler='type: "uniform" min: -0.3 max: 0.3',
        top="hidden",
    )
    + library.inner_product("scores", "hidden", 2, "axis: 2")
    + library.softmax_loss("scores", "tags", "softmax_param { axis: 2 }")
    + library.accuracy("scores", "tags", "accuracy_param { axis: 2 }")
)


def sentences(rng: np.random.Generator) -> dict[str, Array]:
    """Streams of sentences of about six words; each batch begins new ones."""
    words = rng.integers(0, WORDS, (STEPS, STREAMS))
    cont = rng.random((STEPS, STREAMS)) > 1 / 6
    cont[0] = False
    tags = np.zeros((STEPS, STREAMS))
    for t in range(STEPS):
        tags[t] = (words[t] == 0) | (cont[t] & (tags[t - 1] > 0))
    return {"words": words, "cont": cont, "tags": tags}


def test_the_loss_falls_below_a_fifth():
    training = Training(
        NET, 'type: "Adam" base_lr: 0.02 momentum: 0.9 lr_policy: "fixed"', sentences
    )
    values = training.run(80, "loss", "accuracy")
    assert fall(values[:, 0]) < 1 / 5
    assert values[-5:, 1].mean() > 0.95
