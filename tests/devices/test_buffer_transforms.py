"""Buffer transforms over a device's storage equal their results on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from gleanrl.envs.transforms import (
    BurnInTransform,
    CatFrames,
    ClipTransform,
    Compose,
    DoubleToFloat,
    LineariseRewards,
    MultiStepTransform,
    ObservationNorm,
    RandomCropTensorDict,
    Reward2GoTransform,
    RewardClipping,
    RewardScaling,
    SignTransform,
    ToTensorImage,
    VecNorm,
)
from tests.data.replay_buffers.oracle import ted
from tests.devices.records import CPU, on

REWARD = ("next", "reward")


TRANSFORMS: dict[str, Any] = {
    "scaling": lambda: RewardScaling(loc=0.5, scale=3.0, in_keys=[REWARD]),
    "scaling to normal": lambda: RewardScaling(loc=0.5, scale=3.0, in_keys=[REWARD], standard_normal=True),
    "reward clipping": lambda: RewardClipping(2.0, 5.0, in_keys=[REWARD]),
    "clip": lambda: ClipTransform(in_keys=["observation"], low=1.0, high=2.5),
    "clip from below": lambda: ClipTransform(in_keys=["observation"], low=1.0),
    "sign": lambda: SignTransform(in_keys=[REWARD]),
    "norm": lambda: ObservationNorm(loc=1.0, scale=2.0, in_keys=["observation"]),
    "norm to normal": lambda: ObservationNorm(
        loc=1.0, scale=2.0, in_keys=["observation"], standard_normal=True
    ),
    "casts": lambda: DoubleToFloat(in_keys=[REWARD]),
    "several": lambda: Compose(
        RewardScaling(1.0, 2.0, in_keys=[REWARD]), SignTransform(in_keys=["observation"])
    ),
    "multi step": lambda: MultiStepTransform(n_steps=3, gamma=0.5),
    "reward to go": lambda: Reward2GoTransform(gamma=0.5),
}
TENSORS: dict[str, Any] = {
    "scaling": lambda: RewardScaling(torch.tensor([0.5]), torch.tensor([3.0]), in_keys=[REWARD]),
    "norm": lambda: ObservationNorm(
        torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 8.0]), in_keys=["observation"]
    ),
    "clip": lambda: ClipTransform(
        in_keys=["observation"], low=torch.tensor([0.0, 1.0, 2.0]), high=torch.tensor(4.0)
    ),
    "linear": lambda: LineariseRewards(in_keys=["observation"], weights=[1.0, 2.0, 3.0]),
    "statistics": lambda: VecNorm(in_keys=["observation"]),
}


class TestTransforms:
    @pytest.mark.parametrize("name", [*TRANSFORMS])
    def test_results_equal_the_cpu(self, device, source, name):
        found = []
        for home in (CPU, device):
            rb = ReplayBuffer(
                storage=LazyTensorStorage(30, device=home), transform=TRANSFORMS[name](), batch_size=8, seed=0
            )
            rb.extend(ted(14).to(source if home == device else CPU))
            rb.extend(ted(14, start=14).to(source if home == device else CPU))
            found.append(rb.sample())
            assert on(home, found[-1]) and on(home, rb[:])
        close(found[1], found[0])

    @pytest.mark.parametrize("name", [*TENSORS])
    def test_transforms_with_tensors_can_be_moved(self, device, name):
        found = []
        for home in (CPU, device):
            transform = TENSORS[name]().to(home)
            rb = ReplayBuffer(
                storage=LazyTensorStorage(30, device=home), transform=transform, batch_size=8, seed=0
            )
            rb.extend(ted(14))
            found.append(rb.sample())
            assert on(home, found[-1])
        close(found[1], found[0])

    def test_affine_transforms_give_exact_values(self, device):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(10, device=device),
            transform=Compose(
                RewardScaling(loc=1.0, scale=2.0, in_keys=[REWARD]),
                ObservationNorm(loc=3.0, scale=0.5, in_keys=["x"]),
            ),
        )
        x = torch.arange(4.0, device=device)
        rb.extend(TensorDict({"x": x[:, None], "next": {"reward": x[:, None] * 10}}, [4]))
        assert rb[:][REWARD].flatten().tolist() == [1.0, 21.0, 41.0, 61.0]
        assert rb[:]["x"].flatten().tolist() == [3.0, 3.5, 4.0, 4.5]

    def test_rewards_to_go_are_computed_on_the_device(self, device, source):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(10, device=device), transform=Reward2GoTransform(gamma=0.5)
        )
        reward = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], device=source)[:, None]
        done = torch.tensor([False, False, True, False, True], device=source)[:, None]
        rb.extend(TensorDict({"next": {"reward": reward, "done": done}}, [5]))
        assert rb[:][REWARD].flatten().tolist() == [3.0, 4.0, 4.0, 16.0, 16.0]
        assert reward.flatten().tolist() == [1.0, 2.0, 4.0, 8.0, 16.0]

    def test_n_step_rows_are_computed_on_the_device(self, device, source):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(20, device=device), transform=MultiStepTransform(n_steps=3, gamma=0.5)
        )
        x = torch.arange(9, device=source)
        done = (x == 2)[:, None]
        reward = torch.ones(9, 1, device=source)
        data = TensorDict({"x": x, "next": {"x": x + 1, "reward": reward, "done": done}}, [9])
        assert rb.extend(data[:2]).numel() == 0
        rb.extend(data[2:4].to(device))
        rb.extend(data[4:])
        assert rb[:]["steps_to_next_obs"].flatten().tolist() == [3, 2, 1, 3, 3, 3]
        assert rb[:][REWARD].flatten().tolist() == [1.75, 1.5, 1.0, 1.75, 1.75, 1.75]
        assert rb[:]["gamma"].flatten().tolist() == [0.125, 0.25, 0.5, 0.125, 0.125, 0.125]
        assert rb[:]["next", "x"].tolist() == [3, 3, 3, 6, 7, 8] and on(device, rb[:])

    def test_images_are_converted_on_the_device(self, device, source):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(10, device=device),
            transform=ToTensorImage(in_keys=["pixels"]),
            batch_size=6,
        )
        pixels = torch.arange(5 * 2 * 4 * 3).to(torch.uint8).view(5, 2, 4, 3)
        rb.extend(TensorDict({"pixels": pixels.to(source)}, [5]))
        batch, info = rb.sample(return_info=True)
        expected = pixels[info["index"].cpu()].permute(0, 3, 1, 2) / 255
        assert batch["pixels"].shape == (6, 3, 2, 4) and batch["pixels"].device == device
        torch.testing.assert_close(batch["pixels"].cpu(), expected)
        assert rb.storage.get([0])["pixels"].dtype == torch.uint8

    @pytest.mark.parametrize("padding", ["same", "constant"])
    def test_slices_are_stacked_on_the_device(self, device, source, padding):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(30, device=device),
            sampler=SliceSampler(slice_len=3),
            transform=lambda batch: frames(batch.reshape(-1, 3)).reshape(-1),
            batch_size=12,
            seed=0,
        )
        frames = CatFrames(N=2, dim=-1, in_keys=["x"], padding=padding)
        x = torch.arange(10.0, device=source)[:, None] + 1
        done = torch.arange(10, device=source)[:, None] == 4
        rb.extend(TensorDict({"x": x, "next": {"x": x + 1, "done": done}}, [10]))
        batch = rb.sample()
        first = batch["index"].cpu().view(-1, 3)[:, 0] + 1.0
        before = first if padding == "same" else torch.zeros_like(first)
        pairs = [(before, first), (first, first + 1), (first + 1, first + 2)]
        stacked = torch.stack([torch.stack(pair, -1) for pair in pairs], 1)
        assert torch.equal(batch["x"].cpu().view(-1, 3, 2), stacked) and on(device, batch)

    def test_stored_frames_are_stacked_on_the_device(self, device):
        transform, sampler = CatFrames(N=3, dim=-1, in_keys=["x"]).make_rb_transform_and_sampler(batch_size=8)
        rb = ReplayBuffer(
            storage=LazyTensorStorage(30, device=device), sampler=sampler, transform=transform, batch_size=8
        )
        x = torch.arange(10.0, device=device)[:, None]
        done = torch.arange(10, device=device)[:, None] == 4
        rb.extend(TensorDict({"x": x, "next": {"x": x + 1, "done": done}}, [10]))
        batch = rb.sample()
        last = batch["x"].cpu()[:, 2:]
        first = torch.where(last < 5, 0.0, 5.0)  # the first step of the episode
        stack = (last + torch.tensor([-2.0, -1.0, 0.0])).maximum(first)
        assert torch.equal(batch["x"].cpu(), stack) and on(device, batch)
        assert torch.equal(batch["next", "x"].cpu(), torch.cat([stack[:, 1:], last + 1], -1))

    @pytest.mark.parametrize("kind", ["columns", "list", "list of any place"])
    def test_random_crops_are_drawn_on_the_device(self, device, kind):
        storage = {
            "columns": lambda: LazyTensorStorage(10, device=device),
            "list": lambda: ListStorage(10, device=device),
            "list of any place": lambda: ListStorage(10),
        }[kind]()
        rb = ReplayBuffer(storage=storage, transform=RandomCropTensorDict(sub_seq_len=3), batch_size=20)
        x = torch.arange(40).view(4, 10)
        rb.extend([TensorDict({"x": part.to(device)}, [10]) for part in x])
        found = rb.sample()["x"]
        assert found.device == device and found.shape == (20, 3)
        found = found.cpu()
        assert torch.equal(found, found[:, :1] + torch.arange(3)) and (found[:, 0] % 10 <= 7).all()

    def test_burn_in_runs_on_the_device(self, device):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(10, device=device),
            transform=BurnInTransform(Adding(), burn_in=2),
            batch_size=6,
        )
        x = torch.arange(20).view(4, 5)
        rb.extend(TensorDict({"x": x, "sum": torch.zeros_like(x)}, [4, 5]))
        batch = rb.sample()
        assert batch["x"].shape == (6, 3)
        first = batch["x"].cpu()[:, 0] - 2
        assert torch.equal(batch["sum"].cpu()[:, 0], 2 * first + 1) and on(device, batch)

    def test_statistics_keep_the_order(self, device):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(4, device=device),
            transform=VecNorm(in_keys=["x"], decay=1.0),
            batch_size=4,
        )
        rb.set_sampler(SamplerWithoutReplacement(shuffle=False))
        rb.extend(TensorDict({"x": torch.tensor([[1.0], [2.0], [3.0], [6.0]])}, [4]))
        x = rb.sample()["x"]
        assert x.device == device and torch.equal(x.cpu().argsort(0).flatten(), torch.arange(4))


class Adding(torch.nn.Module):
    """A recurrent module whose state is the sum of its inputs."""

    in_keys, out_keys = ["x", "sum"], [("next", "sum")]

    def forward(self, data: TensorDict) -> TensorDict:
        return data.set(("next", "sum"), data["x"].cumsum(-1))


def close(one: Any, other: Any) -> None:
    """Check that batches on any devices are equal up to rounding, which differs between devices for some functions."""
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True, True):
        assert one[key].dtype == other[key].dtype
        torch.testing.assert_close(one[key].cpu(), other[key].cpu())
