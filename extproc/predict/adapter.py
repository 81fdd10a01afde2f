"""What the LoRA adapter that a request is for adds to its prediction."""

import numpy as np

from extproc.fleet.adapters import AdapterTimes
from extproc.fleet.view import FleetView, least
from extproc.predict.completion import Prediction


def add_adapter(prediction: Prediction, times: AdapterTimes, view: FleetView) -> None:
    """Puts into a prediction what an adapter costs, with B sequences decoding::

        T_first += (wait for a place of the adapter − admission, if more) + load
        cost    += B·load + load again what is dropped + behind·(completion − free_in, if more)

    A load stands in the way of all that decode. Requests that wait for the place that this one
    takes or keeps, ``behind``, wait until it has ended.
    """
    later = np.maximum(times.wait - prediction.admission, 0.0) + times.load
    prediction.adapter = later
    prediction.ttft = prediction.ttft + later
    prediction.completion = prediction.completion + later
    kept = np.maximum(prediction.completion - times.free_in, 0.0)
    cost = times.load * view.batch + times.reload + times.behind * kept
    prediction.cost_to_others = prediction.cost_to_others + cost
    prediction.first_token_share = least(prediction.ttft) / least(prediction.completion)
