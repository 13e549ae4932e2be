"""A copier copies weights repeatedly, and its copies never alias the user's module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from gleanrl.collectors.policy_weights import WeightCopier
from gleanrl.errors import SchemaError


def net() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.rand_like(parameter))
    return made


def record_of(module: nn.Module) -> TensorDict:
    found: TensorDict = TensorDict.from_module(module).data.clone()
    return found


def exchange_parameter(module: nn.Sequential) -> None:
    module[0].weight = nn.Parameter(torch.rand(3, 2))


def exchange_buffer(module: nn.Sequential) -> None:
    module[1].running_mean = torch.rand(3)


def exchange_module(module: nn.Sequential) -> None:
    module[2] = nn.Linear(3, 1)


def exchange_data(module: nn.Sequential) -> None:
    module[0].weight.data = torch.rand(3, 2)


def change_in_place(module: nn.Sequential) -> None:
    module[0].weight.data.add_(1)


CHANGES = [exchange_parameter, exchange_buffer, exchange_module, exchange_data, change_in_place]


@pytest.mark.parametrize("change", CHANGES)
def test_replaced_tensors_are_copied(change: Callable[[nn.Sequential], None]) -> None:
    module = net()
    linked, record = WeightCopier(module), record_of(module)
    linked.write(record)
    change(module)
    linked.write(record)
    assert (record == record_of(module)).all()
    change(module)
    linked.read(record)
    assert (record == record_of(module)).all() and not linked.lacking


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.append(nn.Linear(1, 1)),
        lambda module: module[0].register_parameter("bias", None),
        lambda module: module.double(),
        lambda module: setattr(module[0].weight, "data", torch.rand(1, 2)),  # this shape would be broadcast
        lambda module: module[1].register_buffer("more", torch.zeros(1)),
    ],
)
def test_changed_keys_shapes_and_dtypes_raise_before_any_copy(
    change: Callable[[nn.Sequential], None],
) -> None:
    module = net()
    linked, record = WeightCopier(module), record_of(module)
    linked.write(record)
    change(module)
    before = record.clone()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    with pytest.raises(SchemaError):
        linked.write(record)
    assert (record == before).all()


def test_copier_writes_into_several_records() -> None:
    module = net()
    linked, records = WeightCopier(module), [record_of(module) for _ in range(3)]
    for number in range(6):
        change_in_place(module)
        linked.write(records[number % 3])
        assert (records[number % 3] == record_of(module)).all()


def test_meta_weights_are_reported_as_lacking() -> None:
    assert WeightCopier(net().to("meta")).lacking
