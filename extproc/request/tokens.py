"""How many tokens a text is: by a ratio learned per model, or by the model's own tokenizer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from extproc.request.endpoint import Endpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from extproc.request.exact import ExactPrompt, ExactPrompts

PLAUSIBLE = (0.5, 32.0)  # bytes per token that a report must lie between to be learned from

_PRIOR_TOKENS = 2_000.0  # tokens' worth of evidence the configured ratio counts for

_MEMORY_TOKENS = 200_000.0  # prompt tokens after which older reports weigh 1/e as much

_REPORT_TOKENS = 20_000.0
"""Weight of one report at most, so that one odd document does not turn the ratio."""

_PRIOR_IMAGES = 4.0  # images' worth of evidence that ``request.image_tokens`` counts for

_MEMORY_IMAGES = 200.0  # images after which older reports weigh 1/e as much

_MOST_IMAGE_TOKENS = 16_384  # of one image: Qwen2-VL makes no more; what is above is something else

_MAX_MODELS = 1_000  # models remembered; the one not reported on for the longest is dropped

_MAX_CHARACTERS = 16_384  # characters given to a tokenizer; longer prompts are extrapolated

_MAX_TEXTS = 1_024
"""Texts given to a tokenizer, for each call has its cost; more are extrapolated. Both bounds
together keep a tokenizer busy for some 10 ms at most, as a template with as many pieces."""


class TokenSettings(Protocol):
    """What counting starts from, as in :class:`~extproc.config.RequestSettings`."""

    @property
    def bytes_per_token(self) -> float:
        """Of text."""

    @property
    def image_tokens(self) -> int:
        """Of one image."""

    @property
    def tokenizers(self) -> Mapping[str, Path]:
        """Files or folders, by model."""


class TokenizerError(ValueError):
    """A configured tokenizer cannot be used; the message says what to install or correct."""


class _Ratio:
    """Σ bytes ÷ Σ tokens of what was reported on, say, by model: both sums decay exponentially with
    what is below, and begin with the configured ratio."""

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
    """Counts tokens per model, and learns from what replicas report."""

    def __init__(self, settings: TokenSettings) -> None:
        self._bytes = _Ratio(settings.bytes_per_token, _PRIOR_TOKENS, _MEMORY_TOKENS)
        self._images = _Ratio(settings.image_tokens, _PRIOR_IMAGES, _MEMORY_IMAGES)
        self._tokenizers: dict[str, Tokenizer] = {}
        self._exact: dict[str, ExactPrompts] = {}
        for model, path in settings.tokenizers.items():
            file = path / "tokenizer.json" if path.is_dir() else path
            self._tokenizers[model] = _load(model, file)
            if path.is_dir():
                self._exact[model] = _load_exact(model, path, self._tokenizers[model])

    def count(self, model: str, texts: Sequence[str]) -> int:
        """Tokens of the texts together, without special tokens."""
        if tokenizer := self._tokenizers.get(model):
            return _tokenize(tokenizer, texts)
        return round(sum(map(_utf8_length, texts)) / self.bytes_per_token(model))

    def is_exact(self, model: str) -> bool:
        """Whether the model's own tokenizer does the counting."""
        return model in self._tokenizers

    def exact(
        self, endpoint: Endpoint, fields: Mapping[str, object], model: str, size: int
    ) -> "ExactPrompt | None":
        """The token ids of a request's only prompt, where the model's chat template is known.

        ``size`` is of messages, texts and media; of too many no ids are made.
        """
        prompts = self._exact.get(model)
        return prompts.read(endpoint, fields) if prompts and size <= _MAX_TEXTS else None

    def bytes_per_token(self, model: str) -> float:
        """The ratio for a model; the configured one until a replica has reported on it."""
        return self._bytes.of(model)

    def image_tokens(self, model: str) -> int:
        """Tokens an image is taken for; the configured ones until a replica reported on some."""
        return round(self._images.of(model))

    def learn_images(self, model: str, images: int, tokens: int) -> None:
        """Learn from a prompt with so many images, which by its report were so many tokens.

        The tokens are what the report has beyond those of the text; reports that cannot be true
        change nothing.
        """
        if 0 < tokens <= _MOST_IMAGE_TOKENS * images:
            self._images.learn(model, tokens / images, images)

    def learn(self, model: str, prompt_bytes: int, prompt_tokens: int) -> None:
        """Learn from a prompt of so many bytes that a replica says was so many tokens.

        Reports that cannot be true, of prompts whose bytes say nothing (0) or outside
        ``PLAUSIBLE``, change nothing.
        """
        if prompt_bytes <= 0 or prompt_tokens <= 0:
            return
        ratio = prompt_bytes / prompt_tokens
        if PLAUSIBLE[0] <= ratio <= PLAUSIBLE[1]:
            self._bytes.learn(model, ratio, min(prompt_tokens, _REPORT_TOKENS))


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def _tokenize(tokenizer: "Tokenizer", texts: Sequence[str]) -> int:
    """Count the first texts, up to both bounds, and take the rest to be alike."""
    texts = [text for text in texts if text]
    tokens = characters = 0
    for text in texts[:_MAX_TEXTS]:
        head = text[: _MAX_CHARACTERS - characters]
        if not head:
            break
        tokens += len(tokenizer.encode(head, add_special_tokens=False))
        characters += len(head)
    return round(tokens * sum(map(len, texts)) / characters) if texts else 0


def _load(model: str, path: Path) -> "Tokenizer":
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise _missing(model, "tokenizers") from None
    if not path.is_file():
        raise TokenizerError(
            f"the tokenizer configured for model {model!r} does not exist: {path}; "
            "give the path of the model's tokenizer.json"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise TokenizerError(
            f"the tokenizer configured for model {model!r} cannot be read: {path}: {error}; "
            "give the path of the model's tokenizer.json"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_exact(model: str, folder: Path, tokenizer: "Tokenizer") -> "ExactPrompts":
    try:
        from extproc.request.exact import ExactPrompts
        from extproc.request.template import ChatTemplate
    except ImportError:
        raise _missing(model, "jinja2") from None
    try:
        return ExactPrompts(tokenizer, ChatTemplate.of_folder(folder))
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"the folder configured for model {model!r} has no chat template that can be read: "
            f"{folder}: {error}; name its tokenizer.json to count tokens without one"
        ) from None


def _missing(model: str, package: str) -> TokenizerError:
    return TokenizerError(
        f"a tokenizer is configured for model {model!r}, but the package {package!r} is not "
        "installed: pip install 'extproc[tokenizers]'"
    )
