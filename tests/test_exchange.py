from __future__ import annotations

import gc
import sys

import pytest
import torch

from gleanrl import exchange
from gleanrl.exchange import EXCHANGE, marks
from gleanrl.native import MadeTensors, knows_exchange

needs_exchange = pytest.mark.skipif(EXCHANGE is None, reason="torch doesn't offer the interface")


def test_it_is_what_torch_offers():
    offered = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    assert EXCHANGE is offered if offered is not None and knows_exchange(offered) else EXCHANGE is None


@needs_exchange
@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.requires_grad_(),
        lambda tensor: setattr(tensor, "grad", torch.zeros_like(tensor)),
        lambda tensor: setattr(tensor, "seen", True),
        lambda tensor: tensor.unsqueeze_(0),
        lambda tensor: tensor.t_(),
        lambda tensor: tensor.resize_(2, 2),
        lambda tensor: tensor.set_(torch.zeros(3, 2)),
    ],
)
def test_tensors_that_were_changed_are_seen(change):
    tensors = [torch.zeros(3), torch.zeros(3, 2), torch.zeros(())]
    made = MadeTensors(EXCHANGE, tensors)
    assert made.unchanged()
    tensors[1].fill_(1.0)  # values aren't looked at
    assert made.unchanged()
    change(tensors[1])
    assert not made.unchanged()


@needs_exchange
def test_tensors_are_held_and_let_go():
    tensor = torch.zeros(3)
    before = sys.getrefcount(tensor)
    made = MadeTensors(EXCHANGE, [tensor])
    for _ in range(3):
        assert made.unchanged()
    assert sys.getrefcount(tensor) == before + 1
    del made
    gc.collect()
    assert sys.getrefcount(tensor) == before
    assert MadeTensors(EXCHANGE, []).unchanged()


@needs_exchange
def test_what_is_no_tensor_is_refused():
    with pytest.raises(ValueError, match="exchange"):
        MadeTensors(object(), [torch.zeros(1)])
    with pytest.raises((TypeError, RuntimeError)):
        MadeTensors(EXCHANGE, [1.0])


@pytest.fixture(params=["shown", "asked"])
def way(request, monkeypatch):
    if request.param == "asked":
        monkeypatch.setattr(exchange, "EXCHANGE", None)
    elif EXCHANGE is None:
        pytest.skip("torch doesn't offer the interface")


class Apart(torch.Tensor):
    """A tensor of another class."""


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "tensor",
    [
        lambda: torch.zeros(3, 2),
        lambda: torch.zeros(3, 2).t()[1:],
        lambda: torch.zeros(0),
        lambda: torch.zeros(2, requires_grad=True),
        lambda: torch.zeros(2, dtype=torch.complex64).conj(),
        lambda: torch.zeros(2, dtype=torch.complex64).conj().imag,
        lambda: torch.zeros(2).as_subclass(Apart),
    ],
)
def test_marks_are_numbers_of_changes_and_addresses(tensor):
    tensors = (torch.zeros(3), tensor())
    with torch.no_grad():
        tensors[1].fill_(1.0)
    mark = marks()
    mark.take(tensors)
    assert mark.taken() == [(one._version, one.data_ptr()) for one in tensors]
    assert mark.hold(tensors)
    assert mark.hold(tensors)
    with torch.no_grad():
        tensors[0][1:].fill_(2.0)  # a view of it
    assert not mark.hold(tensors)
    mark.take(tensors)
    assert mark.hold(tensors)
    assert not mark.hold(tensors[:1])
    tensors[0].set_(torch.zeros(3))
    assert not mark.hold(tensors)
    mark.take(())
    assert mark.hold(())
    assert mark.taken() == []


@pytest.mark.usefixtures("way")
def test_marks_say_what_went_wrong():
    with torch.inference_mode():
        tensor = torch.zeros(1)
    with pytest.raises(RuntimeError, match="version"):
        marks().take((tensor,))
    with pytest.raises(AttributeError):
        marks().take((1,))
