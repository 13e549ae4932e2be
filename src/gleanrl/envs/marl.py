"""Groups of agents: which agents of a multi-agent environment share their entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from gleanrl.errors import InvalidArgumentError


class MarlGroupMapType(Enum):
    """The two usual ways to group agents.

    Agents of one group have their entries stacked under the group's name, ``("agents", "observation")`` of shape
    ``(*batch, n_agents, *leaf)``; so they must have the same spaces.

    Examples:
        >>> MarlGroupMapType.ALL_IN_ONE_GROUP.get_group_map(["anna", "bert"])
        {'agents': ['anna', 'bert']}
        >>> MarlGroupMapType.ONE_GROUP_PER_AGENT.get_group_map(["anna", "bert"])
        {'anna': ['anna'], 'bert': ['bert']}
    """

    ALL_IN_ONE_GROUP = 1
    ONE_GROUP_PER_AGENT = 2

    def get_group_map(self, agent_names: Sequence[str]) -> dict[str, list[str]]:
        """Return the names of each group's agents, in the order of `agent_names`.

        Raises:
            InvalidArgumentError: if `agent_names` is empty or names an agent twice (also a ValueError).
        """
        names = list(agent_names)
        alone = self is MarlGroupMapType.ONE_GROUP_PER_AGENT
        found = {name: [name] for name in names} if alone else {"agents": names}
        check_marl_grouping(found, names)
        return found


def check_marl_grouping(group_map: Mapping[str, Sequence[str]], agent_names: Sequence[str]) -> None:
    """Check that every agent is in exactly one group.

    Args:
        group_map: group -> its agents.
        agent_names: all agents of the environment.

    Raises:
        InvalidArgumentError: if there are no agents, an agent has no group, two groups or two places in one, a
            group is empty, or a group names an agent that isn't there (also a ValueError).
    """
    names = list(agent_names)
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names or twice:
        raise InvalidArgumentError(f"agent_names: expected different names, got {names}")
    empty = [group for group, agents in group_map.items() if not agents]
    if empty:
        raise InvalidArgumentError(f"group_map: the groups {empty} have no agents")
    grouped = [agent for agents in group_map.values() for agent in agents]
    for what, agents in (
        ("unknown agents", [agent for agent in grouped if agent not in names]),
        ("agents with more than one place", sorted({a for a in grouped if grouped.count(a) > 1})),
        ("agents without a group", [name for name in names if name not in grouped]),
    ):
        if agents:
            raise InvalidArgumentError(f"group_map: {what}: {agents}; the agents are {names}")
