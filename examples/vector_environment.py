"""Many CartPoles at once: gymnasium's vector environments, with one policy call for all of them.

python examples/vector_environment.py
"""

import gymnasium
import torch
from torch import nn
from torch.nn.functional import one_hot

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs import GymEnv, GymWrapper


class Balance(nn.Module):
    """Pushes to the side the pole falls to, but at random to the other side: (P, 4) float32 -> (P, 2) one-hot int64."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        right = (observation[..., 2] + observation[..., 3] / 4) > 0
        flip = torch.rand(right.shape) < 0.33
        return one_hot((right ^ flip).long(), 2)


def collect(name: str, env: GymWrapper, frames: int) -> ReplayBuffer:
    """Collect `frames` frames into a buffer, print the speed, and return the buffer."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(frames), batch_size=256)
    collector = SyncDataCollector(env, Balance(), frames_per_batch=frames // 4, total_frames=frames)
    for batch in collector:  # (P, T)
        steps = batch.reshape(-1)
        if ("collector", "mask") in steps.keys(True):
            steps = steps[steps["collector", "mask"]].exclude(("collector", "mask"))  # without reset steps
        buffer.extend(steps)
    stats = collector.stats()
    print(
        f"{name}: {stats.delivered} frames of {stats.episodes} episodes, mean length {stats.mean_length:.0f}, "
        f"{stats.frames_per_s:,.0f} frames/s"
    )
    return buffer


def main(frames: int = 7680) -> None:
    torch.manual_seed(0)
    # Eight environments that step one after the other. gleanrl resets them, so no step is spent on a reset.
    collect("GymEnv(num_envs=8)", GymEnv("CartPole-v1", num_envs=8), frames)
    # CartPole's native vector environment computes all poles at once. It spends a step on each reset, which is masked.
    native = gymnasium.make_vec("CartPole-v1", num_envs=64)
    buffer = collect("CartPole's own, 64 at once", GymWrapper(native), frames)
    # In both cases "next" has the observation that ended the episode, not the first one after the reset.
    ended = buffer[:]["next"]
    ended = ended[ended["terminated"].squeeze(-1)]
    fallen = (ended["observation"][:, 2].abs() > 0.209) | (ended["observation"][:, 0].abs() > 2.4)
    print(f"{int(fallen.sum())} of {len(fallen)} last observations show a fallen pole")


if __name__ == "__main__":
    main()
