"""PPO with an LSTM: the first step shows a cue, and the last step asks for it."""

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import Categorical, Composite, LazyTensorStorage, ReplayBuffer, Unbounded
from torchrl.data.replay_buffers import SamplerWithoutReplacement
from torchrl.envs import Compose, EnvBase, InitTracker, RewardSum, SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, LSTMModule, ProbabilisticActor, ValueOperator, set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

LENGTH, ENVS = 4, 4


class Recall(EnvBase):
    """Shows one of two cues, then zeros, then rewards the action that names the cue."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((3,)))
        self.state_spec = Composite(observation=Unbounded((3,)))
        self.action_spec = Categorical(2)
        self.reward_spec = Unbounded((1,))
        self.done_spec = Composite(
            done=Categorical(2, (1,), dtype=torch.bool), terminated=Categorical(2, (1,), dtype=torch.bool)
        )
        self.generator = torch.Generator()

    def _reset(self, tensordict):
        self.cue = int(torch.randint(2, (), generator=self.generator))
        self.t = 0
        flags = torch.zeros(1, dtype=torch.bool)
        return TensorDict(
            {"observation": torch.eye(3)[self.cue], "done": flags, "terminated": flags.clone()}, []
        )

    def _step(self, tensordict):
        self.t += 1
        end = self.t >= LENGTH
        right = int(tensordict["action"]) == self.cue
        flags = torch.tensor([end])
        return TensorDict(
            {
                "observation": torch.eye(3)[2],
                "reward": torch.tensor([float(right) if end else 0.0]),
                "done": flags,
                "terminated": flags.clone(),
            },
            [],
        )

    def _set_seed(self, seed):
        self.generator.manual_seed(seed)


def main():
    torch.manual_seed(0)
    lstm = LSTMModule(input_size=3, hidden_size=16, in_key="observation", out_key="embed", device="cpu")
    primer = lstm.make_tensordict_primer()

    def make(count):
        one = lambda: TransformedEnv(Recall(), InitTracker())  # noqa: E731
        env = TransformedEnv(SerialEnv(count, one), Compose(primer.clone(), StepCounter(), RewardSum()))
        env.set_seed(0)
        return env

    env = make(ENVS)
    head = TensorDictModule(MLP(16, 2, num_cells=[]), in_keys=["embed"], out_keys=["logits"])
    actor = ProbabilisticActor(
        TensorDictSequential(lstm, head),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(3, 1, num_cells=[16]), in_keys=["observation"])
    collector = Collector(env, actor, frames_per_batch=ENVS * 32, total_frames=ENVS * 32 * 40)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(ENVS), sampler=SamplerWithoutReplacement(), batch_size=ENVS // 2
    )
    gae = GAE(gamma=1.0, lmbda=0.95, value_network=critic)
    loss_fn = ClipPPOLoss(actor, critic, entropy_coeff=0.01, normalize_advantage=True)
    optimizer = torch.optim.Adam(loss_fn.parameters(), 5e-3)

    for data in collector:
        with torch.no_grad():
            gae(data)
        buffer.extend(data)  # a record is the row of one environment
        for _ in range(3):
            for sample in buffer:
                with set_recurrent_mode(True):
                    losses = loss_fn(sample)
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                torch.nn.utils.clip_grad_norm_(loss_fn.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        buffer.empty()
    collector.shutdown()

    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        rollout = make(10).rollout(LENGTH, actor, break_when_any_done=False)
    print(f"return {rollout['next', 'episode_reward'][:, -1].mean().item():.2f}")


if __name__ == "__main__":
    main()
