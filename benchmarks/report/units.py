"""Figures as people read them."""


def seconds(value: float) -> str:
    """Three digits, in the unit that suits: ``7.2 ms``, ``412 ms``, ``6.61 s``."""
    return f"{_digits(1000 * value)} ms" if value < 0.9995 else f"{_digits(value)} s"


def between(least: float, most: float) -> str:
    """A range, with its unit once: ``6.15 – 7.02 s``; nothing where it is none."""
    scale, unit = (1000, "ms") if most < 0.9995 else (1, "s")
    return _range(_digits(scale * least), _digits(scale * most), f" {unit}")


def ratios(least: float, most: float) -> str:
    """A range of ratios: ``0.45 – 0.52×``; nothing where it is none."""
    return _range(ratio(least)[:-1], ratio(most)[:-1], "×")


def tick(value: float) -> str:
    """For an axis: ``200 ms``, ``5 s``."""
    return f"{1000 * value:g} ms" if value < 0.9995 else f"{value:g} s"


def ratio(value: float) -> str:
    """``0.45×``."""
    return f"{value:.2f}×" if value < 10 else f"{value:.0f}×"


def _range(least: str, most: str, unit: str) -> str:
    return "" if least == most else f"{least} – {most}{unit}"


def _digits(value: float) -> str:
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{places}f}"
