"""Shared words that record the order of reads, writes and fences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


class TracedWords:
    """Words of a worker's progress that append each read, each write and each fence of `module` to `log`.

    The floats that share the memory aren't recorded.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, words: Any = None) -> None:
        self.words = memoryview(np.zeros(384, np.int64) if words is None else np.array(words))
        self.log: list[Any] = []
        monkeypatch.setattr(module, "fence", lambda: self.log.append("fence"))

    def cast(self, code: str) -> memoryview:
        return self.words.cast(code)  # type: ignore[call-overload]

    def __getitem__(self, word: int) -> int:
        self.log.append(("read", word))
        return self.words[word]

    def __setitem__(self, word: int, value: int) -> None:
        self.log.append(("write", word))
        self.words[word] = value
