"""Two hunters and a hare: groups of agents. Each agent has its own observation, action, reward and end flags.

python examples/multi_agent.py
"""

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from gleanrl.collectors import SyncDataCollector
from gleanrl.collectors.utils import split_trajectories
from gleanrl.data import Bounded, Categorical, Composite, Unbounded
from gleanrl.envs import EnvBase, check_marl_grouping
from gleanrl.testing import check_env

GROUPS = {"hunters": ["anna", "bert"], "hare": ["cleo"]}
FLAGS = ("done", "terminated", "truncated")


class Hunt(EnvBase):
    """Points on a square. One hunter tires after 30 steps, the other after 40.

    The hunt terminates when the hare is caught. It is truncated when both hunters are tired. The entries of a group's
    agents are stacked, so ``("hunters", "observation")`` is ``(2, 4)``.
    """

    def __init__(self):
        super().__init__()
        check_marl_grouping(GROUPS, ["anna", "bert", "cleo"])
        self.random = torch.Generator()
        sizes = {group: torch.Size([len(names)]) for group, names in GROUPS.items()}

        def each(make):
            return {group: Composite(make(size), shape=size) for group, size in sizes.items()}

        def flag(size):
            return Categorical(2, shape=(*size, 1), dtype=torch.bool)

        self.observation_spec = Composite(each(lambda n: {"observation": Unbounded((*n, 4))}))
        self.action_spec = Composite(each(lambda n: {"action": Bounded(-0.1, 0.1, (*n, 2))}))
        self.reward_spec = Composite(each(lambda n: {"reward": Unbounded((*n, 1))}))
        # The flags at the root end the episode. The flags of a group show which of its agents have stopped.
        own = {name: flag(()) for name in FLAGS}
        self.done_spec = Composite({**own, **each(lambda n: {name: flag(n) for name in FLAGS})})

    def _reset(self, tensordict=None, **kwargs):
        self.places, self.steps = torch.rand((3, 2), generator=self.random), 0
        return self._packed()

    def _step(self, tensordict):
        push = torch.cat([tensordict[group, "action"] for group in GROUPS]).clamp(-0.1, 0.1)
        awake = torch.tensor([self.steps < 30, self.steps < 40, True])
        self.places = (self.places + push * awake[:, None]).clamp(0, 1)
        self.steps += 1
        out = self._packed()
        distance = (self.places[:2] - self.places[2]).norm(dim=-1, keepdim=True)
        out["hunters", "reward"] = -distance
        out["hare", "reward"] = distance.min(0, keepdim=True).values
        caught = bool((distance < 0.05).any())
        tired = torch.tensor([[self.steps >= 30], [self.steps >= 40]])
        out["hunters", "terminated"] = tired | caught
        out["hare", "terminated"] = torch.tensor([[caught]])
        out["terminated"] = torch.tensor([caught])
        out["truncated"] = torch.tensor([bool(tired.all()) and not caught])
        return out

    def _packed(self):
        other = {"hunters": self.places[2].expand(2, 2), "hare": self.places[:2].mean(0, keepdim=True)}
        own = {"hunters": self.places[:2], "hare": self.places[2:]}
        groups = {
            group: TensorDict({"observation": torch.cat([own[group], other[group]], -1)}, [len(names)])
            for group, names in GROUPS.items()
        }
        return TensorDict(groups, [])

    def _set_seed(self, seed):
        self.random.manual_seed(seed)


def chase(sign: float):
    """Return a policy that runs towards the other group, or away for sign -1: (n, 4) -> (n, 2)."""
    return lambda seen: (sign * (seen[..., 2:] - seen[..., :2]) + torch.randn_like(seen[..., 2:]) / 10).clamp(
        -0.1, 0.1
    )


def main(frames: int = 1000) -> None:
    torch.manual_seed(0)
    print(check_env(Hunt()))
    policy = TensorDictSequential(
        *(
            TensorDictModule(chase(sign), in_keys=[(group, "observation")], out_keys=[(group, "action")])
            for group, sign in (("hunters", 1.0), ("hare", -1.0))
        )
    )
    collector = SyncDataCollector(Hunt(), policy, frames_per_batch=frames, total_frames=frames)
    (batch,) = collector
    hunts = split_trajectories(batch, done_key="done")
    lengths = hunts["collector", "mask"].sum(-1)
    caught = batch["next", "terminated"].sum()
    print(
        f"{collector.stats().episodes} hunts, {int(caught)} of them successful, {lengths.float().mean():.0f} steps each"
    )
    print(f"hunters' rewards {tuple(hunts['next', 'hunters', 'reward'].shape)}: hunt, step, hunter")


if __name__ == "__main__":
    main()
