"""DQN with hindsight; the program's own transform adds records with the reached states as goals."""

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import Bounded, Categorical, Composite, LazyTensorStorage, TensorDictReplayBuffer, Unbounded
from torchrl.envs import CatTensors, Compose, EnvBase, StepCounter, Transform, TransformedEnv
from torchrl.envs.utils import ExplorationType, check_env_specs, set_exploration_type
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

BITS, EPISODES, BATCHES, UPDATES = 6, 16, 90, 30


class Flipping(EnvBase):
    """One bit is flipped per step, until all bits equal the goal."""

    def __init__(self):
        super().__init__(device="cpu")
        bits = Bounded(0, 1, (BITS,), dtype=torch.float32)
        self.observation_spec = Composite(bits=bits, goal=bits.clone())
        self.action_spec = Categorical(BITS)
        self.reward_spec = Unbounded((1,))

    def _set_seed(self, seed):
        torch.manual_seed(seed)

    def _reset(self, tensordict):
        self.bits, self.goal = torch.randint(2, (2, BITS)).float()
        return TensorDict({"bits": self.bits, "goal": self.goal}, [])

    def _step(self, tensordict):
        self.bits = self.bits.clone()
        self.bits[tensordict["action"]] = 1 - self.bits[tensordict["action"]]
        reached = (self.bits == self.goal).all(-1, keepdim=True)
        return TensorDict(
            {
                "bits": self.bits,
                "goal": self.goal,
                "reward": reached.float() - 1,
                "done": reached,
                "terminated": reached.clone(),
            },
            [],
        )


class Hindsight(Transform):
    """Writes every step a second time, with the final bits of its trajectory as the goal."""

    def forward(self, tensordict):
        return tensordict

    def _inv_call(self, tensordict):
        ids, batch = tensordict["collector", "traj_ids"], tensordict.clone()
        last = torch.tensor([(ids == i).nonzero().max() for i in ids])
        goal = tensordict["next", "bits"][last]
        reached = (tensordict["next", "bits"] == goal).all(-1, keepdim=True)
        for group in (batch, batch["next"]):
            group["goal"] = goal
            group["input"] = torch.cat([group["bits"], goal], -1)
        batch["next", "reward"] = reached.float() - 1
        batch["next", "terminated"] = reached
        batch["next", "done"] = reached | batch["next", "truncated"]
        return torch.cat([tensordict, batch])


def make_env():
    return TransformedEnv(
        Flipping(), Compose(CatTensors(["bits", "goal"], "input", del_keys=False), StepCounter(BITS))
    )


def main():
    torch.manual_seed(0)
    env = make_env()
    check_env_specs(env)
    network = QValueActor(
        MLP(in_features=2 * BITS, out_features=BITS, num_cells=[128]), in_keys=["input"], spec=env.action_spec
    )
    explore = EGreedyModule(env.action_spec, eps_init=1.0, eps_end=0.1, annealing_num_steps=3_000)
    collector = Collector(
        env,
        TensorDictSequential(network, explore),
        frames_per_batch=EPISODES * BITS,
        total_frames=BATCHES * EPISODES * BITS,
        reset_at_each_iter=True,
    )
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20_000), transform=Hindsight(), batch_size=128, prefetch=2
    )
    loss_fn = DQNLoss(network, action_space=env.action_spec, delay_value=True)
    loss_fn.make_value_estimator(gamma=0.95)
    target = SoftUpdate(loss_fn, eps=0.95)
    optimizer = torch.optim.Adam(loss_fn.parameters(), lr=1e-3)
    for batch in collector:
        explore.step(batch.numel())
        written = buffer.extend(batch.reshape(-1))
        assert written.shape[0] == 2 * batch.numel(), written.shape
        for _ in range(UPDATES):
            loss_fn(buffer.sample())["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            target.step()
    collector.shutdown()

    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        solved = [make_env().rollout(BITS, network)["next", "terminated"].any().item() for _ in range(50)]
    print(f"return {sum(solved) / len(solved)}")


if __name__ == "__main__":
    main()
