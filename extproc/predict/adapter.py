"""What the LoRA adapter that a request is for adds to its prediction."""

import numpy as np

from extproc.fleet.adapters import AdapterTimes
from extproc.fleet.view import least
from extproc.predict.completion import Prediction


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
