"""Transforms that map entries by a user's function: `UnaryTransform`, `Hash`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from tensordict import NonTensorStack, is_non_tensor
from torch import Tensor

from gleanrl.data.specs import NonTensor, TensorSpec, Unbounded
from gleanrl.envs.transforms.base import Keys
from gleanrl.envs.transforms.entrywise import EntryTransform
from gleanrl.errors import MissingKeyError, UnsupportedError


class UnaryTransform(EntryTransform):
    """Maps entries by a function, which may return a tensor or any object.

    The specs of the results are found by a call of `fn` on zeros. A tensor gives its shape and dtype; any other result
    is declared as `NonTensor`. Specs of inputs are only renamed.

    Args:
        in_keys: entries to read.
        out_keys: keys of the results.
        in_keys_inv: inputs that the environment, or the buffer, gets.
        out_keys_inv: keys that the user writes; None for `in_keys_inv`.
        fn: function of one entry.
        inv_fn: function of one input; None for `fn`.
        use_raw_nontensor: whether the functions get the `NonTensorData` that wraps an object, instead of the object.
    """

    on_rows = False
    on_host = False
    runs_functions = True

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
        *,
        fn: Callable[[Any], Any],
        inv_fn: Callable[[Any], Any] | None = None,
        use_raw_nontensor: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.fn, self.inv_fn = fn, fn if inv_fn is None else inv_fn
        self.use_raw_nontensor = use_raw_nontensor

    def _read(self, value: Any) -> Any:
        return value.data if is_non_tensor(value) and not self.use_raw_nontensor else value

    def _apply_transform(self, value: Any) -> Any:
        return self.fn(self._read(value))

    def _inv_apply_transform(self, value: Any) -> Any:
        return self.inv_fn(self._read(value))

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        made = self._apply_transform(spec.zero())
        if not isinstance(made, Tensor):
            return NonTensor(shape=spec.shape[:0] if self.parent is None else self.parent.batch_size)
        return Unbounded(made.shape, dtype=made.dtype, device=spec.device)


class Hash(UnaryTransform):
    """Adds a hash of each entry. Non-tensor data with batch dimensions gets one hash for each object, ``(*batch, …)``.

    Args:
        in_keys: entries to hash.
        out_keys: keys of the hashes.
        in_keys_inv: keys of the original values, which are looked up in `repertoire`. A batch of hashes gives a stack.
        out_keys_inv: keys of the hashes that the user writes.
        hash_fn: called as ``hash_fn(value)``, or ``hash_fn(value, seed)`` with a `seed`; returns a tensor. None for
            `reproducible_hash`.
        seed: see `hash_fn`.
        use_raw_nontensor: see `UnaryTransform`.
        repertoire: a dictionary that maps each hash, as a tuple, to the original value; filled in place, not copied.
            It also gets the zeros from which specs are derived. None keeps no values; with `in_keys_inv` it makes a new
            dictionary.

    Raises:
        MissingKeyError: at use, if the repertoire lacks the value of a hash that the user writes.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
        *,
        hash_fn: Callable[..., Tensor] | None = None,
        seed: Any = None,
        use_raw_nontensor: bool = False,
        repertoire: dict[tuple[int, ...], Any] | None = None,
    ) -> None:
        super().__init__(
            in_keys,
            out_keys,
            in_keys_inv,
            out_keys_inv,
            fn=self._hashed,
            inv_fn=self.get_input_from_hash,
            use_raw_nontensor=use_raw_nontensor,
        )
        self.hash_fn = self.reproducible_hash if hash_fn is None else hash_fn
        self.seed = seed
        self.repertoire = {} if repertoire is None and self.in_keys_inv else repertoire

    def _apply_transform(self, value: Any) -> Any:
        if is_non_tensor(value) and value.batch_size and not self.use_raw_nontensor:
            return torch.stack([self._apply_transform(one) for one in value.unbind(0)])
        return super()._apply_transform(value)

    def _hashed(self, value: Any) -> Tensor:
        made = self.hash_fn(value) if self.seed is None else self.hash_fn(value, self.seed)
        if self.repertoire is not None:
            # A copy, because the caller may reuse the memory of its entry
            original = value.clone() if isinstance(value, Tensor) else value
            self.repertoire[tuple(made.flatten().tolist())] = original
        return made

    def _inv_apply_transform(self, value: Any) -> Any:
        known = super()._inv_apply_transform(value)
        if known is not None:
            return known
        if value.ndim < 2:
            raise MissingKeyError(
                f"Hash: no value in the repertoire has the hash {value.tolist()}; hash the value first, or pass the "
                "repertoire that has it"
            )
        each = [self._inv_apply_transform(one) for one in value.unbind(0)]
        tensors = all(isinstance(one, Tensor) for one in each)
        return torch.stack(each) if tensors else NonTensorStack(*each)

    def get_input_from_hash(self, hash_tensor: Tensor) -> Any:
        """Return the original value of a hash; None if the repertoire doesn't have it.

        Raises:
            UnsupportedError: if there is no repertoire.
        """
        if self.repertoire is None:
            raise UnsupportedError(
                "Hash: expected a repertoire to look up the hash in, got None; pass repertoire={} to keep hashed values"
            )
        return self.repertoire.get(tuple(hash_tensor.flatten().tolist()))

    @staticmethod
    def reproducible_hash(string: Any, seed: Any = None) -> Tensor:
        """Return the SHA-256 digest of a string or of a tensor's bytes, ``(32,)`` uint8.

        It is the same in every process, unlike `hash`. Other objects are hashed by their ``str``. The ``str`` of a
        `seed` is put before the hashed bytes.
        """
        text = (
            string.detach().cpu().contiguous().numpy().tobytes()
            if isinstance(string, Tensor)
            else str(string).encode()
        )
        salt = b"" if seed is None else str(seed).encode()
        return torch.frombuffer(bytearray(hashlib.sha256(salt + text).digest()), dtype=torch.uint8)
