"""TorchRL's transforms in environments of ours: called on TensorDicts, with specs converted on both sides."""

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
    """A transform of TorchRL's.

    It is used, not copied. Its `parent` is an environment of TorchRL's that shows ours: specs are converted, steps and
    resets go through. Attributes that this class lacks are those of the transform.

    Args:
        foreign: the transform.
    """

    def __init__(self, foreign: Any) -> None:
        super().__init__()
        foreign.reset_parent()
        self.foreign: Any = foreign
        self._around: Any = None

    def _placed(self) -> Any:
        """Return the transform, in an environment of its own kind if this is in one."""
        if self._around is None and self.parent is not None:
            self.foreign.reset_parent()
            around = importlib.import_module("torchrl.envs").TransformedEnv(
                _view()(self.parent), self.foreign
            )
            self._around = [around]  # in a list: it isn't part of this transform's state
        return self.foreign

    def empty_cache(self) -> None:
        """Forget the environment that stands in for the parent."""
        super().empty_cache()
        self._around = None

    def clone(self) -> ForeignTransform:
        """Return an independent copy that is in no container."""
        return ForeignTransform(self.foreign.clone())

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without what stands in for the parent."""
        return {**super().__getstate__(), "_around": None}

    def _elsewhere(self, name: str) -> Any:
        """Return the transform's attribute of that name."""
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
        """Transform a batch that is read from a buffer."""
        return self._placed()(tensordict)

    def inv(self, tensordict: TensorDictBase) -> Any:
        """Return what is to be written of a batch, or what goes into the environment."""
        return self._placed().inv(tensordict)

    def writes_anything(self) -> bool:
        """Return True: what it writes isn't known."""
        return True

    def inverts(self) -> bool:
        """Return True: what it does to inputs isn't known."""
        return True

    def dump(self, **kwargs: Any) -> None:
        """Have it write out what it recorded, a video for instance."""
        self.foreign.dump(**kwargs)

    def close(self) -> None:
        """Tell it that the environment was closed, if it wants to know."""
        self.foreign.close()

    def set_missing_tolerance(self, mode: bool) -> None:
        """Set whether absent keys are passed over; if not, they raise."""
        super().set_missing_tolerance(mode)
        self.foreign.set_missing_tolerance(mode)

    # ----------------------------------------------------------------- specs
    def _spec(self, role: str, spec: Any) -> Any:
        return self._converted(f"transform_{role}_spec", spec)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Return the spec of all that comes out."""
        return self._converted("transform_output_spec", output_spec)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Return the spec of all that goes in."""
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
    """Return TorchRL's transform as one of ours: chains link by link, primers as primers of ours."""
    kinds = importlib.import_module("torchrl.envs")
    if type(foreign) is kinds.Compose:
        return Compose(*(as_transform(link) for link in foreign))
    if type(foreign) is kinds.TensorDictPrimer:
        try:
            reset_key = foreign.reset_key
        except RuntimeError:  # it follows from the environment, here as there
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
    """Return the class of TorchRL's environments that show one of ours."""
    base: Any = importlib.import_module("torchrl.envs").EnvBase

    class View(base):
        def __init__(self, env: Any) -> None:
            super().__init__(device=env.device, batch_size=env.batch_size)
            self.__dict__["shown"] = env
            self.observation_spec = to_torchrl(env.full_observation_spec)
            self.action_spec = to_torchrl(env.full_action_spec)
            self.reward_spec = to_torchrl(env.full_reward_spec)
            self.done_spec = to_torchrl(env.full_done_spec)
            self.state_spec = to_torchrl(env.full_state_spec)

        def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
            return self.shown.reset(tensordict, **kwargs)

        def _step(self, tensordict: Any) -> Any:
            return self.shown.step(tensordict.clone(recurse=False)).get("next")

        def _set_seed(self, seed: int | None) -> Any:
            return self.shown.set_seed(seed)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.__dict__["shown"], name)

    return View


FOREIGN.append(adapted)
