"""A custom environment in ten lines and its specs: checked, then run by a collector.

python examples/custom_environment.py
"""

import torch
from tensordict import TensorDict

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Bounded, Composite, Unbounded
from gleanrl.envs import EnvBase
from gleanrl.testing import check_env


class Walk(EnvBase):
    """A point on a line. Each action pushes it, with some noise, and the episode ends beyond +-2."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Bounded(-1.0, 1.0, (1,))
        self.random = torch.Generator()

    def _reset(self, tensordict=None, **kwargs):
        self.position = torch.rand(1, generator=self.random) - 0.5
        return TensorDict({"observation": self.position}, [])

    def _step(self, tensordict):
        noise = torch.randn(1, generator=self.random) / 10
        self.position = self.position + tensordict["action"] + noise  # += would change the earlier tensor
        done = self.position.abs() > 2
        return TensorDict({"observation": self.position, "reward": -self.position.abs(), "done": done}, [])

    def _set_seed(self, seed):
        self.random.manual_seed(seed)


def home(observation: torch.Tensor) -> torch.Tensor:
    """Return a noisy push towards the middle."""
    return (-observation + torch.randn(1)).clamp(-1, 1)


def main() -> None:
    print(check_env(Walk()))
    collector = SyncDataCollector(Walk(), home, frames_per_batch=200, total_frames=600)
    for batch in collector:
        print(f"{len(batch)} frames, mean reward {batch['next', 'reward'].mean():.2f}")
    print(f"{collector.stats().episodes} episodes")


if __name__ == "__main__":
    main()
