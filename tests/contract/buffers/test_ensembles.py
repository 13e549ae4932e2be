"""Ensembles of buffers label every row with the buffer that it came from."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from gleanrl.data import replay_buffers as parts
from gleanrl.errors import GleanError
from tests.contract.buffers.tape import Tape, chi_square

TAPE = Tape((5, 3), (3,))
COUNTS = (8, 20, 13)


def members(**kwargs: Any) -> list[Any]:
    """Return three buffers; buffer i holds `COUNTS[i]` rows of stream i."""
    made = []
    for stream, count in enumerate(COUNTS):
        buffer = parts.TensorDictReplayBuffer(
            storage=parts.LazyTensorStorage(20), batch_size=4, seed=stream, **kwargs
        )
        buffer.extend(TAPE.rows(0, count)[stream])
        made.append(buffer)
    return made


def make(batch_size: int = 12, **kwargs: Any) -> Any:
    return parts.ReplayBufferEnsemble(*members(), batch_size=batch_size, **kwargs)


def part(info: Any, name: str) -> torch.Tensor:
    return info["index"][name]


def test_every_row_is_of_the_buffer_that_the_info_names() -> None:
    ensemble = make(num_buffer_sampled=3)
    for _ in range(10):
        batch, info = ensemble.sample(return_info=True)
        assert batch.batch_size == (3, 4)
        ids, index = part(info, "buffer_ids"), part(info, "index")
        for row, number in enumerate(ids[:, 0].tolist()):
            stream, t = TAPE.locate(batch[row])
            expected = TAPE.expected(stream, t)
            assert (batch[row].select(*expected.keys(True, True)) == expected).all()
            assert (stream == number).all()
            assert torch.equal(index[row].reshape(-1), t) and t.max() < COUNTS[number]


@pytest.mark.parametrize(
    ("p", "shares"),
    [
        (None, [1 / 3] * 3),
        ([1.0, 2.0, 5.0], [0.125, 0.25, 0.625]),
        (torch.tensor([0.0, 1.0, 1.0]), [0, 0.5, 0.5]),
    ],
)
def test_buffers_are_drawn_with_replacement_by_their_probability(p: Any, shares: list[float]) -> None:
    torch.manual_seed(0)
    ensemble = make(p=p, num_buffer_sampled=4, batch_size=8)
    counts: Counter[int] = Counter()
    for _ in range(300):
        counts.update(part(ensemble.sample(return_info=True)[1], "buffer_ids").reshape(-1).tolist())
    drawn = [place for place in range(3) if shares[place]]
    assert set(counts) == set(drawn)
    chi_square([counts[place] for place in drawn], [shares[place] for place in drawn])


def test_sample_from_all_draws_from_each_buffer() -> None:
    ensemble = make(sample_from_all=True)
    for _ in range(5):
        batch, info = ensemble.sample(return_info=True)
        assert batch.batch_size == (3, 4)
        assert part(info, "buffer_ids")[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"p": [0.5, 0.5]}, (ValueError, RuntimeError)),
        ({"p": [0.5, -0.5, 1.0]}, ValueError),
        ({"p": [0.0, 0.0, 0.0]}, ValueError),
        ({"p": [float("nan"), 1.0, 1.0]}, ValueError),
        ({"p": [1.0, 1.0, 1.0], "sample_from_all": True}, RuntimeError),
        ({"num_buffer_sampled": 0}, ValueError),
        ({"num_buffer_sampled": -1}, ValueError),
    ],
)
def test_bad_arguments_raise(kwargs: dict[str, Any], error: Any) -> None:
    with pytest.raises(error) as caught:
        make(**kwargs)
    assert isinstance(caught.value, GleanError)


def test_a_batch_that_the_buffers_do_not_divide() -> None:
    with pytest.raises(ValueError):
        make(batch_size=13, num_buffer_sampled=3).sample()


def test_components_and_buffers_together_are_refused() -> None:
    with pytest.raises(RuntimeError):
        parts.ReplayBufferEnsemble(
            *members(), storages=parts.StorageEnsemble(parts.LazyTensorStorage(3)), batch_size=3
        )


def test_index_selects_members() -> None:
    made = members()
    ensemble = parts.ReplayBufferEnsemble(*made, batch_size=12)
    for place in range(3):
        assert ensemble[place] is made[place]
        TAPE.check(ensemble[place][:])
    part_of = ensemble[1:]
    assert isinstance(part_of, parts.ReplayBufferEnsemble)
    for choice in ([1, 2], torch.tensor([1, 2])):
        batch = ensemble[choice].sample()
        assert set(TAPE.locate(batch)[0].flatten().tolist()) <= {1, 2}
    assert set(TAPE.locate(part_of.sample())[0].flatten().tolist()) <= {1, 2}
    with pytest.raises(IndexError):
        ensemble[3]


def test_indices_read_records_inside_members() -> None:
    rows = make()[:, :4]
    assert rows.batch_size == (3, 4)
    stream, t = TAPE.locate(rows)
    assert (stream == torch.arange(3)[:, None]).all() and (t == torch.arange(4)).all()


def test_ensemble_sees_writes_of_its_members() -> None:
    made = members()
    ensemble = parts.ReplayBufferEnsemble(*made, batch_size=12, sample_from_all=True)
    made[0].extend(TAPE.rows(8, 12)[0])
    assert len(ensemble) == sum(COUNTS) + 4
    steps: set[int] = set()
    for _ in range(60):
        steps |= set(TAPE.locate(ensemble.sample()[0])[1].tolist())
    assert steps == set(range(12))
    for call in (lambda: ensemble.extend(TAPE.rows(0, 2)[0]), lambda: ensemble.add(TAPE.step_at(0)[0])):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert isinstance(caught.value, GleanError)


def test_transforms_of_members_come_first() -> None:
    def plus(batch: Any) -> Any:
        return batch.set("action", batch["action"] * 0 + 5)

    def double(batch: Any) -> Any:
        return batch.set("action", batch["action"] * 2)

    ensemble = parts.ReplayBufferEnsemble(
        *members(transform=plus), batch_size=12, sample_from_all=True, transform=double
    )
    assert (ensemble.sample()["action"] == 10).all()


def test_sample_from_all_with_an_empty_member_raises() -> None:
    made = [*members(), parts.TensorDictReplayBuffer(storage=parts.LazyTensorStorage(4), batch_size=4)]
    with pytest.raises(RuntimeError):
        parts.ReplayBufferEnsemble(*made, batch_size=12, sample_from_all=True).sample()


def test_mixture_cannot_be_emptied() -> None:
    ensemble = make()
    with pytest.raises(NotImplementedError):
        ensemble.empty()
