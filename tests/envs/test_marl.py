"""Group maps assign agents to groups."""

from __future__ import annotations

import pytest

from gleanrl.envs.utils import MarlGroupMapType, check_marl_grouping

NAMES = ["a", "b", "c"]


def test_predefined_group_maps() -> None:
    assert MarlGroupMapType.ALL_IN_ONE_GROUP.get_group_map(NAMES) == {"agents": NAMES}
    assert MarlGroupMapType.ONE_GROUP_PER_AGENT.get_group_map(NAMES) == {name: [name] for name in NAMES}


@pytest.mark.parametrize("groups", [{"x": ["c", "a"], "y": ["b"]}, {"x": NAMES}, {n: (n,) for n in NAMES}])
def test_valid_group_maps_pass(groups: dict[str, list[str]]) -> None:
    check_marl_grouping(groups, NAMES)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"x": ["a", "b"]}, r"without a group: \['c'\]"),
        ({"x": ["a", "b"], "y": ["b", "c"]}, r"more than one place: \['b'\]"),
        ({"x": ["a", "a", "b", "c"]}, r"more than one place: \['a'\]"),
        ({"x": NAMES, "y": []}, r"\['y'\] have no agents"),
        ({"x": [*NAMES, "d"]}, r"unknown agents: \['d'\]"),
        ({}, "without a group"),
    ],
)
def test_invalid_group_maps_are_refused(groups: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_marl_grouping(groups, NAMES)


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_invalid_agent_names_are_refused(names: list[str]) -> None:
    for kind in MarlGroupMapType:
        with pytest.raises(ValueError, match="agent_names"):
            kind.get_group_map(names)
