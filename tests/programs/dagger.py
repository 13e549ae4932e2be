"""DAgger: an expert labels the states that the learner visits; data in files, each label once per epoch."""

import tempfile

import torch
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import Compose, GymEnv, RewardSum, SelectTransform, StepCounter, TransformedEnv


def expert(observation):
    place, speed, angle, turning = observation.unbind(-1)
    return (angle + 0.3 * turning + 0.02 * place + 0.05 * speed > 0).long()


class Mixed:
    """Asks the expert with probability `beta` at each step, and the learner otherwise."""

    def __init__(self, net):
        self.net, self.beta = net, 1.0

    def __call__(self, tensordict):
        asked = torch.rand(()) < self.beta
        observation = tensordict["observation"]
        tensordict["action"] = expert(observation) if asked else self.net(observation).argmax(-1)
        return tensordict


def main():
    torch.manual_seed(0)
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    env = TransformedEnv(env, Compose(RewardSum(), StepCounter(max_steps=200)))
    env.set_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    policy = Mixed(net)

    collector = Collector(env, policy, frames_per_batch=300, total_frames=2_400, reset_at_each_iter=True)
    assert len(collector) == 8
    with tempfile.TemporaryDirectory() as folder:
        buffer = ReplayBuffer(
            storage=LazyMemmapStorage(10_000, scratch_dir=folder),
            sampler=SamplerWithoutReplacement(drop_last=True),
            batch_size=60,
            prefetch=2,
            transform=SelectTransform("observation", "label", keep_dones=False),
        )
        for data in collector:
            policy.beta /= 2
            data["label"] = expert(data["observation"])
            buffer.extend(data)
            for _ in range(5):
                for batch in buffer:
                    assert set(batch.keys()) == {"observation", "label"} and batch.shape == (60,), batch
                    loss = nn.functional.cross_entropy(net(batch["observation"]), batch["label"])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        assert len(buffer) == 2_400
        del buffer
    collector.shutdown()

    policy.beta = 0.0
    with torch.inference_mode():
        test = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), RewardSum())
        test.set_seed(7)
        returns = [test.rollout(200, policy)["next", "episode_reward"][-1].item() for _ in range(5)]
    print(f"return {sum(returns) / len(returns):.1f}")


if __name__ == "__main__":
    main()
