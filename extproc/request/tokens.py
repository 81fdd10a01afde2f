"""Counts of prompt tokens: by a ratio learned for each model, or by the model's tokenizer and
template."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from extproc.request.endpoint import Endpoint
from extproc.request.tokenized import TokenizedPrompt

if TYPE_CHECKING:
    from extproc.request.exact import ExactPrompts

PLAUSIBLE = (0.5, 32.0)  # bytes per token; reports outside this range are ignored

_PRIOR_TOKENS = 2_000.0  # weight of the configured ratio, in tokens
_MEMORY_TOKENS = 200_000.0  # prompt tokens after which older reports weigh 1/e as much
_REPORT_TOKENS = 20_000.0  # largest weight of a report, so that no odd document decides alone

_PRIOR_IMAGES = 4.0  # weight of ``request.image_tokens``, in images
_MEMORY_IMAGES = 200.0  # images after which older reports weigh 1/e as much
_MOST_IMAGE_TOKENS = 16_384  # of an image, as in Qwen2-VL; larger reports are ignored

_MAX_MODELS = 1_000  # whose ratios are remembered: those with the latest reports


class _Ratio:
    """Ratio of two sums for each model, such as Σ bytes ÷ Σ tokens of reports. Both sums start from
    the configured ratio. Each report reduces the weight of older reports."""

    def __init__(self, prior: float, evidence: float, memory: float) -> None:
        self._begin = prior * evidence, evidence
        self._memory = memory
        self._sums: dict[str, tuple[float, float]] = {}

    def of(self, model: str) -> float:
        above, below = self._sums.get(model, self._begin)
        return above / below

    def learn(self, model: str, ratio: float, weight: float) -> None:
        above, below = self._sums.pop(model, self._begin)
        keep = 1 / (1 + weight / self._memory)
        if len(self._sums) >= _MAX_MODELS:
            del self._sums[next(iter(self._sums))]
        self._sums[model] = (above * keep + ratio * weight, below * keep + weight)


class TokenCounter:
    """Counts tokens per model, and learns from what replicas report.

    Args:
        bytes_per_token: bytes of text per token, until replicas report.
        image_tokens: tokens of an image, until replicas report.
        tokenizers: model → folder with its ``tokenizer.json`` and chat template.

    Raises:
        ValueError: a tokenizer cannot be used; the message says what to install or correct.
    """

    def __init__(
        self, bytes_per_token: float, image_tokens: int, tokenizers: Mapping[str, Path]
    ) -> None:
        self._bytes = _Ratio(bytes_per_token, _PRIOR_TOKENS, _MEMORY_TOKENS)
        self._images = _Ratio(image_tokens, _PRIOR_IMAGES, _MEMORY_IMAGES)
        self._exact = {model: _load(model, folder) for model, folder in tokenizers.items()}

    def count(self, model: str, texts: Sequence[str]) -> int:
        """Estimate the tokens of the texts together, without special tokens."""
        return round(bytes_of(texts) / self.bytes_per_token(model))

    def exact(
        self, endpoint: Endpoint, fields: Mapping[str, object], model: str
    ) -> TokenizedPrompt | None:
        """Return the token ids of a request's prompt, or None if they cannot be known."""
        prompts = self._exact.get(model)
        return prompts.read(endpoint, fields) if prompts else None

    def bytes_per_token(self, model: str) -> float:
        """Return a model's ratio: learned, or configured until a replica reports token usage."""
        return self._bytes.of(model)

    def image_tokens(self, model: str) -> int:
        """Return the learned tokens of an image; without reports, the configured number."""
        return round(self._images.of(model))

    def learn_images(self, model: str, images: int, tokens: int) -> None:
        """Learn the tokens of an image; ``tokens``: reported tokens of a prompt, less those of its
        text. Absurd numbers are ignored."""
        if 0 < tokens <= _MOST_IMAGE_TOKENS * images:
            self._images.learn(model, tokens / images, images)

    def learn(self, model: str, prompt_bytes: int, prompt_tokens: int) -> None:
        """Learn the bytes per token from a prompt and its reported tokens (at least 1). Ratios
        outside ``PLAUSIBLE`` are ignored."""
        ratio = prompt_bytes / prompt_tokens
        if PLAUSIBLE[0] <= ratio <= PLAUSIBLE[1]:
            self._bytes.learn(model, ratio, min(prompt_tokens, _REPORT_TOKENS))


def bytes_of(texts: Sequence[str]) -> int:
    """Return the bytes of the texts together in UTF-8."""
    return sum([len(t) if t.isascii() else len(t.encode(errors="replace")) for t in texts])


def _load(model: str, folder: Path) -> "ExactPrompts":
    try:
        from tokenizers import Tokenizer

        from extproc.request.exact import ExactPrompts
        from extproc.request.template import ChatTemplate
    except ImportError as error:
        raise ValueError(
            f"request.tokenizers: {model!r} needs the package {error.name!r}, which is not "
            "installed: pip install 'extproc[tokenizers]'"
        ) from None
    file = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(
            f"request.tokenizers: the tokenizer of model {model!r} cannot be read: {file}: "
            f"{error}; give the folder with the model's tokenizer.json and chat template"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        return ExactPrompts(tokenizer, ChatTemplate(folder))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"request.tokenizers: model {model!r} has no chat template that can be read: {folder}: "
            f"{error}; leave the model out to estimate its tokens"
        ) from None
