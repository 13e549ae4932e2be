"""DQN on CartPole; the program's own processes write into the learner's memory-mapped buffer."""

import torch
from tensordict.nn import TensorDictSequential
from torch import multiprocessing
from torchrl.data import LazyMemmapStorage, RandomSampler, TensorDictReplayBuffer
from torchrl.envs import ExplorationType, GymEnv, StepCounter, TransformedEnv, set_exploration_type
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

ACTORS, ROUNDS, STEPS, UPDATES = 2, 30, 64, 60


def make_env():
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(300))


def act(buffer, network, epsilon, seed, start, done):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    env = make_env()
    env.set_seed(seed)
    policy = TensorDictSequential(
        network, EGreedyModule(env.action_spec, eps_init=epsilon, eps_end=epsilon, annealing_num_steps=1)
    )
    with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
        for _ in range(ROUNDS):
            start.acquire()
            buffer.extend(env.rollout(STEPS, policy, break_when_any_done=False).exclude("action_value"))
            done.release()


def main():
    torch.manual_seed(0)
    env = make_env()
    env.set_seed(0)
    network = QValueActor(
        MLP(in_features=4, out_features=2, num_cells=[64, 64]), in_keys=["observation"], spec=env.action_spec
    )
    network.share_memory()
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(8_000), sampler=RandomSampler(), batch_size=64, priority_key="unused"
    )
    first = env.rollout(200, break_when_any_done=False)
    with torch.no_grad():
        buffer.extend(first.set("chosen_action_value", network(first.clone())["chosen_action_value"]))

    context = multiprocessing.get_context("spawn")
    start, done = context.Semaphore(0), context.Semaphore(0)
    actors = [
        context.Process(target=act, args=(buffer, network, epsilon, seed, start, done))
        for seed, epsilon in enumerate((0.05, 0.3)[:ACTORS])
    ]
    for actor in actors:
        actor.start()
    loss_fn = DQNLoss(network, action_space=env.action_spec, delay_value=True)
    loss_fn.make_value_estimator(gamma=0.97)
    target = SoftUpdate(loss_fn, eps=0.98)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    best = 0.0
    for turn in range(ROUNDS):
        for _ in actors:
            start.release()
        for _ in actors:
            done.acquire()
        assert len(buffer) == min(8_000, 200 + (turn + 1) * ACTORS * STEPS), len(buffer)
        for _ in range(UPDATES):
            loss_fn(buffer.sample())["loss"].backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            target.step()
        if turn % 10 == 9:
            with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
                best = max(best, sum(env.rollout(300, network).shape[0] for _ in range(3)) / 3)
            print(f"{turn + 1} rounds: best so far {best:.0f}", flush=True)
    for actor in actors:
        actor.join()
        assert actor.exitcode == 0, actor.exitcode
    print(f"return {best:.1f}")


if __name__ == "__main__":
    main()
