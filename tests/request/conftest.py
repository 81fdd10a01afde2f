import pytest
from tokenizers import Encoding, Tokenizer


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are tokenised."""
    texts: list[str] = []

    class Recorder:
        def __init__(self, real: Tokenizer) -> None:
            self.real = real

        @classmethod
        def from_file(cls, path: str) -> "Recorder":
            return cls(Tokenizer.from_file(path))

        def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
            texts.append(text)
            return self.real.encode(text, add_special_tokens=add_special_tokens)

        def no_truncation(self) -> None:
            self.real.no_truncation()

        def no_padding(self) -> None:
            self.real.no_padding()

    monkeypatch.setattr("tokenizers.Tokenizer", Recorder)
    return texts
