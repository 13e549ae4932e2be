"""`ForeignTransform`: runs TorchRL's transforms in this library's environments, and converts specs both ways."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.data.specs import Composite, from_torchrl, to_torchrl
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.compose import FOREIGN, Compose, as_transform
from gleanrl.envs.transforms.primer import TensorDictPrimer
from gleanrl.envs.transforms.row_view import Record


class ForeignTransform(Transform):
    """Adapts a transform of TorchRL's. The transform is used, not copied, and taken out of its TorchRL container.

    Its `parent` is a TorchRL environment that forwards steps and resets to this library's environment, with converted
    specs. Attributes that this class lacks are looked up in the transform.

    Args:
        foreign: TorchRL's transform.
    """

    def __init__(self, foreign: Any) -> None:
        super().__init__()
        foreign.reset_parent()
        self.foreign: Any = foreign
        self._around: Any = None

    def _placed(self) -> Any:
        """Return TorchRL's transform, put into a TorchRL environment if this transform is in an environment."""
        if self._around is None and self.parent is not None:
            self.foreign.reset_parent()
            around = importlib.import_module("torchrl.envs").TransformedEnv(
                _view()(self.parent), self.foreign
            )
            self._around = [around]  # in a list: assigned directly, torch would register it as a submodule
        return self.foreign

    def empty_cache(self) -> None:
        """Forget the TorchRL environment around the transform."""
        super().empty_cache()
        self._around = None

    def clone(self) -> ForeignTransform:
        """Return an independent copy that is in no container."""
        return ForeignTransform(self.foreign.clone())

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the TorchRL environment, which is made again when needed."""
        return {**super().__getstate__(), "_around": None}

    def _elsewhere(self, name: str) -> Any:
        """Return the attribute `name` of TorchRL's transform."""
        known = "foreign" in self.__dict__.get("_modules", {})
        return getattr(self.foreign, name) if known else super()._elsewhere(name)

    # ----------------------------------------------------------------- hooks
    def _call(self, tensordict: Record) -> Record:
        return self._placed()._call(tensordict)

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        return self._placed()._step(tensordict, next_tensordict)

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        return self._placed()._reset(tensordict, tensordict_reset)

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        return self._placed()._reset_env_preprocess(tensordict)

    def forward(self, tensordict: Any) -> Any:
        """Return the result of TorchRL's transform for a batch that is sampled from a buffer."""
        return self._placed()(tensordict)

    def inv(self, tensordict: TensorDictBase) -> Any:
        """Return the batch to write, or the inputs for the environment."""
        return self._placed().inv(tensordict)

    def writes_anything(self) -> bool:
        """Return True: the keys that TorchRL's transform writes aren't known."""
        return True

    def inverts(self) -> bool:
        """Return True: it isn't known whether TorchRL's transform changes inputs."""
        return True

    def dump(self, **kwargs: Any) -> None:
        """Let TorchRL's transform write out its recordings, such as a video."""
        self.foreign.dump(**kwargs)

    def close(self) -> None:
        """Close TorchRL's transform."""
        self.foreign.close()

    def set_missing_tolerance(self, mode: bool) -> None:
        """Set whether absent keys are skipped; otherwise they raise."""
        super().set_missing_tolerance(mode)
        self.foreign.set_missing_tolerance(mode)

    # ----------------------------------------------------------------- specs
    def _spec(self, role: str, spec: Any) -> Any:
        return self._converted(f"transform_{role}_spec", spec)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Return the spec of all outputs."""
        return self._converted("transform_output_spec", output_spec)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Return the spec of all inputs."""
        return self._converted("transform_input_spec", input_spec)

    def _converted(self, method: str, spec: Any) -> Any:
        return from_torchrl(getattr(self._placed(), method)(to_torchrl(spec)))

    def transform_env_device(self, device: torch.device | None) -> torch.device | None:
        """Return the device on the user's side."""
        return self.foreign.transform_env_device(device)

    def transform_env_batch_size(self, batch_size: torch.Size) -> torch.Size:
        """Return the batch size on the user's side."""
        return self.foreign.transform_env_batch_size(batch_size)


def adapted(foreign: Any) -> Transform:
    """Return a transform of this library for TorchRL's transform.

    The transforms of a `Compose` are converted one by one. A `TensorDictPrimer` becomes this library's primer. Every
    other transform is wrapped in a `ForeignTransform`.
    """
    kinds = importlib.import_module("torchrl.envs")
    if type(foreign) is kinds.Compose:
        return Compose(*(as_transform(link) for link in foreign))
    if type(foreign) is kinds.TensorDictPrimer:
        try:
            reset_key = foreign.reset_key
        except RuntimeError:  # not set: both libraries then take the environment's mask
            reset_key = None
        return TensorDictPrimer(
            from_torchrl(foreign.primers),
            random=foreign.random,
            default_value=None if foreign.random else foreign.default_value,
            reset_key=reset_key,
            expand_specs=foreign.expand_specs,
            single_default_value=foreign.single_default_value,
            call_before_env_reset=foreign.call_before_env_reset,
        )
    return ForeignTransform(foreign)


@functools.cache
def _view() -> type[Any]:
    """Return a class of TorchRL environments that forward to an environment of this library.

    It is made on demand, because TorchRL is optional.
    """
    base: Any = importlib.import_module("torchrl.envs").EnvBase

    class View(base):
        def __init__(self, env: Any) -> None:
            super().__init__(device=env.device, batch_size=env.batch_size)
            self.__dict__["wrapped_env"] = env
            self.observation_spec = to_torchrl(env.full_observation_spec)
            self.action_spec = to_torchrl(env.full_action_spec)
            self.reward_spec = to_torchrl(env.full_reward_spec)
            self.done_spec = to_torchrl(env.full_done_spec)
            self.state_spec = to_torchrl(env.full_state_spec)

        def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
            return self.wrapped_env.reset(tensordict, **kwargs)

        def _step(self, tensordict: Any) -> Any:
            return self.wrapped_env.step(tensordict.clone(recurse=False)).get("next")

        def _set_seed(self, seed: int | None) -> Any:
            return self.wrapped_env.set_seed(seed)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.__dict__["wrapped_env"], name)

    return View


FOREIGN.append(adapted)
