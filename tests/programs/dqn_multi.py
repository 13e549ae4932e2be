"""DQN on CartPole; processes collect at their own pace with the learner's weights and its epsilon."""

import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import (
    EnvCreator,
    ExplorationType,
    GymEnv,
    RewardSum,
    StepCounter,
    TransformedEnv,
    set_exploration_type,
)
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

WORKERS, FRAMES_PER_BATCH, TOTAL, WARM_UP, UPDATES = 2, 50, 10_000, 1_000, 24


def make_env():
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    env.append_transform(RewardSum())
    return env


def main():
    torch.manual_seed(0)
    env = make_env()
    network = QValueActor(
        MLP(in_features=4, out_features=2, num_cells=[64, 64]), in_keys=["observation"], spec=env.action_spec
    )
    explore = EGreedyModule(env.action_spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=4_000)
    policy = TensorDictSequential(network, explore)

    collector = MultiAsyncCollector(
        [EnvCreator(make_env)] * WORKERS,
        policy,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=TOTAL,
        init_random_frames=WARM_UP,
        exploration_type=ExplorationType.RANDOM,
        update_at_each_batch=False,
        device="cpu",
    )
    collector.set_seed(0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(TOTAL), batch_size=64)
    loss_fn = DQNLoss(network, action_space=env.action_spec, delay_value=True)
    loss_fn.make_value_estimator(gamma=0.97)
    target = SoftUpdate(loss_fn, eps=0.98)
    optimizer = torch.optim.Adam(loss_fn.parameters(), lr=1e-3)

    frames = 0
    for i, batch in enumerate(collector):
        assert batch.shape == (FRAMES_PER_BATCH,), batch.shape
        frames += batch.numel()
        buffer.extend(batch.reshape(-1))
        if frames <= WARM_UP:
            continue
        for _ in range(UPDATES):
            loss = loss_fn(buffer.sample())["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(loss_fn.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            target.step()
        for group in optimizer.param_groups:  # lets the last updates settle
            group["lr"] = 1e-3 * (1 - 0.9 * frames / TOTAL)
        explore.step(batch.numel())
        collector.update_policy_weights_()
        if i % 40 == 0:
            ended = batch["next", "episode_reward"][batch["next", "done"]]
            print(f"{frames} frames, epsilon {explore.eps.item():.2f}, returns {ended.tolist()}", flush=True)
    collector.shutdown()
    assert frames == TOTAL, frames

    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        env.set_seed(7)
        returns = [env.rollout(500, policy)["next", "episode_reward"][-1].item() for _ in range(5)]
    print(f"return {sum(returns) / len(returns):.1f}")


if __name__ == "__main__":
    main()
