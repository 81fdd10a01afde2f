"""What the LoRA adapter that a request is for adds to its prediction."""

from dataclasses import dataclass

import numpy as np

from extproc.predict.completion import Prediction
from extproc.predict.inputs import Floats, least


@dataclass(slots=True)
class AdapterTimes:
    """What a request for an adapter meets, one entry of each array a candidate of a view."""

    wait: Floats
    """Seconds until the batch has a place for the adapter."""
    load: Floats
    """Seconds to load it."""
    wasted: Floats
    """Seconds that others lose: all that decode stand still while it is loaded, and what is dropped
    for it may have to be loaded again."""
    overrun: float
    """Times as long as for what came before it that a request waits: requests for the adapters in
    the batch that come after it pass."""


def add_adapter(prediction: Prediction, times: AdapterTimes) -> None:
    """Puts into a prediction what an adapter costs, with B sequences decoding::

    T_first   += (wait for a place of the adapter − admission, if more) + load
    avoidable += B·load + load again what is dropped, where that is likely
    """
    later = np.maximum(times.wait - prediction.admission, 0.0) + times.load
    prediction.adapter = later
    prediction.ttft = prediction.ttft + later
    prediction.completion = prediction.completion + later
    prediction.avoidable = prediction.avoidable + times.wasted
    prediction.first_token_share = least(prediction.ttft) / least(prediction.completion)
