"""Groups of agents: which agents of a multi-agent environment share one entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from gleanrl.errors import InvalidArgumentError


class MarlGroupMapType(Enum):
    """The two usual ways to group agents.

    The entries of a group's agents are stacked under the group's name. For example, ``("agents", "observation")`` has
    shape ``(*batch, n_agents, *leaf)``. So all agents of a group must have the same spaces.

    Examples:
        >>> MarlGroupMapType.ALL_IN_ONE_GROUP.get_group_map(["anna", "bert"])
        {'agents': ['anna', 'bert']}
        >>> MarlGroupMapType.ONE_GROUP_PER_AGENT.get_group_map(["anna", "bert"])
        {'anna': ['anna'], 'bert': ['bert']}
    """

    ALL_IN_ONE_GROUP = 1
    ONE_GROUP_PER_AGENT = 2

    def get_group_map(self, agent_names: Sequence[str]) -> dict[str, list[str]]:
        """Return a dictionary from group name to agent names, in the order of `agent_names`.

        Raises:
            InvalidArgumentError: if `agent_names` is empty or contains a name twice (also a ValueError).
        """
        names = list(agent_names)
        alone = self is MarlGroupMapType.ONE_GROUP_PER_AGENT
        found = {name: [name] for name in names} if alone else {"agents": names}
        check_marl_grouping(found, names)
        return found


def check_marl_grouping(group_map: Mapping[str, Sequence[str]], agent_names: Sequence[str]) -> None:
    """Check that every agent is in exactly one group.

    Args:
        group_map: dictionary from group name to agent names.
        agent_names: all agents of the environment.

    Raises:
        InvalidArgumentError: if `agent_names` is empty or has a name twice (also a ValueError). Also if a group is
            empty or has an unknown agent, or if an agent is in no group or more than once.
    """
    names = list(agent_names)
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names or twice:
        raise InvalidArgumentError(f"agent_names: expected different names, got {names}")
    empty = [group for group, agents in group_map.items() if not agents]
    if empty:
        raise InvalidArgumentError(f"group_map: the groups {empty} have no agents")
    grouped = [agent for agents in group_map.values() for agent in agents]
    for problem, agents in (
        ("unknown agents", [agent for agent in grouped if agent not in names]),
        ("agents with more than one place", sorted({a for a in grouped if grouped.count(a) > 1})),
        ("agents without a group", [name for name in names if name not in grouped]),
    ):
        if agents:
            raise InvalidArgumentError(f"group_map: {problem}: {agents}; the agents are {names}")
