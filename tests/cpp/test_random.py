"""The random generator equals its published algorithm in Python integers."""

from __future__ import annotations

import numpy as np
import pytest

from gleanrl._arrays.native import Random

WORD = 2**64 - 1


def rotl(x: int, k: int) -> int:
    return ((x << k) | (x >> (64 - k))) & WORD


class Plain:
    """xoshiro256++ seeded by splitmix64."""

    def __init__(self, seed: int) -> None:
        self.state = []
        for _ in range(4):
            seed = (seed + 0x9E3779B97F4A7C15) & WORD
            z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & WORD
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
            self.state.append(z ^ (z >> 31))

    def next(self) -> int:
        s = self.state
        result = (rotl((s[0] + s[3]) & WORD, 23) + s[0]) & WORD
        shifted = (s[1] << 17) & WORD
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= shifted
        s[3] = rotl(s[3], 45)
        return result

    def below(self, high: int) -> int:
        while True:
            product = self.next() * high
            if product & WORD >= 2**64 % high:
                return product >> 64


def uniforms(random: Random, n: int) -> list[float]:
    out = np.empty(n)
    random.uniforms(out.ctypes.data, n)
    return out.tolist()


def integers(random: Random, high: int, n: int) -> list[int]:
    out = np.empty(n, np.int64)
    random.integers(high, out.ctypes.data, n)
    return out.tolist()


def permutation(random: Random, n: int) -> list[int]:
    out = np.empty(n, np.int64)
    random.permutation(out.ctypes.data, n)
    return out.tolist()


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**64 - 1])
def test_the_sequence_is_the_published_one(seed):
    random, plain = Random(seed), Plain(seed)
    assert uniforms(random, 50) == [(plain.next() >> 11) * 2.0**-53 for _ in range(50)]
    # A bound just above a power of two rejects nearly half of all draws.
    for high in (1, 2, 7, 10**6, 2**62 + 1, 2**63 - 1):
        assert integers(random, high, 20) == [plain.below(high) for _ in range(20)]
    assert sorted(permutation(random, 100)) == list(range(100))


def test_the_sequence_does_not_depend_on_how_much_is_asked_for():
    whole, parts = Random(3), Random(3)
    assert uniforms(whole, 9) == uniforms(parts, 4) + uniforms(parts, 0) + uniforms(parts, 5)
    assert integers(whole, 10, 9) == integers(parts, 10, 2) + integers(parts, 10, 7)


def test_integers_are_uniform():
    counts = np.bincount(integers(Random(1), 7, 70_000), minlength=7)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 22.5  # chi-square, 6 degrees of freedom, 0.1 %


def test_all_permutations_are_equally_likely():
    random, counts = Random(2), {}
    for _ in range(24_000):
        order = tuple(permutation(random, 4))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((n - 1000) ** 2 / 1000 for n in counts.values()) < 49.7  # 23 degrees of freedom, 0.1 %


def test_saved_state_continues_the_sequence():
    random = Random(5)
    uniforms(random, 3)
    state = random.save()
    expected = uniforms(random, 5)
    other = Random(0)
    other.load(state)
    assert uniforms(other, 5) == expected


def test_invalid_bounds_and_states_are_refused():
    random, out = Random(1), np.empty(3, np.int64)
    with pytest.raises(ValueError, match="bound of 1 or more, got 0"):
        random.integers(0, out.ctypes.data, 3)
    with pytest.raises(ValueError, match="aren't all 0"):
        random.load(bytes(32))
    for size in (0, 31, 33):
        with pytest.raises(ValueError, match="expected four 64-bit numbers"):
            random.load(b"1" * size)
    for call in (random.uniforms, random.permutation):
        with pytest.raises(ValueError, match="null address"):
            call(0, 3)
        with pytest.raises(ValueError, match="0 or more values, got -1"):
            call(out.ctypes.data, -1)
    assert uniforms(random, 4) == uniforms(Random(1), 4), "nothing was drawn"
